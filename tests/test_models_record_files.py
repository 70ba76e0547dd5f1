"""A saved record is the same, and no other file is taken for one."""

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_models_replay import patched_model, rollout, same
from tiny import ALL_KINDS

from custom_pypto import models


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_saved_record_is_the_same(kind, tmp_path):
    model = patched_model(kind)
    _, record = rollout(model, experts=True)
    record.save(tmp_path / "record")
    read = models.Record.load(tmp_path / "record")
    assert same(read, record) and read.made_for == record.made_for
    assert [*read.indices] == [*record.indices] and [*read.experts] == [*record.experts]
    with models.replay_indices(model, read, experts=True):
        pass


def written(path, record, change):
    """The file of ``record`` with changed tensors and metadata."""
    record.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors, metadata = change(load_file(path), metadata)
    save_file(tensors, path, metadata)


FILES = {
    "of-another-format": (
        lambda x, facts: (x, {"custom_pypto.Record 2": facts["custom_pypto.Record 1"]}),
        "without the header 'custom_pypto.Record 1'; another version",
    ),
    "of-another-program": (lambda x, facts: (x, {}), "without the header"),
    "of-no-facts": (lambda x, facts: (x, {"custom_pypto.Record 1": "{"}), "is damaged"),
    "of-other-tensors": (
        lambda x, facts: (x | {"logits.0": x["indices.0"].clone()}, facts),
        "is damaged",
    ),
    "of-no-number": (
        lambda x, facts: (x | {"experts.a": x["experts.1"].clone()}, facts),
        "is damaged",
    ),
}


@pytest.mark.parametrize("change, message", FILES.values(), ids=FILES)
def test_another_file_is_rejected(change, message, tmp_path):
    _, record = rollout(patched_model(), experts=True)
    written(tmp_path / "record", record, change)
    with pytest.raises(ValueError, match=f"Record.load: .*{message}"):
        models.Record.load(tmp_path / "record")


def test_a_short_or_missing_file_is_rejected(tmp_path):
    _, record = rollout(patched_model(), experts=True)
    record.save(tmp_path / "record")
    whole = (tmp_path / "record").read_bytes()
    for size in (0, 7, len(whole) // 2, len(whole) - 1):
        (tmp_path / "record").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="Record.load: .* is damaged"):
            models.Record.load(tmp_path / "record")
    with pytest.raises(FileNotFoundError):
        models.Record.load(tmp_path / "none")

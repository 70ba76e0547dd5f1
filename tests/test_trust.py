"""A checkpoint is data: what it brings along is rejected or passed over, and never run."""

import ast
import builtins
import json
import pickle
import re
from pathlib import Path

import pytest
from loading_harness import edit_json
from tiny import KINDS, representatives, tiny_model

from custom_pypto import models

REPOSITORY = Path(__file__).parents[1]


class Marked:
    """Unpickling this leaves a file behind."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(params=representatives(KINDS))
def checkpoint(request, tmp_path):
    path = tmp_path / "checkpoint"
    tiny_model(request.param).save_pretrained(path)
    return path


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Is there once code of the checkpoint has run. Whoever is asked whether it may answers yes."""
    monkeypatch.setattr(builtins, "input", lambda *prompt: "y")
    marker = tmp_path / "executed"
    pickle.loads(pickle.dumps(Marked(marker)))
    assert marker.exists()  # or the tests below would prove nothing
    marker.unlink()
    return marker


def bring_code(path, marker):
    """Modules for every name that a config may give to its own code."""
    code = f"from pathlib import Path\n\nPath({str(marker)!r}).touch()\n"
    (path / "theirs.py").write_text(
        code + "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'theirs'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    (path / "custom_generate").mkdir()
    (path / "custom_generate/generate.py").write_text(code + "def generate(model, **kwargs): ...\n")
    edit_json(
        path / "config.json",
        auto_map={
            "AutoConfig": "theirs.Config",
            "AutoModel": "theirs.Model",
            "AutoModelForCausalLM": "theirs.Model",
        },
    )


SHARD, INDEX = "pytorch_model-00001-of-00001.bin", "model.safetensors.index.json"
INCOMPLETE = "is not a complete safetensors file"
PICKLES = {  # a pickle by this name, an index beside it, and what is said
    "alone": ("pytorch_model.bin", None, r"model\.safetensors is missing"),
    "in-shards": (SHARD, "pytorch_model.bin.index.json", r"model\.safetensors is missing"),
    "in-the-index": ("weights.bin", INDEX, rf"weights\.bin .* {INCOMPLETE}"),
    "by-the-name-of-safetensors": ("model.safetensors", None, rf"model\.safet.* {INCOMPLETE}"),
}


@pytest.mark.parametrize("file, index, message", PICKLES.values(), ids=PICKLES)
def test_pickled_weights_are_rejected_and_not_opened(file, index, message, checkpoint, marker):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / file).write_bytes(pickle.dumps(Marked(marker)))
    if index:
        (checkpoint / index).write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        models.load(checkpoint)
    assert not marker.exists()


def test_pickled_weights_beside_safetensors_are_passed_over(checkpoint, marker):
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Marked(marker)))
    models.load(checkpoint)
    assert not marker.exists()


def test_code_of_a_checkpoint_of_ours_is_passed_over(checkpoint, marker):
    bring_code(checkpoint, marker)
    model = models.load(checkpoint)
    assert type(model).__name__ in models.architectures.ARCHITECTURES
    model.generate(max_new_tokens=2)
    assert not marker.exists()


def test_a_checkpoint_that_needs_code_of_its_own_is_rejected(checkpoint, marker):
    bring_code(checkpoint, marker)
    edit_json(checkpoint / "config.json", model_type="theirs")
    with pytest.raises(ValueError, match="trust_remote_code"):
        models.load(checkpoint)
    assert not marker.exists()


# ---- our own code ---------------------------------------------------------------------------

AUTO = re.compile(r"\bAuto\w+\.from_pretrained$")
UNPICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def unsafe_places(path: Path) -> list[str]:
    """Where a file unpickles, or lets a checkpoint bring code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        unsafe = any(name.partition(".")[0] in UNPICKLERS for name in names)
        unsafe |= isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            unsafe |= ast.unparse(node.value) != "False"
        if isinstance(node, ast.Call) and AUTO.search(ast.unparse(node.func)):  # asks if not told
            unsafe |= "trust_remote_code" not in {keyword.arg for keyword in node.keywords}
        if unsafe:
            found.append(f"{path.name}:{node.lineno}")
    return found


@pytest.mark.parametrize(
    "folder",
    ["custom_pypto", "models", "examples", "benchmarks", "integrations/vllm/custom_pypto_vllm"],
)
def test_nothing_unpickles_or_trusts_code_from_elsewhere(folder):
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    assert files
    assert [place for file in files for place in unsafe_places(file)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "AutoConfig.from_pretrained(path)",
        "transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trusted)",
    ],
)
def test_an_unsafe_line_is_found(line, tmp_path):
    (tmp_path / "a.py").write_text(line + "\n")
    assert len(unsafe_places(tmp_path / "a.py")) == 1

"""Models that load with stored weights in bfloat16, and files that models are saved in."""

import pytest
import torch
from loading_harness import published_in_fp8  # noqa: F401
from tiny import tiny_model, token_ids
from transformers import AutoModelForCausalLM

from custom_pypto import models
from custom_pypto.models.weights.modules import SCALE, stored_parameters


def test_scales_keep_their_dtype_in_a_model_in_bfloat16(fp8_checkpoint, tmp_path):
    """transformers keeps parameters in float32 by parts of their names: of Hy4 by "scale"."""
    model = models.load(fp8_checkpoint, weights="int4")
    model.save_pretrained(tmp_path)
    for each in (model, models.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        scales = [name for name in stored_parameters(each) if name.endswith(SCALE)]
        assert {each.get_parameter(name).dtype for name in scales} == {torch.bfloat16}
    assert model.generate(token_ids(1, 20), max_new_tokens=2).shape == (1, 22)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_who_may_read_new_files_may_read_a_saved_model(weights, tmp_path):
    """safetensors makes files for their user alone."""
    models.use_custom_pypto(tiny_model()).save_pretrained(tmp_path / "source")
    model = models.load(tmp_path / "source", weights=weights)
    model.save_pretrained(tmp_path / "again", max_shard_size="300KB")
    (tmp_path / "usual").touch()
    files = [*(tmp_path / "source").iterdir(), *(tmp_path / "again").iterdir()]
    modes = {str(file): file.stat().st_mode for file in files}
    assert len(modes) > 6 and set(modes.values()) == {(tmp_path / "usual").stat().st_mode}, modes

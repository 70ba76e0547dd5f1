"""What tests of loading share: checkpoints, changes of them, and what is in them."""

import json
import re

import pytest
import torch
from published import FLOAT32, V4, kind_of, published, true_weights, weights_on_disk
from safetensors.torch import load_file, save_file
from tiny import CLASSES, KINDS, tiny_model, token_ids

INDEX = "model.safetensors.index.json"
LOADED_KINDS = [*KINDS, V4]
# what upstream keeps in float32; of a model in float16, some weights more
KEPT = FLOAT32 | {V4: f"{FLOAT32[V4]}|norm"}
for kind, (_, model_class) in CLASSES.items():
    lists = [getattr(base, "_keep_in_fp32_modules_strict", None) for base in model_class.__mro__]
    if any("gate.weight" in names for names in lists if names):  # the routers of a newer one
        KEPT[kind] += r"|\.gate\.weight"
FROM_FLOAT16 = r"compressor\.(wkv|wgate)|weights_proj"


@pytest.fixture(scope="module", params=LOADED_KINDS, name="checkpoint")
def saved_checkpoint(request, tmp_path_factory):
    """A sharded checkpoint and the logits of the model it was saved from."""
    path, model = tmp_path_factory.mktemp(request.param), tiny_model(request.param)
    model.save_pretrained(path, max_shard_size="300KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path, logits(model)


@pytest.fixture(scope="module", params=LOADED_KINDS, name="fp8_checkpoint")
def published_in_fp8(request, tmp_path_factory):
    return published(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", name="fp4_checkpoint")
def published_in_fp4(tmp_path_factory):
    return published(tmp_path_factory.mktemp(V4), V4)


@torch.no_grad()
def logits(model):
    return model(token_ids(1, 7), use_cache=False).logits  # 7 tokens: nothing to select


def edit_json(file, **changes):
    """Sets these keys; None: removes it."""
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: it for key, it in values.items() if it is not None}))


def edit_tensor(path, pattern, edit, *, listed=True):
    """Puts ``edit(tensor)`` in the place of the first tensor with such a name; None: nothing.

    Args:
        listed: whether the index has it then.
    Returns:
        The name of the tensor, its file, and the shapes before and after.
    """
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    name, shard = next(item for item in weight_map.items() if re.search(pattern, item[0]))
    tensors = load_file(path / shard)
    before = tensors.pop(name)
    if (after := edit(before)) is not None:
        tensors[name] = after.clone()
    save_file(tensors, path / shard, metadata={"format": "pt"})
    if not listed:
        del weight_map[name]
        edit_json(path / INDEX, weight_map=weight_map)
    shapes = [None if it is None else re.escape(str([*it.shape])) for it in (before, after)]
    return {"name": name, "shard": shard, "before": shapes[0], "after": shapes[1]}


def assert_equal_to_the_bit(model, path, dtype=torch.bfloat16):
    true, found = true_weights(path, torch.float32), weights_on_disk(model)
    pattern = KEPT[kind_of(model.config)]
    if dtype == torch.float16:
        pattern += f"|{FROM_FLOAT16}"
    kept = {name for name in found if re.search(pattern, name)}
    assert kept and all(found[name].dtype == torch.float32 for name in kept)
    for name, tensor in found.items():
        want = true[name]
        if want.is_floating_point() and name not in kept:
            want = want.to(dtype)
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name

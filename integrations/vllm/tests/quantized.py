"""Checkpoints with quantized weights, and what these weights stand for."""

import json
import re
import shutil
from pathlib import Path

import torch
from checkpoints import write_config
from compressed_tensors.compressors.pack_quantized.helpers import (
    pack_to_int32,
    unpack_from_int32,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BLOCK = 32, 128
# what vLLM merges into a plain layer, or keeps plain itself
PLAIN = [r"re:.*indexer\.(wk|weights_proj)$", r"re:.*mlp\.gate$", "lm_head"]
EXPERTS_ALONE = [r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.\w+_proj$", *PLAIN]


def rounded(weight: Tensor, groups: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Integers of -largest - 1 to largest and bfloat16 scales, of ``weight`` seen as groups."""
    scales = (groups.abs().amax(-1, keepdim=True) / largest).bfloat16().float()
    return (groups / scales).round().clamp(-largest - 1, largest), scales


def int8(weight: Tensor):
    values, scales = rounded(weight, weight, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def packed(weight: Tensor, bits: int, group: int):
    grouped = weight.unflatten(-1, (-1, group))
    values, scales = rounded(weight, grouped, 2 ** (bits - 1) - 1)
    stored = {
        "weight_packed": pack_to_int32(values.flatten(-2).to(torch.int8), bits),
        "weight_scale": scales[..., 0].bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return stored, (values * scales).flatten(-2)


def blocks(weight: Tensor):
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    whole = torch.zeros(rows * BLOCK, columns * BLOCK)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    tiles = whole.view(rows, BLOCK, columns, BLOCK)
    # powers of two, as DeepSeek's are: vLLM rounds the indexer's wk to bfloat16
    scales = (tiles.abs().amax((1, 3), keepdim=True) / 448).log2().ceil().exp2()
    values = (tiles / scales).to(torch.float8_e4m3fn)
    exact = (values.float() * scales).view_as(whole)
    stored = {
        "weight": values.view_as(whole)[: weight.shape[0], : weight.shape[1]].contiguous(),
        "weight_scale_inv": scales[:, 0, :, 0].contiguous(),
    }
    return stored, exact[: weight.shape[0], : weight.shape[1]].contiguous()


def compressed_tensors(weights: dict, activations: dict | None, ignore: list[str]) -> dict:
    """``quantization_config`` of config.json."""
    form = "pack-quantized" if activations is None else "int-quantized"
    group = dict(targets=["Linear"], weights=weights, input_activations=activations)
    return dict(
        quant_method="compressed-tensors",
        format=form,
        quantization_status="compressed",
        config_groups={"group_0": group | {"format": form}},
        ignore=ignore,
    )


INT8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
TOKEN = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
PUBLISHED_FP8 = dict(
    quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
)
SCHEMES = {
    "W8A8": (int8, INT8, TOKEN),
    "W8A16": (lambda weight: packed(weight, 8, weight.shape[1]), INT8, None),
    "W4A16": (lambda weight: packed(weight, 4, GROUP), INT4, None),
}


def quantize(source: Path, scheme: str, ignore=PLAIN) -> tuple[Path, Path]:
    """The checkpoint ``source`` with quantized weights, and with what they stand for.

    Args:
        scheme: of :data:`SCHEMES`, or ``fp8``, which vLLM reads without a list of what is plain
            but for wk, and so quantizes that, too.
        ignore: names and patterns of compressed-tensors.
    """
    if scheme == "fp8":
        ignore = [name for name in ignore if "wk" not in name] + [r"re:.*weights_proj$"]
        quantized, config = blocks, PUBLISHED_FP8
    else:
        quantized, *arguments = SCHEMES[scheme]
        config = compressed_tensors(*arguments, ignore)
    plain = [re.compile(name.removeprefix("re:")) for name in ignore]
    stored, exact = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        exact[name] = stored[name] = tensor
        linear = tensor.dim() == 2 and "embed" not in name
        if linear and not any(pattern.fullmatch(layer) for pattern in plain):
            del stored[name]
            of_layer, exact[name] = quantized(tensor)
            stored |= {f"{layer}.{key}": value for key, value in of_layer.items()}
    folders = []
    for ending, weights in (("", stored), ("-exact", exact)):
        folder = source.with_name(f"{source.name}-{scheme}{ending}")
        shutil.copytree(source, folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        folders.append(folder)
    write_config(folders[0], quantization_config=config)
    return tuple(folders)


def exact_of(checkpoint: Path) -> Path:
    """What a checkpoint in the format ``pack-quantized`` stands for."""
    config = json.loads((checkpoint / "config.json").read_text())
    bits = config.pop("quantization_config")["config_groups"]["group_0"]["weights"]["num_bits"]
    weights = load_file(checkpoint / "model.safetensors")
    for name in [name for name in weights if name.endswith("_packed")]:
        name = name.removesuffix("_packed")
        packed, scales, shape = (weights.pop(f"{name}_{x}") for x in ("packed", "scale", "shape"))
        values = unpack_from_int32(packed, bits, torch.Size(shape.tolist())).float()
        grouped = values.unflatten(-1, (scales.shape[1], -1)) * scales.float()[..., None]
        weights[name] = grouped.flatten(-2)
    folder = checkpoint.with_name(f"{checkpoint.name}-exact")
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder

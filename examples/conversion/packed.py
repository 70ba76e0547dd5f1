"""Linear layers and experts in the format ``pack-quantized`` of compressed-tensors, which vLLM
reads: W8A16 and W4A16, symmetric."""

import re

import torch

from custom_pypto.models.loading.parameters import dtypes_of
from custom_pypto.models.loading.plan import resolve_dtype
from custom_pypto.models.weights.choice import PARTS, kinds_of
from custom_pypto.weight_formats import WEIGHT_FORMATS, in_pairs

from .plain import Plain, layer_of

FORMAT, BITS = "compressed-tensors", {"int8": 8, "int4": 4}
# of vLLM, with layers whose names are those on disk
MODELS = ("deepseek_v32", "glm_moe_dsa")
# what models.load keeps plain, what vLLM merges into a plain layer, and what vLLM makes plain of a
# layer that drafts
IGNORED = [
    "lm_head",
    r"re:.*kv_b_proj$",
    r"re:.*mlp\.gate$",
    r"re:.*indexer\.(wk|weights_proj)$",
    r"re:.*\.(eh_proj|embed_tokens|shared_head\.head)$",
]
PLAIN = re.compile("|".join(name.removeprefix("re:") for name in IGNORED))
ROWS = 256  # of a matrix that are rounded at once


class Packed(Plain):
    """Tensors keep their names, but for the ends of those of quantized weights.

    Args:
        kind: int8, rounded as by ``models.load``, or int4.
        layers: the first ones alone; None: all, and those that draft.
    """

    what = f"--format {FORMAT}"

    def __init__(self, source, kind, layers, max_shard_size):
        super().__init__(source, layers, None, max_shard_size, weights=kind, format=FORMAT)
        if self.config["model_type"] not in MODELS:
            raise ValueError(
                f"SOURCE must be one of {', '.join(MODELS)} for {self.what}, got "
                f"{self.config['model_type']}, of which vLLM serves the published format alone"
            )
        self.bits = BITS[kind]
        dtype = resolve_dtype(None, self.model.config, self.checkpoint)
        on_disk, dtypes = self.checkpoint.dtypes(), dtypes_of(self.model, dtype)
        kinds = kinds_of(self.model, dict.fromkeys(PARTS, kind), on_disk, dtypes)
        chosen = {
            of_layer(part)
            for name, parts in self.checkpoint.parts.items()
            if name.rpartition(".")[0] in kinds and not name.endswith(".bias")
            for part in parts
        }
        # by name, since layers that draft are not in the model
        self.packed = {
            name
            for name in self.stored
            if of_layer(name) in chosen and not PLAIN.fullmatch(name.removesuffix(".weight"))
        }
        self.check_shapes()
        widths = {self.stored[name].shape[1] for name in self.packed}
        groups = WEIGHT_FORMATS["int4"].groups
        self.group = next(group for group in groups if all(x % group == 0 for x in widths))
        self.config["quantization_config"] = self.quantization()

    def check_shapes(self):
        for name, (_, _, shape) in self.stored.items():
            layer = name.removesuffix(".weight")
            if name in self.packed and len(shape) != 2:
                raise ValueError(
                    f"SOURCE must have experts one by one for {self.what}, as published, got "
                    f"{name} of shape {shape}"
                )
            linear = name.endswith(".weight") and len(shape) == 2 and layer_of(name) >= 0
            if linear and name not in self.packed and not PLAIN.fullmatch(layer):
                raise ValueError(
                    f"{name} must have a multiple of 32 columns for {self.what}, got {shape}"
                )

    def quantization(self):
        """``quantization_config`` of config.json."""
        form = {"strategy": "channel"}
        if self.bits == 4:
            form = {"strategy": "group", "group_size": self.group}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights | form, "input_activations": None}
        return {
            "quant_method": FORMAT,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"format": "pack-quantized"}},
            "ignore": IGNORED,
        }

    def outputs(self, weight):
        if weight not in self.packed:
            return [weight]
        return [f"{weight}_{end}" for end in ("packed", "scale", "shape")]

    def size(self, name):
        if name not in self.packed:
            return super().size(name)
        rows, columns = self.stored[name].shape
        scales = 4 if self.bits == 8 else 2 * columns // self.group
        return rows * (columns * self.bits // 8 + scales) + 16

    def tensors(self, weight):
        if weight not in self.packed:
            return super().tensors(weight)
        shape = self.stored[weight].shape
        codes, scales = (self.int8 if self.bits == 8 else self.int4)(weight, *shape)
        return [codes.view(torch.int32), scales, torch.tensor(shape)]

    def int8(self, weight, rows, columns):
        codes = torch.empty(rows, columns, dtype=torch.int8)
        scales = torch.empty(rows, dtype=torch.float32)
        self.reader.convert(weight, codes, scales)
        return codes.view(torch.uint8).bitwise_xor_(0x80), scales[:, None]

    def int4(self, weight, rows, columns):
        values = torch.empty(rows, columns, dtype=torch.float32)
        self.reader.convert(weight, values)
        done = [rounded(some.unflatten(1, (-1, self.group))) for some in values.split(ROWS)]
        codes, scales = zip(*done, strict=True)
        return torch.cat(codes), torch.cat(scales)


def rounded(groups):
    """Codes, two of 4 bits in a byte, and scales in bfloat16 of ``[rows, groups, values]``.

    A step is 2/15 of a group's largest value, which is half a step beyond the last code.
    """
    scales = (groups.abs().amax(-1) / 7.5).bfloat16()
    steps = groups / scales.float().where(scales != 0, 1)[..., None]
    return in_pairs((steps.round() + 8).clamp(0, 15).flatten(1)), scales


def of_layer(name):
    """The name of a tensor without the number of its layer."""
    return re.sub(r"layers\.\d+\.", "layers.", name, count=1)

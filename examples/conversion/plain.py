"""A published checkpoint in bfloat16, or a part of any: tensors keep their names."""

import functools
import json
import math
import re

import torch

from custom_pypto import models
from custom_pypto.models.architectures import supported_model
from custom_pypto.models.loading.checkpoint import (
    check_dtypes,
    check_scales,
    check_shards,
    first_layers,
    stored_tensors,
)
from custom_pypto.models.loading.plan import check_scale_values
from custom_pypto.models.loading.reader import Reader
from custom_pypto.models.weights import published

from .folder import CONFIG, Conversion

# layers of the text model, and layers that draft: mtp, mtp_layers, mtp_dspark
LAYER = re.compile(r"(?:model\.|language_model\.)*(?:layers\.(\d+)|mtp\w*)\.")


def layer_of(name):
    """The layer of a tensor; -1 is none of the text model, infinity one that drafts."""
    found = LAYER.match(name)
    if found is None:
        return -1
    return math.inf if found[1] is None else int(found[1])


class Plain(Conversion):
    """Quantized tensors become bfloat16, others stay as they are.

    Args:
        layers: the first ones alone; None: all, and those that draft.
        experts: the first ones of each layer alone; None: all.
        more: further options.
    """

    what = "a conversion to bfloat16"

    def __init__(self, source, layers, experts, max_shard_size, **more):
        options = {"layers": layers, "experts": experts, "max_shard_size": max_shard_size}
        super().__init__(source, options | more)
        self.layers, self.experts = layers, experts
        parsed, model_class = supported_model("SOURCE", source.folder)
        original = json.loads((source.folder / CONFIG).read_text())
        if "text_config" in original:
            raise ValueError(
                f"SOURCE must be a model of text for {self.what}, got a {model_class.__name__}; "
                "--weights without --format takes it"
            )
        self.blocks = published.blocks_of(original)
        self.config = self.new_config(original)
        if layers is not None:
            parsed = type(parsed).from_dict(first_layers(parsed.to_dict(), layers, "--layers"))
        if experts is not None:
            check_experts(experts, parsed)
        with torch.device("meta"):
            self.model = models.use_custom_pypto(model_class._from_config(parsed))
        self.checkpoint = check_shards(source, self.model, self.blocks, {})

        self.stored = stored_tensors(source, self.wants, self.blocks)
        check_dtypes(self.stored, self.blocks)
        check_scales(self.stored, self.blocks)
        self.reader = Reader(self.stored, self.blocks)

    def new_config(self, original):
        # transformers' own name of a file of the source, which the target may not have
        left_out = published.CONFIG | {"transformers_weights"}
        config = {name: it for name, it in original.items() if name not in left_out}
        if self.blocks:
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
        if self.layers is not None:
            config = first_layers(config, self.layers, "--layers")
            if "num_nextn_predict_layers" in config:
                config["num_nextn_predict_layers"] = 0
        if self.experts is not None:
            config["n_routed_experts"] = self.experts
        return config

    def wants(self, name):
        if self.layers is not None and layer_of(name) >= self.layers:
            return False
        expert = re.search(r"\.experts\.(\d+)\.", name)
        return self.experts is None or not expert or int(expert[1]) < self.experts

    def cuts(self, name):
        """Whether ``name`` has a row for each expert: the router's weight and bias, and experts
        that the checkpoint stacks."""
        stacked = r"\.(mlp|ffn)\.(gate\.(?!tid2eid)|experts\.[a-z])"
        return self.experts is not None and re.search(stacked, name) is not None

    def files(self):
        return {stored.file for stored in self.stored.values()}

    @functools.cached_property
    def sizes(self):
        quantized = filter(self.reader.is_quantized, self.stored)
        scales = {published.scale_name(name, self.stored) for name in quantized}
        names = sorted(self.stored.keys() - scales, key=natural)
        return {name: self.size(name) for name in names}

    def size(self, name):
        _, dtype, (rows, *columns) = self.stored[name]
        rows = self.experts if self.cuts(name) else rows
        others = published.FLOATS | published.INTEGERS
        dtype = torch.bfloat16 if self.reader.is_quantized(name) else others[dtype]
        return rows * torch.Size(columns).numel() * dtype.itemsize

    def tensors(self, weight):
        tensor = self.reader.read(weight)
        if self.cuts(weight):
            tensor = tensor[: self.experts].clone()
        elif self.experts is not None and weight.endswith("tid2eid"):
            tensor %= self.experts  # the experts of each token id
        return [tensor]

    def check_values(self):
        check_scale_values(self.model, self.checkpoint, self.reader, self.reader.tensors, None)

    def texts(self):
        return {CONFIG: json.dumps(self.config, indent=2) + "\n"}


def natural(name):
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return [part.zfill(8) if part.isdigit() else part for part in name.split(".")]


def check_experts(experts, config):
    """The router takes the best ``topk_group`` groups of experts, each by the sum of its best two,
    and then the best ``num_experts_per_tok`` in them; without groups the best of all."""
    groups = getattr(config, "n_group", None)

    def works(count):
        if groups is None:
            return count >= config.num_experts_per_tok
        group, rest = divmod(count, groups)
        enough = group * config.topk_group >= config.num_experts_per_tok
        return rest == 0 and group >= 2 and enough

    allowed = [str(count) for count in range(1, config.n_routed_experts + 1) if works(count)]
    if str(experts) not in allowed:
        listed = ", ".join([*allowed[:3], "...", allowed[-1]] if len(allowed) > 4 else allowed)
        grouping = "" if groups is None else f"n_group {groups}, topk_group {config.topk_group}, "
        raise ValueError(
            f"--experts must be one of {listed} ({grouping}num_experts_per_tok "
            f"{config.num_experts_per_tok}), got {experts}"
        )

"""Linear layers and experts in a stored format: what ``models.load(source, weights=...)`` and its
``save_pretrained`` write, one weight at a time."""

import functools
import tempfile
from pathlib import Path

from custom_pypto.models.architectures import supported_model
from custom_pypto.models.loading.checkpoint import stored_tensors
from custom_pypto.models.loading.parameters import Parameter, dtypes_of
from custom_pypto.models.loading.plan import check_scale_values, plan_for
from custom_pypto.models.loading.request import Request
from custom_pypto.models.mtp.layer import has_mtp
from custom_pypto.models.weights.modules import SCALE
from custom_pypto.models.weights.on_disk import StoredWeight

from .folder import Conversion


class Stored(Conversion):
    """Tensors have the names of the model, experts of a layer are one.

    Args:
        kind: the format, of ``models.load``.
        layers: the first ones alone; None: all, and an MTP layer that ``models.load`` can load.
    """

    def __init__(self, source, kind, layers, max_shard_size):
        options = {"weights": kind, "layers": layers, "max_shard_size": max_shard_size}
        super().__init__(source, options)
        mtp = layers is None and has_mtp(*supported_model("SOURCE", source.folder))
        if mtp:  # the config of a saved model says so even if the layer was not loaded
            mtp = bool(stored_tensors(source, lambda name: name.endswith(".enorm.weight"), {}))
        asked = Request.of("auto", layers, None, False, False, kind, None, mtp)
        self.plan = plan_for(source, asked)
        if not self.plan.kinds:
            raise ValueError(
                f"SOURCE must have linear layers or experts that --weights {kind} keeps, got "
                f"{source.folder} without; omit --weights"
            )
        self.dtypes = dtypes_of(self.plan.skeleton, self.plan.dtype)

    def files(self):
        return {tensor.file for tensor in self.plan.checkpoint.tensors.values()}

    def outputs(self, weight):
        scales = weight + SCALE
        return [weight, scales] if scales in self.plan.parameters else [weight]

    @functools.cached_property
    def sizes(self):
        state, sizes = self.plan.skeleton.state_dict(), {}
        for name, found in self.plan.parameters.items():
            if isinstance(found, Parameter) or found.which == "weight":
                made = self.outputs(name)
                sizes[name] = sum(state[x].numel() * self.dtypes[x].itemsize for x in made)
        return sizes

    def tensors(self, weight):
        found = self.plan.parameters[weight]
        if isinstance(found, Parameter):
            return [found[...].to(self.dtypes[weight])]
        planned, everything = found.weight, slice(None)
        # of its own: the planned one would keep its scales in memory
        stored = StoredWeight(planned.reader, planned.parts, planned.shape, planned.kind)
        values = stored.weight(everything)
        return [values, stored.scales(everything)][: len(self.outputs(weight))]

    def index(self):
        index = super().index()
        index["metadata"]["total_parameters"] = self.plan.skeleton.num_parameters()
        return index

    def check_values(self):
        plan = self.plan
        check_scale_values(plan.skeleton, plan.checkpoint, plan.reader, plan.reader.tensors, None)

    def texts(self):
        plan, config = self.plan, self.plan.config
        # as transformers does before it saves a model
        config.dtype = str(plan.dtype).removeprefix("torch.")
        config.architectures = [plan.model_class.__name__]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            if generation := plan.generation_config or plan.skeleton.generation_config:
                generation.save_pretrained(folder)
            return {file.name: file.read_text() for file in sorted(Path(folder).iterdir())}

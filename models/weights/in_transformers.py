"""Stored weights as a quantization method of transformers, which then creates the modules of
:mod:`.modules` while it loads a model, and records them in ``config.json``."""

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from .modules import convert, drop_experts, stored_parameters
from .published import METHOD


class StoredWeights(QuantizationConfigMixin):
    """The ``quantization_config`` of a model with stored weights.

    Args:
        modules: names of linear layers and experts, by format.
        streamed: modules of experts that stay in their files, with the number on this rank.
    """

    def __init__(
        self,
        modules: dict[str, list[str]],
        quant_method: str = METHOD,
        streamed: dict[str, int] | None = None,
    ):
        self.quant_method, self.modules = quant_method, modules
        if streamed:  # else no key of a saved config.json
            self.streamed = streamed

    @classmethod
    def of(cls, kinds: dict[str, str], streamed: dict[str, int]) -> "StoredWeights":
        """From the format of each module."""
        modules: dict[str, list[str]] = {}
        for name, kind in kinds.items():
            modules.setdefault(kind, []).append(name)
        return cls(modules, streamed=streamed)

    @property
    def kinds(self) -> dict[str, str]:
        """The format of each module."""
        return {name: kind for kind, names in self.modules.items() for name in names}


class StoredWeightsQuantizer(HfQuantizer):
    """Creates the modules; their weights are loaded like any others."""

    #: whether ranks share the model: gloo gathers no float8
    shared = False

    def _process_model_before_weight_loading(self, model, **kwargs):
        names = {name for name, _ in model.named_modules()}
        kinds = self.quantization_config.kinds.items()
        # transformers makes no MTP layer, which the files may have
        convert(model, {name: kind for name, kind in kinds if name in names})
        drop_experts(model, self.streamed)
        keep_formats(model)
        return model

    @property
    def streamed(self) -> dict[str, int]:
        return getattr(self.quantization_config, "streamed", {})

    def is_serializable(self) -> bool:
        if self.streamed:
            raise ValueError(
                "save_pretrained: the experts of a model that was loaded with memory are in its "
                "files; copy their folder, or load the model without memory"
            )
        if self.shared:
            raise ValueError(
                "save_pretrained: the experts of a model with stored weights must be in one "
                "process, got one that ranks share; examples/convert_checkpoint.py --weights "
                "writes such a model"
            )
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def keep_formats(model) -> None:
    """Has transformers cast no stored weight or scale to float32: of Hy4 it would cast whatever has
    ``scale`` in its name."""
    stored = stored_parameters(model)
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        parts = getattr(model, attribute)
        if both := {part for part in parts if any(part in name for name in stored)}:
            others = {n for n in model.state_dict() if any(part in n for part in both)} - stored
            setattr(model, attribute, parts - both | others)


# not by transformers' decorators, which reject a second registration: a notebook reloads modules
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = StoredWeights
AUTO_QUANTIZER_MAPPING[METHOD] = StoredWeightsQuantizer


def stored_kinds(config) -> dict[str, str]:
    """The formats of the modules of a saved model, by name."""
    described = getattr(config, "quantization_config", None)
    if described is None or described.get("quant_method") != METHOD:
        return {}
    return StoredWeights.from_dict(described).kinds

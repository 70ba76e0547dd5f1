"""What :func:`models.use_custom_pypto` did to a model, as one record: applied and undone as a
whole."""

from dataclasses import dataclass, field
from functools import partial

from torch import nn

from . import generation
from .dequantization import Dequantized, restore
from .indexer_loss import Option, add_indexer_loss, begin_indexer_loss
from .one_op import Head
from .patched import patched_attentions, text_model, upstream_class
from .projection import change_class, is_sharded
from .regions import Regions, get_compiled_call, valid_auto_compile_criteria
from .sharing import gather_sharded_state_dict_for_save

# of generate() and save_pretrained(), which a patched model has in place of its class's
METHODS = {
    "_extract_generation_mode_kwargs": generation.extract_generation_mode_kwargs,
    "_prepare_cache_for_generation": generation.prepare_cache_for_generation,
    "_prepare_position_ids_for_generation": generation.prepare_position_ids_for_generation,
    "create_masks_for_generate": generation.create_masks_for_generate,
    "_valid_auto_compile_criteria": valid_auto_compile_criteria,
    "get_compiled_call": get_compiled_call,
    "gather_sharded_state_dict_for_save": gather_sharded_state_dict_for_save,
}


@dataclass
class Patch:
    """The attribute ``_custom_pypto`` of a patched text model."""

    training: str  # the path of training forwards
    indexer_loss: Option
    cache: dict  # options of the caches that forwards and generate() create
    sizes: dict  # of patched.sizes
    dequantized: list[Dequantized]
    context_parallel: bool = False  # whether ranks share prompts
    told: set[str] = field(default_factory=set)  # why it trained on the upstream path, if logged
    regions: Regions | None = None  # of the latest compile_config of generate()
    hooks: tuple = ()

    def apply(self, model, attentions: dict[int, nn.Module], paged: type) -> None:
        """In place of an earlier patch, if there is one. Nothing here can fail."""
        text = text_model(model)
        if (earlier := patch_of(model)) is not None:
            earlier.remove_hooks(model)
            self.dequantized = earlier.dequantized + self.dequantized
        for attention in attentions.values():
            change_class(attention, paged)
        for module in list(text.modules()):
            for cls in paged.one_op:
                # transformers shards some by a forward of their own
                if type(module) is cls.__bases__[-1] and not is_sharded(module):
                    change_class(module, cls)
        head = model.get_output_embeddings()
        if type(head) is nn.Linear and not is_sharded(head):
            change_class(head, Head)
        self.hooks = (
            text.register_forward_pre_hook(generation.prepare_forward, with_kwargs=True),
            text.register_forward_hook(generation.finish_forward, with_kwargs=True),
        )
        if self.indexer_loss.kind:
            self.hooks += (
                model.register_forward_pre_hook(begin_indexer_loss, with_kwargs=True),
                model.register_forward_hook(add_indexer_loss, with_kwargs=True, always_call=True),
            )
        for name, method in METHODS.items():
            setattr(model, name, partial(method, model))
        text._custom_pypto = self

    def __getstate__(self) -> dict:
        # compiled functions are of this process; the next compiled generate() makes others
        return vars(self) | {"regions": None}

    def undo(self, model) -> None:
        text = text_model(model)
        self.remove_hooks(model)
        attentions = patched_attentions(text)
        for attention in attentions.values():
            change_class(attention, upstream_class(attention))
        for module in list(model.modules()):
            if hasattr(cls := type(module), "is_one_op"):
                change_class(module, cls.__bases__[-1])
        restore(attentions, self.dequantized)
        del text._custom_pypto

    def remove_hooks(self, model) -> None:
        """Takes hooks, regions and methods from ``model``."""
        Regions.leave(text_model(model))
        for hook in self.hooks:
            hook.remove()
        for name in METHODS:
            vars(model).pop(name, None)


def patch_of(model) -> Patch | None:
    """The patch of ``model``; None: it is not patched."""
    return vars(text_model(model)).get("_custom_pypto")

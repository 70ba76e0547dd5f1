"""Declarations of the cache rows of a token; the folder of an architecture has its own."""

from typing import NamedTuple

import torch


class Pool(NamedTuple):
    """One kind of cache row per token; an architecture declares a dict of pools by name."""

    #: elements per row, or the config attribute with their number
    width: str | int
    #: None: the dtype of the model
    dtype: torch.dtype | None = None
    #: a list in the config, and its value for the layers that have this pool; None: all have it
    where: tuple[str, str] | None = None

    def row(self, config, layer: int, dtype: torch.dtype) -> tuple[int, torch.dtype] | None:
        """Width and dtype in this layer of a model in ``dtype``, or None."""
        if self.where is not None and getattr(config, self.where[0])[layer] != self.where[1]:
            return None
        width = self.width if isinstance(self.width, int) else getattr(config, self.width)
        return width, self.dtype or dtype


# pools of multi-head latent attention, and of a lightning indexer in every layer
MLA_POOLS = {"latent": Pool("kv_lora_rank"), "rope": Pool("qk_rope_head_dim")}
INDEX_POOLS = {"index": Pool("index_head_dim")}


def pools_of(model) -> dict[str, Pool]:
    """The pools that the architecture of a patched model declares.

    Raises:
        TypeError: the model is not patched.
    """
    attention = model.base_model.layers[0].self_attn
    pools = getattr(attention, "pools", None)
    if pools is None:
        raise TypeError(
            "PagedCache: model must be patched by models.use_custom_pypto first, "
            f"got one with a {type(attention).__name__}"
        )
    return pools


def declared_rows(model) -> list[dict[str, tuple[int, torch.dtype] | None]]:
    """For each layer the :meth:`Pool.row` of each pool, by name."""
    config, pools = model.config, pools_of(model).items()
    return [
        {name: pool.row(config, layer, model.dtype) for name, pool in pools}
        for layer in range(config.num_hidden_layers)
    ]

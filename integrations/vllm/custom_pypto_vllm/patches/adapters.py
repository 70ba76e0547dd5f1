"""LoRA adapters (arXiv:2106.09685): to each request its own; one that does not fit is rejected.

vLLM rejects ranks above --max-lora-rank, and projections of a name that no layer has. It ignores
weights of further layers, and takes weights that are too small for a part of the right ones.
"""

import functools

from vllm.model_executor.layers.linear import LinearBase

from ..attention.layer import ServedLatentAttention


def check(adapter: str, weights: dict, sizes: dict, layers: int) -> None:
    """Rejects an adapter unless all of its weights fit.

    Args:
        weights: vLLM's ``LoRALayerWeights`` of each projection.
        sizes: inputs and outputs of each projection of the model.
        layers: of the model.

    Raises:
        ValueError: with the projection, what it needs, and what came.
    """
    begin, other = f"custom_pypto_vllm: adapter {adapter}", "serve the model that it was made for"
    for name, weight in weights.items():
        if name.endswith(".kv_b_proj"):
            raise ValueError(
                f"{begin} must have no weights for kv_b_proj, which attention absorbs, got {name}; "
                "merge the adapter into the checkpoint"
            )
        if name not in sizes:
            raise ValueError(
                f"{begin} must have weights for projections of this model of {layers} layers, "
                f"got {name}; {other}"
            )
        inputs, outputs = sizes[name]
        a, b = (weight.rank, inputs), (outputs, weight.rank)
        got_a, got_b = tuple(weight.lora_a.shape), tuple(weight.lora_b.shape)
        if (got_a, got_b) != (a, b):
            raise ValueError(
                f"{begin} must have lora_A {a} and lora_B {b} for {name}, got {got_a} and {got_b}; "
                f"{other}"
            )


def _sizes(manager) -> dict[str, tuple[int, int]]:
    """Those of all ranks together."""
    sizes = {}
    for name, module in manager.modules.items():
        layer = module.base_layer
        if isinstance(layer, LinearBase):
            parts = manager.packed_modules.get(name)
            outputs = layer.output_sizes if parts else [layer.output_size]
            for part, output in zip(parts or [name], outputs, strict=True):
                sizes[part] = layer.input_size, output
    return sizes


def checked(load):
    """The loader of vLLM's workers, with that check of models on the ops."""

    @functools.wraps(load)
    def load_and_check(self, request):
        lora, manager = load(self, request), self._adapter_manager
        if any(isinstance(module, ServedLatentAttention) for module in manager.model.modules()):
            layers = manager.model.config.num_hidden_layers
            # --lora-target-modules leaves the others out
            weights = {n: w for n, w in lora.loras.items() if manager._match_target_modules(n)}
            check(request.lora_name, weights, _sizes(manager), layers)
        return lora

    return load_and_check


def own_only(shrink):
    """The product with lora_A, 0 for requests without an adapter.

    Their index is -1, which vLLM's op on CPUs takes for the last adapter: beside a request with
    that adapter, theirs get it, too.
    """

    @functools.wraps(shrink)
    def shrink_own(inputs, weights, output, indices, *scaling):
        shrink(inputs, weights, output, indices, *scaling)
        output.masked_fill_((indices < 0)[:, None], 0)

    return shrink_own

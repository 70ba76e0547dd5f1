"""Linear attention of transformers, whose state forgets no token.

Shapes: B batch, S new tokens.
"""

import torch
from torch import Tensor

from .one_op import Mixin
from .patched import CACHE


class StepwiseLinear(Mixin):
    """While its cache keeps states, it takes a token at a time, as decoding does, and keeps the
    state after each: a copy can be put back to the bit, and no formula takes a token out."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs):
        cache = kwargs.get(CACHE)
        layer = None if cache is None else cache.layers[self.layer_idx]
        if layer is None or getattr(layer, "kept", None) is None:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        layer.kept.clear()
        outputs = []
        for i in range(hidden_states.size(1)):
            token = slice(i, i + 1)
            mask = None if attention_mask is None else attention_mask[:, token]
            outputs.append(super().forward(hidden_states[:, token], attention_mask=mask, **kwargs))
            layer.keep()
        return torch.cat(outputs, 1)

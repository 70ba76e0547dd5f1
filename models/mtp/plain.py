"""A decoder layer with plain residuals, for architectures whose other layers have streams."""

from torch import Tensor, nn


class PlainLayer(nn.Module):
    """Of a decoder layer of transformers what its streams go through."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            self.add_module(name, getattr(layer, name))

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        attended, *_ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

"""The parts of an MTP layer around its decoder layer, under the names of published checkpoints.

``joined`` makes what the decoder layer takes, of embeddings and the states before them; ``state``
what stands in place of such a state for further drafts; ``hidden`` what the head takes of it.

Shapes: B batch, S new tokens, H hidden size, M streams.
"""

import threading

import torch
from torch import Tensor, nn


class Parts:
    """Those of DeepSeek-V3: a state is the hidden state after a norm, which the head takes."""

    @staticmethod
    def add(layer: nn.Module, text) -> None:
        """Gives a decoder layer these parts, with any weights."""
        add_norms(layer, text)
        size = text.config.hidden_size
        layer.eh_proj = nn.Linear(2 * size, size, bias=False)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = norm_like(text)

    @staticmethod
    def joined(layer: nn.Module, embeddings: Tensor, before: Tensor) -> Tensor:
        return layer.eh_proj(torch.cat([layer.enorm(embeddings), layer.hnorm(before)], -1))

    @staticmethod
    def state(layer: nn.Module, output) -> Tensor:
        # of some architectures the layer returns indices, too
        return layer.shared_head.norm(output[0] if isinstance(output, tuple) else output)

    @staticmethod
    def hidden(layer: nn.Module, state: Tensor) -> Tensor:
        return state


class StreamParts(Parts):
    """Those of DeepSeek-V4: a state is the streams ``[B, S, M, H]`` of a token, in front of the
    head that joins them (``hc_head``), of which the layer has its own."""

    @staticmethod
    def add(layer: nn.Module, text) -> None:
        add_norms(layer, text)
        size = text.config.hidden_size
        for name in ("e_proj", "h_proj"):
            layer.add_module(name, nn.Linear(size, size, bias=False))
        layer.hc_head = type(text.hc_head)(text.config)
        # on disk "norm", which transformers' names for the model make "kv_norm" of, in any layer
        layer.kv_norm = norm_like(text)

    @staticmethod
    def joined(layer: nn.Module, embeddings: Tensor, before: Tensor) -> Tensor:
        token = layer.e_proj(layer.enorm(embeddings))
        return token.unsqueeze(-2) + layer.h_proj(layer.hnorm(before))

    @staticmethod
    def state(layer: nn.Module, output: Tensor) -> Tensor:
        return output

    @staticmethod
    def hidden(layer: nn.Module, state: Tensor) -> Tensor:
        return layer.kv_norm(layer.hc_head(state))


def parts_of(layer: nn.Module) -> type[Parts]:
    """The parts of an MTP layer."""
    return StreamParts if hasattr(layer, "h_proj") else Parts


def logits_of(model, hidden: Tensor) -> Tensor:
    """The model's head, in float32 in some architectures, on what an MTP layer hands it."""
    head = model.get_output_embeddings()
    return head(hidden.to(getattr(head.weight, "dtype", hidden.dtype)))


def add_norms(layer: nn.Module, text) -> None:
    for name in ("enorm", "hnorm"):
        layer.add_module(name, norm_like(text))


def norm_like(text) -> nn.Module:
    return type(text.norm)(text.config.hidden_size, text.config.rms_norm_eps)


class Streams:
    """What a forward hands to the head that joins its streams, until that forward ends: the model
    itself returns what comes behind. Of each thread its own."""

    def __init__(self):
        self.of_thread = threading.local()
        self.of_graph: Tensor | None = None

    def __reduce__(self):
        return Streams, ()

    def keep(self, head: nn.Module, args: tuple) -> None:
        """Forward pre-hook of the head."""
        if torch.compiler.is_compiling():  # a graph knows no threads
            self.of_graph = args[0]
        else:
            self.of_thread.streams = args[0]

    def take(self) -> Tensor:
        """The streams ``[B, S, M, H]`` of the forward that ends."""
        if self.of_graph is not None:
            streams, self.of_graph = self.of_graph, None
        else:
            streams = self.of_thread.streams
            del self.of_thread.streams
        return streams

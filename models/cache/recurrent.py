"""The states of layers of linear attention."""

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from .layout import RowLayout


class RecurrentLayer(LinearAttentionLayer):
    """Upstream's own state of a layer of linear attention, of constant size."""

    pools: dict[str, Tensor] = {}
    layouts: dict[str, RowLayout] = {}
    #: copies of :meth:`states` after each token of the last forward; None: they are not kept
    kept: list[list[Tensor]] | None = None

    def states(self) -> list[Tensor]:
        both = *self.conv_states.values(), *self.recurrent_states.values()
        return [state for state in both if state is not None]

    def keep(self) -> None:
        """Copies the states after a token."""
        self.kept.append([state.clone() for state in self.states()])

    def take_back(self, tokens: int) -> None:
        """The states before the last ``tokens``, which must be kept."""
        for state, before in zip(self.states(), self.kept[-1 - tokens], strict=True):
            state.copy_(before)

    def select(self, indices: Tensor) -> None:
        """Keeps only these sequences, in this order."""
        for states in self.conv_states, self.recurrent_states:
            states.update({i: x[indices] for i, x in states.items() if x is not None})

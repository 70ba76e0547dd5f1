"""The loss of the MTP layer in training (arXiv:2412.19437, equations 24 and 25): of each token, how
unlikely the layer finds the second one after it.

    L = cross-entropy(head(g_t), x_{t+2})     g_t of the states up to t and the tokens up to t + 1

Its gradients reach the layer, and through states, embedding and head the whole model. The layer
runs on the rows of the forward that it follows: row ``t`` is that of the state of token ``t``.

Shapes: B batch, S tokens, H hidden size.
"""

import torch
from torch import Tensor

from ..cache import Step
from ..indexer_loss import arguments, with_loss
from ..patched import mtp_attention, text_model
from .layer import called, embedding_of, joined, mtp_layer
from .parts import logits_of, parts_of

# name of the forward's keyword and of the output
NAME = "mtp_loss"
#: what the loss is multiplied by: that of DeepSeek-V3 at the end of its training, before it 0.3
COEFFICIENT = 0.1


class MtpLoss:
    """The loss of one forward. The forward of the whole model creates it, the layer runs when the
    text model has run."""

    #: ``[n, H]`` what the head takes of the tokens that count, and ``[B, S]`` which these are. The
    #: forward of the whole model takes both: checkpointed layers keep this object.
    of_tokens: tuple[Tensor, Tensor] | None = None

    def run(self, text, kwargs: dict, step: Step, states: Tensor) -> None:
        """Runs the layer for the tokens of a forward.

        Args:
            kwargs: of the forward.
            states: its states, ``[B, S, ..]``.
        """
        layer, embeddings = mtp_layer(text), kwargs.get("inputs_embeds")
        if embeddings is None:
            embeddings = embedding_of(text)(kwargs["input_ids"])
        # behind the last token of a sequence is a wrong one, whose row no other token sees
        embedded = joined(layer, embeddings.roll(-1, 1), states)
        states = called(text, layer, embedded, step, kwargs["position_ids"])
        real, positions = step.rows.real, step.own.positions
        kept = real & real.roll(-2, 1) & (positions.roll(-2, 1) == positions + 2)
        kept[:, -2:] = False
        self.of_tokens = parts_of(layer).hidden(layer, states[kept].unsqueeze(1)).squeeze(1), kept


def check_mtp_loss(
    caller: str, text, training: str, context_parallel: bool, coefficient: float | None
) -> float:
    """What the loss of a text model's MTP layer is multiplied by; 0: there is none.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    why = None
    if mtp_attention(text) is None:
        why = "a model without its MTP layer; load it with models.load(path, mtp=True)"
    elif training == "upstream":
        why = "training='upstream'; pass training='auto'"
    elif context_parallel:
        why = "context_parallel=True, which gives ranks parts of a sequence; pass one of the two"
    if coefficient is None:
        return 0.0 if why else COEFFICIENT
    # a number of Python, numpy or torch; "1" is none
    if not hasattr(coefficient, "__float__") or not 0 <= coefficient < float("inf"):
        raise ValueError(
            f"{caller}: mtp_loss_coefficient must be a number of at least 0 or None, got "
            f"{coefficient!r}"
        )
    if why and coefficient:
        raise ValueError(
            f"{caller}: mtp_loss_coefficient must be None or 0 for {why}, got {coefficient!r}"
        )
    return float(coefficient)


def begin_mtp_loss(model, args: tuple, kwargs: dict):
    """Forward pre-hook: the text model gets a loss to add to, in training with labels and
    gradients."""
    given = arguments(model, args, kwargs)
    labels = [given.get(name) for name in ("labels", "shift_labels")]
    if text_model(model).training and torch.is_grad_enabled() and labels != [None, None]:
        return args, kwargs | {NAME: MtpLoss()}
    return None


def add_mtp_loss(model, args: tuple, kwargs: dict, output):
    """Forward hook: puts the loss into the output, and adds it to that of the language model.

    It must also be called if the forward raises, then without an output, to take what it has.
    """
    loss = kwargs.get(NAME)
    if loss is None:
        return None
    of_tokens, loss.of_tokens = loss.of_tokens, None
    if of_tokens is None or output is None:
        return None
    hidden, kept = of_tokens
    value = cross_entropy(model, hidden, kept, arguments(model, args, kwargs))
    return with_loss(output, value, text_model(model)._custom_pypto.mtp_loss, NAME)


def cross_entropy(model, hidden: Tensor, kept: Tensor, given: dict) -> Tensor:
    """transformers' loss of the language model for the tokens that are ``kept``."""
    if (shifted := given.get("shift_labels")) is None:
        labels = given["labels"].roll(-2, 1)
    else:
        labels = shifted.roll(-1, 1)
    logits = logits_of(model, hidden)
    options = {"shift_labels": labels[kept], "num_items_in_batch": given.get("num_items_in_batch")}
    return model.loss_function(logits, None, logits.size(-1), **options)

"""How far the sequences of a batch are ahead of the text.

``generate()`` chooses the next token of all sequences at once, from their logits, by processors,
criteria and random numbers that are of all of them. So a sequence whose drafts are right keeps the
logits that it has, and drafts on, until the others have theirs.

Columns count the tokens of the text, padding included, n of which are chosen.
"""

import torch
from torch import Tensor

from .gain import Counts

#: tokens that a sequence may be ahead: each keeps logits over the vocabulary
MOST = 16


class Leads:
    """The tokens in the cache, of each sequence, and what the model said behind those that are not
    chosen yet.

    Args:
        batch: sequences; columns: that the cache has of each.
        most: columns that a sequence ahead may have; -1: none may be ahead of another.
        counts: of the drafts that are right.
    """

    def __init__(self, batch: int, columns: int, most: int, counts: Counts):
        self.most, self.counts = most, counts
        self.cached = [columns] * batch
        #: ``[vocabulary]`` each, of the columns from the first that is not chosen on
        self.logits: list[list[Tensor]] = [[] for _ in range(batch)]
        #: what the cache has in these columns, with the place of a draft in its step, from 0 on
        self.tokens: list[list[tuple[int, int | None]]] = [[] for _ in range(batch)]
        self.removed = [0] * batch
        #: the token that pads sequences that have ended; None: of those that go on
        self.pads: list[int | None] = [None] * batch

    def guess(self, i: int, logits: Tensor) -> int:
        """The next token of a sequence, as far as can be said before it is chosen."""
        return int(logits.argmax()) if (pad := self.pads[i]) is None else pad

    def ends(self, ids: Tensor) -> list[Tensor]:
        """The text ``ids [B, n]`` of each sequence, and what follows it up to the token behind
        those in the cache, which is a guess if it is not chosen."""
        found = []
        for i, (text, tokens) in enumerate(zip(ids, self.tokens, strict=True)):
            ahead = [token for token, _ in tokens]
            if self.logits[i]:
                ahead.append(self.guess(i, self.logits[i][-1]))
            found.append(torch.cat([text, text.new_tensor(ahead)]))
        return found

    def add(self, fed: Tensor, logits: Tensor, chosen: int) -> None:
        """Takes a forward over ``fed [B, S]`` behind the tokens in the cache, with drafts from the
        second on, and its ``logits [B, S, vocabulary]``.

        Args:
            chosen: n.
        """
        for i, new in enumerate(fed.tolist()):
            places = [None, *range(len(new) - 1)]
            first = chosen - self.cached[i]  # the text may have the first already
            self.tokens[i] += list(zip(new, places, strict=True))[max(first, 0) :]
            # the next replay of a captured graph writes its logits where these are
            self.logits[i] += logits[i].clone().unbind()
            self.cached[i] += len(new)

    def ready(self) -> bool:
        """Whether the next token can be chosen."""
        return all(self.logits)

    def next(self) -> Tensor:
        """The logits ``[B, vocabulary]`` of the next token."""
        return torch.stack([logits.pop(0) for logits in self.logits])

    def chose(self, tokens: Tensor, chosen: int, counted: Tensor) -> None:
        """Follows the text: a sequence goes on if it has the token that was chosen.

        Args:
            tokens: ``[B]``; chosen: n, this one included.
            counted: ``[B]``, whether drafts of a sequence count.
        """
        for i, token in enumerate(tokens.tolist()):
            if not self.tokens[i]:
                continue
            guess, place = self.tokens[i].pop(0)
            if guess != token:
                self.back(i, chosen - 1)
            elif place is not None and counted[i]:
                self.counts.accept(place)

    def settle(self, chosen: int, end: bool) -> None:
        """Takes back tokens ahead that will not be chosen, or are too many; at the ``end`` all."""
        for i, tokens in enumerate(self.tokens):
            if not self.logits[i]:
                continue
            right = 0
            for (token, _), logits in zip(tokens, self.logits[i], strict=False):
                if right == MOST or self.guess(i, logits) != token:
                    break
                right += 1
            right = min(right, self.most - chosen)
            if end or right < 0:
                self.back(i, chosen - 1)
            else:
                del tokens[right:], self.logits[i][right + 1 :]
                self.removed[i] += self.cached[i] - chosen - right
                self.cached[i] = chosen + right

    def back(self, i: int, columns: int) -> None:
        """Takes back what a sequence has in the cache behind so many columns."""
        self.removed[i] += self.cached[i] - columns
        self.cached[i] = columns
        self.tokens[i].clear()
        self.logits[i].clear()

    def take_removed(self) -> list[int]:
        """Tokens that each sequence has lost since the last call."""
        removed, self.removed = self.removed, [0] * len(self.cached)
        return removed

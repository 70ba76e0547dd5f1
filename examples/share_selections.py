"""How alike the layers of a model select, which of them could share a selection, and what that
costs (IndexCache, arXiv:2603.12201).

    python examples/share_selections.py                        # the checkpoint lookup_hops
    python examples/share_selections.py examples/checkpoints/lookup
    python examples/share_selections.py DIR --text FILE --shares 0.5 0.25

One run over a text records what every layer with an indexer selects. Printed are, for each layer,
the share of its selection that the layer before has selected, too; and for each wanted share of
indexers a pattern for ``models.use_custom_pypto(model, index_topk_pattern=...)``, chosen greedily
by these overlaps, beside the one of ``index_topk_freq`` with about as many. Then the text is read
again with each pattern: the loss is in nats per token. A low overlap need not cost anything, nor a
high one be harmless: the loss, and the answers to a task of yours, decide.

Without a text, the checkpoints lookup and lookup_hops read texts with facts, and behind them come
questions; the loss is that of the answers, and the share of right ones is printed, too. Of the four
layers of lookup_hops the third and fourth look for what the first and second have found, so that a
pattern in which they share with the second loses most answers.
"""

from options import Help, at_least, one_line_errors  # first; options.py says why

# isort: split
import argparse
from pathlib import Path

import torch
import train_lookup
import train_lookup_hops
from torch.nn import functional
from transformers import AutoTokenizer

from custom_pypto import models
from custom_pypto.index_sharing import OFFSET, pattern_of
from custom_pypto.models import CACHE
from custom_pypto.models.index_overlap import overlaps, propose_pattern

HERE = Path(__file__).resolve().parent
TASKS = {len(task.VOCABULARY): task.lookup_batch for task in (train_lookup, train_lookup_hops)}


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 1, got {value}")
    return value


def inputs(args, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels ``[texts, tokens]``, not shifted; -100 for tokens without a loss."""
    if args.text is None:
        if vocabulary not in TASKS:
            raise ValueError(
                "--text must be a file, as the texts made here are those of the checkpoints lookup "
                f"and lookup_hops, got none for {args.model}"
            )
        return TASKS[vocabulary](args.texts, args.tokens, seed=args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, : args.tokens]
    return ids, ids


@torch.no_grad()
def measured(model, ids, labels, chunk: int) -> tuple[float, float]:
    """Nats per token with a label, and the share of them that the model ranks first."""
    nats = right = count = 0.0
    for row, label in zip(ids.split(1), labels.split(1), strict=True):
        cache = models.PagedCache(model, 1, row.size(1))
        wanted = functional.pad(label[:, 1:], (0, 1), value=-100).split(chunk, 1)
        for part, next_ones in zip(row.split(chunk, 1), wanted, strict=True):
            logits = model(part, **{CACHE: cache}).logits[next_ones != -100].float()
            targets = next_ones[next_ones != -100]
            nats += functional.cross_entropy(logits, targets, reduction="sum").item()
            right += (logits.argmax(-1) == targets).sum().item()
            count += len(targets)
    return nats / count, right / count


@torch.no_grad()
def recorded(model, ids, chunk: int):
    """What each layer selects of the first text."""
    cache = models.PagedCache(model, 1, ids.size(1))
    with models.record_indices(model) as record:
        for part in ids[:1].split(chunk, 1):
            model(part, **{CACHE: cache}, logits_to_keep=1)
    return record


def patterns(model, record, shares: list[float]) -> dict[str, str]:
    """By pattern, where it is from; the first shares nothing."""
    found = {propose_pattern(model, record, 1): "all indexers"}
    for wanted in shares:
        found.setdefault(propose_pattern(model, record, wanted), f"greedy, {wanted:g}")
        if len(next(iter(found))) == len(record.indices):  # else some layers have no indexer
            freq = round(1 / wanted)
            found.setdefault(
                pattern_of(freq, OFFSET, len(record.indices)), f"index_topk_freq={freq}"
            )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default=HERE / "checkpoints/lookup_hops",
        help="a checkpoint, or its name",
    )
    add("--text", type=Path, help="a file; without it, texts of the checkpoint's task")
    add("--tokens", type=at_least(128), default=256, help="of a text")
    add("--texts", type=at_least(1), default=8, help="of the checkpoint's task")
    add("--shares", type=share, nargs="+", default=[0.5, 0.25], help="of the indexers that stay")
    add("--chunk", type=at_least(1), default=512, help="tokens that are read at once")
    add("--dtype", default="auto")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    with one_line_errors("--text", "--shares"):
        model = models.load(args.model, dtype=args.dtype)
        ids, labels = inputs(args, model.config.vocab_size)
        record = recorded(model, ids, args.chunk)
        alike = overlaps(record)
    layers = list(record.indices)
    print(f"{ids.size(1)} tokens; of what a layer selects, the share that the one before selects")
    for i in range(1, len(layers)):
        print(f"layer {layers[i]:3}  {alike[i - 1, i]:.3f} of layer {layers[i - 1]}")
    print("\npattern, indexers, loss in nats per token, share ranked first")
    for pattern, origin in patterns(model, record, args.shares).items():
        models.use_custom_pypto(model, index_topk_pattern=pattern)
        loss, right = measured(model, ids, labels, args.chunk)
        print(f"{pattern}  {pattern.count('F')}  {loss:.4g}  {right:.4f}  ({origin})")


if __name__ == "__main__":
    main()

"""Trains a tiny DeepSeek-V3.2 on the ops, stage by stage as its report does (arXiv:2512.02556).

The task is that of train_lookup.py: a text with 32 facts, then a question about each. Three stages:

1. ``dense``: the main model with dense attention; the indexers stay random;
2. ``warm-up``: the indexers alone, on their divergence from the dense attention
   (``indexer_loss="dense"``); the main model is frozen;
3. ``sparse``: everything, with ``index_topk`` (16) keys per token: the main model on the loss of
   the language model, the indexers on their divergence over the selected keys
   (``indexer_loss="sparse"``).

The plot shows loss, accuracy of the answers, and recall: the dense attention's probability of the
selected keys, divided by that of its own best ``index_topk`` keys, at the question tokens, mean of
the layers. The table at the end compares the trained indexers with the random ones of before the
training on the same main model, whose answers are wrong. Guessing is right in 1 of 8.

    python examples/train_sparse.py            # about 3 minutes on one core
    python examples/train_sparse.py --quick    # a tenth of the steps: the answers stay wrong
"""

from options import Help, at_least, check_folder  # first; options.py says why

# isort: split
import argparse
import importlib.util
from pathlib import Path

import torch
from train_lookup import (
    END,
    TOKEN_ID,
    VALUES,
    dense_attention,
    lookup_batch,
    lookup_model,
    lookup_tokenizer,
    train,
)
from transformers import set_seed

from custom_pypto import models

# steps of a stage in the default run
STEPS = {"dense": 600, "warm-up": 150, "sparse": 150}
QUICK = 10
SIZES = dict(
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    index_n_heads=8,
    index_head_dim=32,
)
MEASURED = "dense accuracy", "sparse accuracy", "recall"


def is_indexer(name):
    return ".indexer." in name


def indexer_weights(model):
    return {name: x.clone() for name, x in model.state_dict().items() if is_indexer(name)}


@torch.no_grad()
def measure(model, input_ids, labels):
    """Accuracies with dense and with sparse attention, and the recall of the selection."""
    is_question = labels[:, 1:] > TOKEN_ID[END]  # the value comes next

    def accuracy(logits):
        return (logits[:, :-1].argmax(-1) == labels[:, 1:])[is_question].float().mean().item()

    models.use_transformers(model).eval()
    with dense_attention(model):
        dense = model(input_ids, use_cache=False, output_attentions=True)
    models.use_custom_pypto(model)
    with models.record_indices(model) as record:
        sparse = model(input_ids)
    recalls = []
    for layer, attention in enumerate(dense.attentions):
        selected = record.indices[layer]
        mass = attention.mean(1)
        held = mass.gather(2, selected.clamp_min(0).long())
        held = held.where(selected >= 0, 0).sum(-1) / mass.topk(selected.size(2)).values.sum(-1)
        recalls.append(held[:, :-1][is_question].mean())
    recall = torch.stack(recalls).mean().item()
    return dict(
        zip(MEASURED, (accuracy(dense.logits), accuracy(sparse.logits), recall), strict=True)
    )


class Training:
    """The model, its texts, and what was measured."""

    def __init__(self, args):
        set_seed(args.seed)
        torch.set_num_threads(args.threads)
        self.args = args
        self.data = torch.Generator().manual_seed(args.seed)
        self.model = lookup_model(args.index_topk, **SIZES)
        self.model.set_attn_implementation("eager")  # others do not return the attention
        self.held_out = lookup_batch(args.batch, args.length, seed=1_000_000)
        self.losses = []
        #: step and measurement
        self.curves = []

    def batch(self):
        return lookup_batch(self.args.batch, self.args.length, generator=self.data)

    def dense_loss(self):
        models.use_transformers(self.model).train()
        input_ids, labels = self.batch()
        with dense_attention(self.model):
            return self.model(input_ids, labels=labels, use_cache=False).loss

    def warm_up_loss(self):
        models.use_custom_pypto(self.model, indexer_loss="dense").train()
        return self.model(self.batch()[0]).indexer_loss

    def sparse_loss(self):
        models.use_custom_pypto(self.model, indexer_loss="sparse").train()
        input_ids, labels = self.batch()
        return self.model(input_ids, labels=labels).loss

    def stage(self, title, loss, learns):
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(learns(name))

        def loss_of_step(step):
            if step % self.args.measure_every == 0:
                self.curves.append((len(self.losses), measure(self.model, *self.held_out)))
            value = loss()
            self.losses.append(value.item())
            return value

        learning = [x for x in self.model.parameters() if x.requires_grad]
        train(learning, loss_of_step, steps=self.args.steps[title], title=title)

    def run(self):
        """The rows of the table."""
        untrained = indexer_weights(self.model)
        self.stage("dense", self.dense_loss, lambda name: not is_indexer(name))
        self.stage("warm-up", self.warm_up_loss, is_indexer)
        self.stage("sparse", self.sparse_loss, lambda name: True)
        texts = lookup_batch(16, self.args.length, seed=2_000_000)
        trained = indexer_weights(self.model)
        self.curves.append((len(self.losses), measure(self.model, *self.held_out)))
        rows = {"trained indexer": measure(self.model, *texts)}
        self.model.load_state_dict(untrained, strict=False)
        rows["untrained indexer"] = measure(self.model, *texts)
        self.model.load_state_dict(trained, strict=False)
        return rows


def table(rows):
    lines = [" " * 18 + "".join(f"{name:>17}" for name in MEASURED)]
    for title, row in rows.items():
        lines.append(f"{title:<18}" + "".join(f"{row[name]:>17.3f}" for name in MEASURED))
    return "\n".join(lines)


def plot(training, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    axes[0].plot(training.losses, linewidth=0.8)
    axes[0].set(ylabel="loss of the stage", yscale="log")
    steps = [step for step, _ in training.curves]
    for name in MEASURED:
        axes[1].plot(steps, [row[name] for _, row in training.curves], ".-", label=name)
    axes[1].axhline(1 / len(VALUES), color="grey", linestyle=":", label="guessing")
    axes[1].set(xlabel="step", ylim=(0, 1.02))
    axes[1].legend()
    first = 0
    for title, steps in training.args.steps.items():
        for axis in axes:
            axis.axvline(first, color="grey", linewidth=0.5)
        axes[0].text(first, 1.01, f" {title}", transform=axes[0].get_xaxis_transform())
        first += steps
    figure.savefig(path, dpi=90)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--output", type=Path, default=Path("train_sparse"), help="folder of the plot")
    add("--save", action="store_true", help="save model and tokenizer to the folder, too")
    add("--steps", type=int, nargs=3, default=list(STEPS.values()), metavar=tuple(STEPS))
    add("--quick", action="store_true", help=f"1/{QUICK} of the steps, at least 60 per stage")
    add("--seed", type=int, default=0)
    add("--threads", type=at_least(1), default=1, help="changes rounding, hence the weights")
    add("--index-topk", type=at_least(1), default=16)
    add(
        "--length",
        type=at_least(1),
        default=160,
        help="tokens per text, 96 of questions, answers",
    )
    add("--batch", type=at_least(1), default=12, help="texts per step")
    add("--measure-every", type=at_least(1), default=50, help="steps")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot needs matplotlib: pip install matplotlib")
    if args.quick:
        args.steps = [max(60, steps // QUICK) for steps in args.steps]
    if min(args.steps) <= 50:
        parser.error(
            f"--steps must be more than 50 per stage (the warm-up of the learning rate), "
            f"got {args.steps}"
        )
    args.steps = dict(zip(STEPS, args.steps, strict=True))
    check_folder(parser, "--output", args.output)
    return args


def main():
    args = parse_args()
    training = Training(args)
    rows = training.run()
    print(table(rows))
    plot(training, args.output / "train_sparse.png")
    if args.save:
        models.use_transformers(training.model).save_pretrained(args.output)
        lookup_tokenizer().save_pretrained(args.output)
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()

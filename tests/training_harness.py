"""What tests of training share: kinds of batches, gradients, and a watch over memory."""

import gc
from contextlib import contextmanager

import torch
from tiny import token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

TOKENS = 40


def whole(seed=1):
    ids = token_ids(2, TOKENS, seed)
    return {"input_ids": ids, "labels": ids}


def padded(left=(0, 0), right=(0, 0), seed=1):
    """A batch with so many pads in its rows, which upstream may count in default positions."""
    ids = token_ids(2, TOKENS, seed)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row, (before, behind) in enumerate(zip(left, right, strict=True)):
        mask[row, :before], mask[row, TOKENS - behind :] = 0, 0
        labels[row, : before + 1], labels[row, TOKENS - behind :] = -100, -100
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}


def packed(seed=1, rows=2):
    """Three sequences in one row of the batch, two in the other."""
    lengths = [[13, 4, 23], [30, 10]][:rows]
    ids = token_ids(rows, TOKENS, seed)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


BATCHES = {
    "whole-rows": whole,
    "left-padding": lambda seed: padded(left=(0, 9), seed=seed),
    "right-padding": lambda seed: padded(right=(7, 0), seed=seed),
    "padding-on-both-sides": lambda seed: padded(left=(3, 0), right=(5, 9), seed=seed),
    "packed": packed,
}


def trained(model, batch, **arguments):
    """The loss of a batch, and the gradients of all parameters that have one."""
    model.zero_grad()
    loss = model(**batch, use_cache=False, **arguments).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def logged_losses(model, folder, rows, steps, **arguments):
    """What transformers' Trainer logs of its steps, of 2 rows each."""
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=rows,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@contextmanager
def nothing_outlives_it(*classes):
    """Inside, no object of these classes is made that lives on."""
    gc.freeze()  # the objects of before are neither looked at nor found
    try:
        yield
        gc.collect()
        # isinstance() would ask the objects, some of which answer with a warning
        assert not [x for x in gc.get_objects() if issubclass(type(x), classes)]
    finally:
        gc.unfreeze()


class Quadratic(TorchDispatchMode):
    """Collects the shapes with two dims of at least so many tokens."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.found = tokens, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and sum(n >= self.tokens for n in x.shape) > 1:
                self.found.add(tuple(x.shape))
        return results

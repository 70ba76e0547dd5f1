"""What tests of training share: models, kinds of batches, gradients, and a watch over memory."""

import gc
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from tiny import ALL_KINDS, tiny_model, token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Trainer, TrainingArguments

from custom_pypto import models

TOKENS = 40
# Of a gradient's norm, in float32. Those of upstream and ours are up to 7.8e-6 from the same in
# float64, of these kinds 4.4e-5, which sum what nearly cancels (sinks, position biases, learned
# scales), and of hyper-connections 1.4e-4, by any instruction set (generic, AVX2, AVX-512) and
# number of threads (1, 4); two of them are up to twice as far apart, and other CPUs get twice that.
TOLERANCES = defaultdict(lambda: 3e-5)
TOLERANCES |= dict.fromkeys(["deepseek_v4", "glm5_next", "mistral_large4"], 2e-4)
HYPER_CONNECTIONS = 6e-4
# whose indexers score tokens, not groups of tokens
LEARNING = [kind for kind in ALL_KINDS if kind not in ("deepseek_v4", "glm5_next")]
KINDS_OF_LOSS = ["sparse", "dense"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one


# ---- models and batches -----------------------------------------------------------------------


def model_for(path, kind="deepseek_v32", loss=None, coefficient=1.0, **changes):
    """A model that trains on this path, "auto", "ops" or "upstream", and learns by this loss."""
    return models.use_custom_pypto(
        tiny_model(kind, **changes).train(),
        block_size=16,
        training=path,
        indexer_loss=loss,
        indexer_loss_coefficient=coefficient,
    )


# the name in this transformers; the other one warns
NEW = hasattr(PreTrainedModel, "activation_checkpointing_enable")
CHECKPOINTING = "activation_checkpointing" if NEW else "gradient_checkpointing"


def checkpointed(model, reentrant=False):
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def not_checkpointed(model):
    getattr(model, f"{CHECKPOINTING}_disable")()


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


def holes():
    batch = padded()
    batch["attention_mask"][1, 20] = 0
    return batch


BATCHES = {
    "whole-rows": whole,
    "left-padding": lambda seed: padded(left=(0, 9), seed=seed),
    "right-padding": lambda seed: padded(right=(7, 0), seed=seed),
    "padding-on-both-sides": lambda seed: padded(left=(3, 0), right=(5, 9), seed=seed),
    "packed": packed,
}


# ---- gradients --------------------------------------------------------------------------------


def gradients(model, loss):
    """Of all parameters that have one, as one backward of ``loss`` gives them."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def trained(model, batch, **arguments):
    """The loss of a batch, and its gradients."""
    loss = model(**batch, use_cache=False, **arguments).loss
    return loss.detach(), gradients(model, loss)


def errors(got, want):
    """Of each gradient, as a share of its norm."""
    assert want and got.keys() == want.keys()
    got, want = ({name: x.double() for name, x in of.items()} for of in (got, want))
    return {name: float((got[name] - x).norm() / x.norm()) for name, x in want.items()}


def assert_near(got, want, kind="deepseek_v32"):
    """Equal gradients but for rounding."""
    for name, error in errors(got, want).items():
        assert error <= (HYPER_CONNECTIONS if "hc" in name else TOLERANCES[kind]), (name, error)


def assert_equal(got, want):
    assert want and got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


# ---- trainers and memory ----------------------------------------------------------------------


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

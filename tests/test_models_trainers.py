"""Training loops of others run patched models on the ops."""

import pytest
import tokenizers
import torch
from model_harness import PADS
from processes import in_ranks
from tiny import clear_case, token_ids
from torch.nn.parallel import DistributedDataParallel
from training_harness import (
    CHECKPOINTING,
    TOKENS,
    TOLERANCES,
    assert_near,
    gradients,
    logged_losses,
    model_for,
    one_thread,  # noqa: F401
)
from transformers import PreTrainedTokenizerFast
from transformers.utils import is_accelerate_available

STEPS, BATCH = 3, 2  # BATCH: as logged_losses


# ---- Trainer ----------------------------------------------------------------------------------


def samples(padded, seed=1):
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids(STEPS * BATCH, TOKENS, seed)]
    if padded:  # on the right, as tokenizers do by default
        for pads, row in zip(PADS * 2, rows, strict=True):
            real = torch.arange(TOKENS) < TOKENS - pads
            row["attention_mask"], row["labels"] = real.long(), row["labels"].where(real, -100)
    return rows


def losses(path, folder, rows, **arguments):
    return logged_losses(model_for(path), folder, rows, STEPS, **arguments)


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers.Trainer needs accelerate")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({CHECKPOINTING: True}, id="checkpointing"),
        pytest.param({"gradient_accumulation_steps": 2, "max_grad_norm": 0}, id="accumulation"),
    ],
)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_the_trainer_of_transformers_logs_upstream_losses(padded, arguments, tmp_path):
    def of(path, seed):
        return losses(path, tmp_path, samples(padded, seed), **arguments)

    seed, upstream = clear_case(lambda seed: of("upstream", seed))
    ops = of("ops", seed)
    assert len(ops) == STEPS and ops[0] != ops[1]
    assert ops == pytest.approx(upstream, rel=TOLERANCES["deepseek_v32"])


@pytest.mark.skipif(not is_accelerate_available(), reason="transformers.Trainer needs accelerate")
def test_the_trainer_in_bfloat16_starts_with_a_loss_near_upstreams(tmp_path):
    ops, upstream = (
        losses(path, tmp_path, samples(False), bf16=True) for path in ("ops", "upstream")
    )
    assert ops == pytest.approx(upstream, rel=0.02)  # another rounding, other experts


# ---- processes --------------------------------------------------------------------------------


def loss_of(model, ids, items):
    return model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=items).loss


def work(rank, folder):
    """The gradients that one of two ranks has of its half of the batch."""
    ids = token_ids(4, TOKENS)
    for frozen in (True, False):
        model = model_for("ops")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and ".indexer." in name))
        parallel = DistributedDataParallel(model, find_unused_parameters=not frozen)
        # the ranks' gradients are averaged, and each divides by the tokens of the whole batch
        loss = 2 * loss_of(parallel, ids[2 * rank : 2 * rank + 2], 4 * (TOKENS - 1))
        torch.save(gradients(model, loss), f"{folder}/{rank}-{frozen}.pt")


def test_two_processes_have_the_gradients_of_one(tmp_path):
    """The indexers get none: a user freezes them, or has DDP find unused parameters."""
    in_ranks(work, tmp_path)
    model = model_for("ops")
    want = gradients(model, loss_of(model, token_ids(4, TOKENS), 4 * (TOKENS - 1)))
    for file in ("0-True", "1-True", "0-False", "1-False"):
        got = torch.load(tmp_path / f"{file}.pt")
        others = {name: got.pop(name) for name in got.keys() - want.keys()}
        assert not any(x.any() for x in others.values())
        assert_near(got, want)


# ---- trl ----------------------------------------------------------------------------------------


def test_trl_trains_on_sequences_without_padding(tmp_path):
    """trl lays them end to end, with positions that restart."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 199)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    lengths = [40, 13, 22, 9, 31, 17]
    rows = [
        {"input_ids": ids[:n].tolist(), "labels": ids[:n].tolist()}
        for n, ids in zip(lengths, token_ids(STEPS * BATCH, TOKENS), strict=True)
    ]

    # a name of its own, else datasets would pickle the rows to make one
    dataset = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint="rows")

    def of(path):
        shapes, model = set(), model_for(path)
        model.model.register_forward_pre_hook(
            lambda _, args, kwargs: shapes.add(kwargs["position_ids"].shape),
            with_kwargs=True,
        )
        trainer = trl.SFTTrainer(
            model=model,
            processing_class=tokenizer,
            args=trl.SFTConfig(
                output_dir=str(tmp_path),
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                padding_free=True,
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
            ),
            train_dataset=dataset,
        )
        trainer.train()
        assert all(shape[0] == 1 for shape in shapes)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    ops = of("ops")
    assert len(ops) == STEPS
    assert ops == pytest.approx(of("upstream"), rel=TOLERANCES["deepseek_v32"])

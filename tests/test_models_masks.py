"""Whatever mask or positions come with tokens, a patched model does what upstream does, or rejects
the columns that it cannot honour."""

import copy

import pytest
import torch
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from tiny import ALL_KINDS, OWN, clear_case, tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models import CACHE

PROMPT, STEPS, CAPACITY = 20, 3, 48
# tokens of left padding in each sequence; upstream counts them as tokens of windows in DeepSeek-V4
PADS = {"deepseek_v4": [0, 0]}


def pair(kind, **options):
    upstream = tiny_model(kind)
    return upstream, models.use_custom_pypto(copy.deepcopy(upstream), block_size=16, **options)


def real_columns(kind):
    """``[B, CAPACITY]``, ones but for left padding."""
    mask = torch.ones(2, CAPACITY, dtype=torch.int64)
    for row, pads in enumerate(PADS.get(kind, [0, 5])):
        mask[row, :pads] = 0
    return mask


# the mask of a forward that makes the tokens up to a column known
WIDTHS = {
    "exact": lambda real, end: real[:, :end],
    "static-capacity": lambda real, end: real * (torch.arange(CAPACITY) < end),
    "ones-behind": lambda real, end: real,
    "float": lambda real, end: real[:, :end].float(),
    "bool": lambda real, end: real[:, :end].bool(),
}


def logits_in_steps(model, mask_of, real, seed):
    """The logits of real tokens in a prompt and in steps after it."""
    ids, past, start, logits = token_ids(2, PROMPT + STEPS, seed), None, 0, []
    positions = (real.cumsum(1) - 1).clamp(min=0)
    for end in range(PROMPT, PROMPT + STEPS + 1):
        output = model(
            ids[:, start:end],
            attention_mask=mask_of(real, end),
            position_ids=positions[:, start:end],
            **{CACHE: past},
            use_cache=True,
        )
        logits.append(output.logits[real[:, start:end].bool()])
        past, start = output[CACHE], end
    return torch.cat(logits)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_mask_of_any_width_means_its_first_columns(kind):
    upstream, patched = pair(kind)
    real, exact = real_columns(kind), WIDTHS["exact"]
    seed, want = clear_case(lambda seed: logits_in_steps(upstream, exact, real, seed))
    for mask_of in WIDTHS.values():
        got = logits_in_steps(patched, mask_of, real, seed)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])


def after_prompt(model, mask):
    return model(token_ids(2, PROMPT), attention_mask=mask, use_cache=True)[CACHE]


def step(change=lambda mask: None, tokens=1, pads=(0, 0)):
    """A forward of ``tokens`` after a prompt with left padding, its mask changed."""

    def call(model):
        real = torch.ones(2, PROMPT + tokens, dtype=torch.int64)
        for row, n in enumerate(pads):
            real[row, :n] = 0
        past = after_prompt(model, real[:, :PROMPT])
        mask = real.clone()
        changed = change(mask)
        mask = mask if changed is None else changed
        return model(token_ids(2, tokens), attention_mask=mask, **{CACHE: past})

    return call


def hide(mask):
    mask[:, 5:15] = 0


def show(mask):
    mask[1, :4] = 1


def exchange(mask):  # as many ones as before
    mask[1] = mask[1].flip(0)
    mask[1, -1] = 1


def hole(mask):
    mask[0, -2] = 0


CACHED = "attention_mask must be what it was for cached tokens .*, got other values in "
MASKS = {
    "hides-cached-tokens": (step(hide), CACHED + r"columns 5 to 14 \(row 0\)"),
    "hides-them-from-several": (step(hide, 3), CACHED + r"columns 5 to 14 \(row 0\)"),
    "shows-cached-padding": (step(show, pads=(0, 4)), CACHED + r"columns 0 to 3 \(row 1\)"),
    "moves-cached-padding": (step(exchange, pads=(0, 4)), CACHED + r"7 of the columns 0 to 19"),
    "is-missing": (
        step(lambda mask: {"indexed_attention": None}, pads=(0, 4)),
        r"with zeros for the padding in columns 0 to 3 \(row 1\) of the cache, got None",
    ),
    "has-new-tokens-only": (
        step(lambda mask: mask[:, -1:]),
        r"\[B, tokens so far\] with the 20 cached and the 1 new tokens, got \[2, 1\]",
    ),
    "is-of-another-batch": (step(lambda mask: mask[:1]), r"B = 2, got \[1, 21\]"),
    "has-four-dims": (step(lambda mask: torch.zeros(2, 1, 1, 21)), r"got \[2, 1, 1, 21\]"),
    "has-four-dims-in-a-dict": (
        step(lambda mask: {"indexed_attention": torch.zeros(2, 1, 1, 21)}),
        r"got \[2, 1, 1, 21\]",
    ),
    "is-a-dict-of-other-layers": (
        step(lambda mask: {"full_attention": torch.zeros(2, 1, 1, 21)}),
        r"\[B, tokens so far\], B = 2, got a dict",
    ),
    "is-a-list": (step(lambda mask: mask.tolist()), "got a list"),
    "has-a-hole": (step(hole, 4), r"a 0 after a 1 in column 22 \(row 0\); set tokenizer"),
    "pads-on-the-right": (
        lambda m: m(token_ids(2, 20), attention_mask=(torch.arange(20) < 15).expand(2, -1)),
        r"a 0 after a 1 in columns 15 to 19 \(row 0\)",
    ),
}


@pytest.mark.parametrize("call, message", MASKS.values(), ids=MASKS)
def test_a_mask_that_cannot_be_honoured_is_rejected_with_its_columns(call, message):
    with pytest.raises(ValueError, match=message):
        call(models.use_custom_pypto(tiny_model()))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_hidden_cached_tokens_are_rejected_in_every_architecture(kind):
    with pytest.raises(ValueError, match=CACHED):
        step(hide)(models.use_custom_pypto(tiny_model(kind)))


def test_a_cache_remembers_its_padding_through_changes():
    model, real = models.use_custom_pypto(tiny_model(), block_size=16), real_columns("")[:, :PROMPT]
    cache = models.PagedCache(model, 2, 64)
    model(token_ids(2, PROMPT), attention_mask=real, cache=cache)

    def next_mask(rows, tokens):
        return torch.cat([real[rows, :tokens], torch.ones(len(rows), 1, dtype=torch.int64)], 1)

    changes = [
        (lambda: cache.crop(-3), [0, 1], PROMPT - 3),
        (lambda: cache.reorder_cache(torch.tensor([1, 0])), [1, 0], PROMPT - 3),
        (lambda: cache.batch_select_indices(torch.tensor([0])), [1], PROMPT - 3),
        (lambda: cache.batch_repeat_interleave(2), [1, 1], PROMPT - 3),
    ]
    for change, rows, tokens in changes:
        change()
        wrong = 1 - next_mask(rows, tokens)
        with pytest.raises(ValueError, match=CACHED):
            model(token_ids(len(rows), 1), attention_mask=wrong, cache=cache)
        mask = next_mask(rows, tokens)
        model(token_ids(len(rows), 1), attention_mask=mask, cache=cache)
        cache.crop(-1)
    cache.reset()
    model(token_ids(2, 4), cache=cache)


def with_a_pause(model, seed):
    """The logits of two sequences, of which the second waits for two steps, and of five tokens
    that are taken back and fed again."""
    ids, logits = token_ids(2, PROMPT + 6, seed), []
    mask = torch.ones_like(ids)
    mask[1, PROMPT + 1 : PROMPT + 3] = 0
    positions = mask.cumsum(1) - 1
    past = model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], use_cache=True)[CACHE]
    for t in range(PROMPT, PROMPT + 6):
        output = model(
            ids[:, t : t + 1],
            attention_mask=mask[:, : t + 1],
            position_ids=positions[:, t : t + 1],
            **{CACHE: past},
        )
        logits.append(output.logits[mask[:, t : t + 1].bool()])
    past.crop(-5)  # the pause among them, which counts for no position
    again = slice(PROMPT + 1, PROMPT + 6)
    output = model(
        ids[:, again],
        attention_mask=mask,
        position_ids=positions[:, again],
        past_key_values=past,
    )
    return torch.cat([*logits, output.logits[mask[:, again].bool()]])


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "deepseek_v4"])
def test_a_sequence_may_pause_where_no_layer_counts_padding(kind):
    upstream, patched = pair(kind)
    if kind in ("dots3_note", "glm5_next"):
        with pytest.raises(ValueError, match=r"padding .*, got some in columns 21 to 22 \(row 1\)"):
            with_a_pause(patched, 1)
        return
    seed, want = clear_case(lambda seed: with_a_pause(upstream, seed))
    torch.testing.assert_close(with_a_pause(patched, seed), want, rtol=0, atol=TOLERANCES[kind])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_row_of_padding_alone_changes_no_other_row(kind):
    model, ids = models.use_custom_pypto(tiny_model(kind), block_size=16), token_ids(3, 20)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1] = 0, 0
    options = {"max_new_tokens": 6, "do_sample": False}
    got = model.generate(ids, attention_mask=mask, **options)
    others = torch.tensor([0, 2])
    want = model.generate(ids[others], attention_mask=mask[others], **options)
    assert torch.equal(got[others], want)
    # what follows the padding is a sequence of its own
    assert torch.equal(got[1, 20:], continued_alone(model, got[1, 20:21], 5))


def continued_alone(model, first, tokens):
    ids = first[None]
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0]


def test_an_interrupted_forward_leaves_no_padding():
    model, ids = models.use_custom_pypto(tiny_model(), block_size=16), token_ids(2, 30)
    cache = models.PagedCache(model, 2, 64)
    want = model(ids, use_cache=False).logits[:, 20:]
    model(ids[:, :20], past_key_values=cache)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, 20:22] = 0
    with pytest.raises(IndexError):  # an id that the embedding lacks
        model(ids[:, 20:24] + 1000, attention_mask=mask, past_key_values=cache)
    steps = [
        model(ids[:, start:end], attention_mask=given, past_key_values=cache).logits
        for start, end, given in ((20, 24, None), (24, 30, torch.ones_like(ids)))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=0, atol=TOLERANCES["deepseek_v32"])


# ---- positions --------------------------------------------------------------------------------

POSITIONS = {
    "from-50": torch.arange(40)[None] + 50,
    "with-a-jump": torch.cat([torch.arange(20), torch.arange(70, 90)])[None],
    "that-restart": torch.cat([torch.arange(15), torch.arange(25)])[None],
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_callers_positions_count_or_are_rejected(kind, positions):
    upstream, patched = pair(kind)

    def run(model, seed):
        return model(token_ids(1, 40, seed), position_ids=positions, use_cache=True).logits

    if kind == "deepseek_v4":
        with pytest.raises(ValueError, match="position_ids must count the real tokens .* from 0"):
            run(patched, 1)
        return
    seed, want = clear_case(lambda seed: run(upstream, seed))
    torch.testing.assert_close(run(patched, seed), want, rtol=0, atol=TOLERANCES[kind])


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind != "deepseek_v4"])
def test_positions_left_out_are_upstreams(kind):
    upstream, patched = pair(kind)
    real = real_columns(kind)[:, :PROMPT]

    def run(model, seed):
        return model(token_ids(2, PROMPT, seed), attention_mask=real).logits[real.bool()]

    seed, want = clear_case(lambda seed: run(upstream, seed))
    torch.testing.assert_close(run(patched, seed), want, rtol=0, atol=TOLERANCES[kind])


# ---- training="auto" --------------------------------------------------------------------------


def labelled(tokens, **also):
    ids = token_ids(2, tokens, seed=4)
    return {"input_ids": ids, "labels": ids} | also


LEFT = torch.arange(40) >= torch.tensor([[0], [7]])
RIGHT = torch.arange(40) < torch.tensor([[40], [31]])
PACKED = torch.cat([torch.arange(15), torch.arange(25)])[None]
BATCHES = {
    "plain": {},
    "left-padding": {"attention_mask": LEFT},
    "left-padding-with-positions": {
        "attention_mask": LEFT,
        "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0),
    },
    "right-padding": {"attention_mask": RIGHT},
    "both-sides": {"attention_mask": LEFT & RIGHT},
    "hole": {"attention_mask": LEFT & (torch.arange(40) != 20)},
    "wider-mask": {"attention_mask": torch.nn.functional.pad(RIGHT, (0, 8)), "use_cache": True},
    "later-positions": {"position_ids": torch.arange(3, 43)[None]},
    **{
        f"packed{name}": {"position_ids": PACKED} | also
        for name, also in {
            "": {},
            "-without-cache": {"use_cache": False},
            "-with-cache": {"use_cache": True},
        }.items()
    },
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_auto_means_upstream_on_either_path(kind, batch, monkeypatch):
    upstream, patched = pair(kind)
    ids = token_ids(2, 40, seed=4)
    real = batch.get("attention_mask", torch.ones(2, 40, dtype=torch.bool))[:, :40]
    # of a token behind padding, the label counts nowhere
    labels = ids.masked_fill(~(real & torch.nn.functional.pad(real, (1, 0))[:, :-1]), -100)

    def loss(model):
        return model.train()(input_ids=ids, labels=labels, **batch).loss

    want = loss(upstream)
    for least in (0, 2**40):  # the ops wherever they can, and upstream's path
        monkeypatch.setattr(models.training, "FEW_SCORES", least)
        monkeypatch.setattr(models.training, "UPSTREAM_SCORES", least)
        torch.testing.assert_close(loss(patched), want, rtol=0, atol=TOLERANCES[kind])


def test_the_ops_are_what_auto_takes_without_these_limits(monkeypatch):
    calls, place = [], models.training.place
    monkeypatch.setattr(models.training, "place", lambda *args: calls.append(1) or place(*args))
    for name in ("FEW_SCORES", "UPSTREAM_SCORES"):
        monkeypatch.setattr(models.training, name, 0)
    for kind in ("deepseek_v32", *OWN):
        models.use_custom_pypto(tiny_model(kind)).train()(**labelled(40))
    assert len(calls) == 1 + len(OWN)

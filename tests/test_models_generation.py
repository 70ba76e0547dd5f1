"""``generate()`` of patched models, and what transformers asks of any model that generates: every
way to call ``generate()`` and ``forward`` gives what upstream gives, or is rejected."""

import pytest
import torch
import transformers
from model_harness import (
    COUNT_PADDING,
    PADS,
    assert_same,
    left_padded,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    prompt,
    upstream_and_patched,
)
from tiny import ALL_KINDS, KIND_OF, KINDS, clear_case, tiny_model, token_ids
from transformers import DynamicCache, GenerationConfig

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.patched import CACHE_NAMES, text_model
from custom_pypto.requirements import numbers

GREEDY = {"max_new_tokens": 6, "do_sample": False}
DICT = {"return_dict_in_generate": True}
OPTIONS = {
    "greedy-left-padded": {},
    "chunked-prefill": {"prefill_chunk_size": 16},
    "without-cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams-returned": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True},
    "sampling-returned": {"do_sample": True, "num_return_sequences": 3},
}


def prompts(model, seed):
    """Of a batch, left-padded where upstream does not count padding."""
    count_padding = model.config.model_type in COUNT_PADDING
    return prompt(seed, [0, 0, 0] if count_padding else PADS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_generate_equals_upstream_transformers(kind, options):
    upstream, patched = upstream_and_patched(kind)
    options = {"do_sample": False, "max_new_tokens": 10} | options
    # before 5.23 upstream's own cache of DeepSeek-V4 mixes up the beams
    old = kind == "deepseek_v4" and numbers(transformers.__version__) < (5, 23)
    without = {"use_cache": False} if old and "num_beams" in options else {}

    def generate(model, seed):
        torch.manual_seed(5)
        more = without if model is upstream else {}
        return model.generate(**prompts(model, seed), **options, **more)

    assert_same(upstream, patched, generate)


@pytest.mark.parametrize("kind", COUNT_PADDING)
def test_left_padded_generation_equals_each_sequence_alone(kind):
    upstream, patched = upstream_and_patched(kind)
    options = dict(max_new_tokens=10, do_sample=False)

    def one_by_one(seed):
        ids, _, _ = left_padded(PADS, 40, seed)
        rows = [row[None, n:] for row, n in zip(ids, PADS, strict=True)]
        return [upstream.generate(row, **options)[0, -10:] for row in rows]

    seed, want = clear_case(one_by_one)
    got = patched.generate(**prompt(seed), **options)[:, -10:]
    assert torch.equal(got, torch.stack(want))


@pytest.mark.parametrize("kind", KINDS)
def test_generation_past_max_position_embeddings_goes_on_as_in_upstream(kind):
    # rotations are computed for any position; transformers logs a reminder
    def generate(model, seed):
        tokens = model.generate(**prompt(seed), max_new_tokens=20, do_sample=False)
        assert tokens.size(1) == 60
        return tokens

    assert_same(*upstream_and_patched(kind, max_position_embeddings=48), generate)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_lookup_equals_upstream_greedy_and_takes_back_wrong_guesses(kind, monkeypatch):
    upstream, patched = upstream_and_patched(kind)
    taken_back, crop = [], models.PagedCache.crop

    def spy(self, tokens):
        taken_back.append(int(tokens))
        crop(self, tokens)

    monkeypatch.setattr(models.PagedCache, "crop", spy)

    def generate(model, seed):
        ids = token_ids(1, 12, seed).repeat(1, 3)  # something to look up
        options = {"prompt_lookup_num_tokens": 3} if model is patched else {}
        return model.generate(ids, max_new_tokens=16, do_sample=False, **options)

    assert_same(upstream, patched, generate)
    assert min(taken_back) < 0


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4"])
def test_a_cache_kept_between_calls_continues_the_conversation(kind):
    upstream, patched = upstream_and_patched(kind)

    def two_turns(model, seed):
        cache, asked = {}, prompts(model, seed)
        if model is patched:
            cache[CACHE] = models.PagedCache(patched, 3, 96, block_size=16)
        first = model.generate(**asked, **GREEDY, **cache)
        ids = torch.cat([first, token_ids(3, 10, seed=2)], 1)
        mask = torch.cat([asked["attention_mask"], torch.ones(3, 16, dtype=torch.int64)], 1)
        return model.generate(ids, attention_mask=mask, **GREEDY, **cache)

    assert_same(upstream, patched, two_turns)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_cache_has_either_name_with_every_transformers(kind, name):
    upstream, patched = tiny_model(kind), patched_model(kind)

    def run(model, seed):
        ids, argument = token_ids(2, 40, seed), CACHE
        cache = DynamicCache(config=text_model(model).config)
        if model is patched:
            cache, argument = models.PagedCache(patched, 2, 64, block_size=16), name
        logits = [model(part, **{argument: cache}).logits for part in (ids[:, :13], ids[:, 13:30])]
        hidden = model.base_model(ids[:, 30:39], **{argument: cache}).last_hidden_state
        assert cache.get_seq_length() == 39
        tokens = model.generate(ids, **{argument: cache}, **GREEDY)
        assert cache.get_seq_length() == tokens.size(1) - 1
        return *logits, hidden, tokens

    assert_same(upstream, patched, run)


@pytest.mark.parametrize("kind", KINDS)
def test_two_caches_are_rejected(kind):
    model, ids = patched_model(kind), token_ids(2, 4)
    caches = {name: models.PagedCache(model, 2, 16) for name in CACHE_NAMES}
    message = f"cache and past_key_values are two names of one argument, got both; pass {CACHE}"
    with pytest.raises(ValueError, match=message):
        model.base_model(ids, **caches)


# ---- every way to call ------------------------------------------------------------------------


def same(model):
    """A model like this one, upstream."""
    return tiny_model(KIND_OF[model.config.model_type])


def smaller(model):
    """Two of the layers, as a draft model."""
    return tiny_model(KIND_OF[model.config.model_type], num_hidden_layers=2)


def embedded(model, ids):
    return model.get_input_embeddings()(ids)


def scores(model, ids):
    return model.generate(
        ids, output_scores=True, output_logits=True, output_hidden_states=True, **DICT, **GREEDY
    )


def continued(model, ids):
    """A second turn on the cache that the first one returned."""
    turn = model.generate(ids[:, :14], **DICT, **GREEDY)
    ids = torch.cat([turn.sequences, ids[:, 14:]], 1)
    return model.generate(ids, **{CACHE: turn[CACHE]}, **GREEDY)


def continued_from_a_forward(model, ids):
    cache = model(ids[:, :13], use_cache=True)[CACHE]
    return model.generate(ids, **{CACHE: cache}, max_new_tokens=40, do_sample=False)


def continued_from_embeddings(model, ids):
    turn = model.generate(inputs_embeds=embedded(model, ids), **DICT, **GREEDY)
    together = torch.cat([embedded(model, ids), embedded(model, turn.sequences)], 1)
    return model.generate(inputs_embeds=together, **{CACHE: turn[CACHE]}, **GREEDY)


def padded(model, ids, pads=5):
    mask = torch.ones(2, pads + ids.size(1), dtype=torch.int64)
    mask[:, :pads] = 0
    ids = torch.cat([ids.new_zeros(2, pads), ids], 1)
    return model.generate(ids, attention_mask=mask, **GREEDY)[:, pads:]


def one(ids):
    return ids[:1].repeat(1, 2)  # something to look up


GENERATE = {
    "everything-returned": scores,
    "beams-with-scores": lambda m, ids: m.generate(
        ids, num_beams=3, output_scores=True, **DICT, **GREEDY
    ),
    "beams-without-cache": lambda m, ids: m.generate(ids, num_beams=2, use_cache=False, **GREEDY),
    "beams-stopped-early": lambda m, ids: m.generate(
        ids, num_beams=2, early_stopping=True, eos_token_id=5, **GREEDY
    ),
    "beams-sampled": lambda m, ids: m.generate(
        ids, num_beams=3, do_sample=True, top_k=20, max_new_tokens=6
    ),
    "processors": lambda m, ids: m.generate(
        ids,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        bad_words_ids=[[3]],
        min_new_tokens=4,
        **GREEDY,
    ),
    "guidance": lambda m, ids: m.generate(ids, guidance_scale=1.5, max_new_tokens=24),
    "left-padded": padded,
    "position-ids": lambda m, ids: m.generate(
        ids, position_ids=torch.arange(20).expand(2, -1), **GREEDY
    ),
    "embeddings": lambda m, ids: m.generate(inputs_embeds=embedded(m, ids), **GREEDY),
    "embeddings-and-ids": lambda m, ids: m.generate(ids, inputs_embeds=embedded(m, ids), **GREEDY),
    "embeddings-beams": lambda m, ids: m.generate(
        inputs_embeds=embedded(m, ids), num_beams=2, **GREEDY
    ),
    "no-prompt": lambda m, ids: m.generate(bos_token_id=1, **GREEDY),
    "a-second-turn": continued,
    "a-second-turn-after-a-forward": continued_from_a_forward,
    "a-second-turn-of-embeddings": continued_from_embeddings,
    "assisted-by-upstream": lambda m, ids: m.generate(
        ids[:1], assistant_model=smaller(m), **GREEDY
    ),
    "assisted-by-patched": lambda m, ids: m.generate(
        ids[:1], assistant_model=models.use_custom_pypto(smaller(m)), **GREEDY
    ),
    "assisted-and-sampled": lambda m, ids: m.generate(
        ids[:1], assistant_model=same(m), do_sample=True, max_new_tokens=6
    ),
    "assisted-by-its-first-layer": lambda m, ids: m.generate(
        ids[:1], assistant_early_exit=1, **GREEDY
    ),
    "prompt-lookup-sampled": lambda m, ids: m.generate(
        one(ids), prompt_lookup_num_tokens=3, do_sample=True, top_k=0, max_new_tokens=6
    ),
}


def mask_of(dtype):
    return lambda m, ids: m(ids, attention_mask=torch.ones(2, 20, dtype=dtype))


FORWARD = {
    "logits-to-keep": lambda m, ids: m(ids, logits_to_keep=3),
    "logits-to-keep-by-index": lambda m, ids: m(ids, logits_to_keep=torch.tensor([1, 5])),
    "embeddings": lambda m, ids: m(inputs_embeds=embedded(m, ids)),
    "router-logits": lambda m, ids: m(ids, output_router_logits=True),
    "labels": lambda m, ids: m(ids, labels=ids),
    "tuple": lambda m, ids: m(ids, return_dict=False)[:1],
    "hidden-states": lambda m, ids: m(ids, output_hidden_states=True).hidden_states,
    "later-positions": lambda m, ids: m(ids, position_ids=torch.arange(5, 25)[None]),
    "bool-mask": mask_of(torch.bool),
    "float-mask": mask_of(torch.float32),
    "training-mode": lambda m, ids: (m.train()(ids), m.eval())[0],
}


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = [value for key, value in output.items() if key != CACHE]
    return [t for value in output or () for t in tensors(value)]


@pytest.mark.parametrize(
    "call",
    [
        *(pytest.param(call, id=f"generate-{name}") for name, call in GENERATE.items()),
        *(pytest.param(call, id=f"forward-{name}") for name, call in FORWARD.items()),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_gives_what_upstream_gives(kind, call):
    def run(model, seed):
        torch.manual_seed(5)
        found = tensors(call(model, token_ids(2, 20, seed)))
        assert found
        return found

    assert_same(*upstream_and_patched(kind), run)


def generate_batch(model, ids):
    return model.generate_batch([ids[0].tolist()], generation_config=GenerationConfig(**GREEDY))


def right_padded():
    return (torch.arange(20) < 15).expand(2, -1)


# of calls that upstream serves; those that it rejects itself are not asked
ATTENTIONS = "output_attentions must be False .the ops never form the attention matrix.*, got True"
OTHER_CACHE = f"{CACHE} must be a models.PagedCache, got DynamicCache"
REJECTED = {
    "attentions": (
        lambda m, ids: m.generate(ids, output_attentions=True, **DICT, **GREEDY),
        ATTENTIONS,
    ),
    "attentions-of-a-forward": (lambda m, ids: m(ids, output_attentions=True), ATTENTIONS),
    "static-cache": (
        lambda m, ids: m.generate(ids, cache_implementation="static", **GREEDY),
        "generate: cache_implementation must be None or 'dynamic' .*, got 'static'",
    ),
    "upstream-cache": (
        lambda m, ids: m.generate(ids, **{CACHE: DynamicCache(config=m.config)}, **GREEDY),
        OTHER_CACHE,
    ),
    "upstream-cache-of-a-forward": (
        lambda m, ids: m(ids, **{CACHE: DynamicCache(config=m.config)}),
        OTHER_CACHE,
    ),
    "4d-mask": (
        lambda m, ids: m(ids, attention_mask=torch.zeros(2, 1, 20, 20)),
        r"attention_mask must be \[B, tokens so far\].*got \[2, 1, 20, 20\]; call "
        r"models.use_transformers\(model\) for masks of other shapes",
    ),
    "right-padding": (
        lambda m, ids: m(ids, attention_mask=right_padded()),
        "attention_mask must have all padding on the left, got a 0 after a 1",
    ),
    "right-padding-of-generate": (
        lambda m, ids: m.generate(ids, attention_mask=right_padded(), **GREEDY),
        "set tokenizer.padding_side = 'left'",
    ),
}


@pytest.mark.parametrize("call, message", REJECTED.values(), ids=REJECTED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_only_upstream_can_do_is_rejected_by_name(kind, call, message):
    model, ids = patched_model(kind), token_ids(2, 20)
    with pytest.raises((TypeError, ValueError), match=message):
        call(model, ids)
    call(models.use_transformers(model), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_a_model_without_its_mtp_layer_are_rejected_with_the_remedy(kind):
    upstream, patched = upstream_and_patched(kind)
    with pytest.raises(ValueError, match="Could not find `num_mtp_layers`"):
        upstream.generate(token_ids(1, 20), use_mtp=True, **GREEDY)
    message = r"use_mtp must be False for a model without its MTP layer.*models.load.path, mtp=True"
    with pytest.raises(ValueError, match=message):
        patched.generate(token_ids(1, 20), use_mtp=True, **GREEDY)


@pytest.mark.parametrize("kind", KINDS)
def test_what_upstream_rejects_is_rejected_as_there(kind):
    for model in upstream_and_patched(kind):
        with pytest.raises(ValueError, match="Invalid layer type: indexed_attention"):
            generate_batch(model, token_ids(1, 20))
        with pytest.raises(ValueError, match="`model_kwargs` are not used by the model"):
            model.generate(token_ids(1, 20), attention_masks=None, other=1, **GREEDY)

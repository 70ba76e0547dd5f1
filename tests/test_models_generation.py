"""What transformers asks of any model that generates, asked of the patched ones: every way to call
``generate()`` and ``forward`` gives what upstream gives, or is rejected by name."""

import pytest
import torch
from tiny import KIND_OF, KINDS, clear_case, tiny_model, token_ids
from transformers import DynamicCache, GenerationConfig

from custom_pypto import models

TOLERANCE = 5e-5  # float32, logits up to about 10, as in test_models.py
GREEDY = {"max_new_tokens": 6, "do_sample": False}
DICT = {"return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def no_grad_and_one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    with torch.no_grad():
        yield


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
    return model.generate(ids, past_key_values=turn.past_key_values, **GREEDY)


def continued_from_a_forward(model, ids):
    cache = model(ids[:, :13], use_cache=True).past_key_values
    return model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)


def continued_from_embeddings(model, ids):
    turn = model.generate(inputs_embeds=embedded(model, ids), **DICT, **GREEDY)
    together = torch.cat([embedded(model, ids), embedded(model, turn.sequences)], 1)
    return model.generate(inputs_embeds=together, past_key_values=turn.past_key_values, **GREEDY)


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
    "later-positions": lambda m, ids: m(ids, position_ids=torch.arange(5, 25)[None]),
    "bool-mask": mask_of(torch.bool),
    "float-mask": mask_of(torch.float32),
    "training-mode": lambda m, ids: (m.train()(ids), m.eval())[0],
}


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = [value for key, value in output.items() if key != "past_key_values"]
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
    upstream = tiny_model(kind)
    patched = models.use_custom_pypto(tiny_model(kind), block_size=16)

    def run(model, seed):
        torch.manual_seed(5)
        return tensors(call(model, token_ids(2, 20, seed)))

    seed, want = clear_case(lambda seed: run(upstream, seed))
    got = run(patched, seed)
    assert want and len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def generate_batch(model, ids):
    return model.generate_batch([ids[0].tolist()], generation_config=GenerationConfig(**GREEDY))


# of calls that upstream serves; those that it rejects itself are not asked
REJECTED = {
    "attentions": (
        lambda m, ids: m.generate(ids, output_attentions=True, **DICT, **GREEDY),
        "output_attentions must be False .the ops never form the attention matrix.*, got True",
    ),
    "static-cache": (
        lambda m, ids: m.generate(ids, cache_implementation="static", **GREEDY),
        "generate: cache_implementation must be None or 'dynamic' .*, got 'static'",
    ),
    "upstream-cache": (
        lambda m, ids: m.generate(ids, past_key_values=DynamicCache(config=m.config), **GREEDY),
        "past_key_values must be a models.PagedCache, got DynamicCache",
    ),
    "4d-mask": (
        lambda m, ids: m(ids, attention_mask=torch.zeros(2, 1, 20, 20)),
        r"use_transformers\(model\) for masks of other shapes",
    ),
    "right-padding": (
        lambda m, ids: m(ids, attention_mask=(torch.arange(20) < 15).expand(2, -1)),
        "attention_mask must have all padding on the left, got a 0 after a 1",
    ),
}


@pytest.mark.parametrize("call, message", REJECTED.values(), ids=REJECTED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_only_upstream_can_do_is_rejected_by_name(kind, call, message):
    model, ids = models.use_custom_pypto(tiny_model(kind)), token_ids(2, 20)
    with pytest.raises((TypeError, ValueError), match=message):
        call(model, ids)
    call(models.use_transformers(model), ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_upstream_rejects_is_rejected_as_there(kind):
    upstream, patched = tiny_model(kind), models.use_custom_pypto(tiny_model(kind))
    for model in (upstream, patched):
        with pytest.raises(ValueError, match="Invalid layer type: indexed_attention"):
            generate_batch(model, token_ids(1, 20))
        with pytest.raises(ValueError, match="Could not find `num_mtp_layers`"):
            model.generate(token_ids(1, 20), use_mtp=True, **GREEDY)
        with pytest.raises(ValueError, match="`model_kwargs` are not used by the model"):
            model.generate(token_ids(1, 20), attention_masks=None, other=1, **GREEDY)

"""The MTP layer on the ops gives what transformers' own gives, around the same decoder layer."""

import pytest
import torch
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from mtp_harness import MTP_KINDS, upstream_drafting
from tiny import clear_case, token_ids
from transformers.modeling_layers import MtpLayer

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.mtp import layer as mtp


def of_upstream(layer):
    """transformers' layer with these weights."""
    config, norm = layer.self_attn.config, type(layer.enorm)
    made = MtpLayer(config, type(layer), norm, layer.self_attn.layer_idx).eval()
    for name in ("enorm", "hnorm", "eh_proj"):
        getattr(made, name).load_state_dict(getattr(layer, name).state_dict())
    made.post_norm.load_state_dict(layer.shared_head.norm.state_dict())
    made.mtp_block = layer
    return made


def first_of_tuple(layer, args, output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("kind", MTP_KINDS)
def test_rows_of_a_text_are_those_of_transformers_layer(kind, monkeypatch):
    model = upstream_drafting(kind, right=False)

    def run(seed):
        ids = token_ids(2, 40, seed)
        hidden = model.model(ids, use_cache=False).last_hidden_state
        return called(model, ids[:, 1:], hidden[:, :-1])

    seed, want = clear_case(run)
    outputs = outputs_of(monkeypatch)
    models.use_custom_pypto(model, block_size=16)
    ids = token_ids(2, 40, seed)
    for chunks in ([40], [17, 1, 22]):
        outputs.clear()
        cache = models.PagedCache(model, 2, 48, block_size=16)
        for part in ids.split(chunks, 1):
            model(part, **{CACHE: cache})
        got = torch.cat(outputs, 1)[:, 1:]  # the first token has no row
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])


def outputs_of(monkeypatch):
    """What the layer gives for the tokens of each call from now on."""
    outputs, plain = [], mtp.run
    monkeypatch.setattr(mtp, "run", lambda *args: outputs.append(plain(*args)) or outputs[-1])
    return outputs


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("kind", MTP_KINDS)
def test_later_drafts_attend_to_the_selection_of_the_first_if_the_config_says_so(
    kind, shares, monkeypatch
):
    changes = {"index_share_for_mtp_iteration": shares}
    model = upstream_drafting(kind, right=False, **changes)
    layer = model.model.layers[3]
    everything = upstream_drafting(kind, right=False, **changes, index_topk=48)
    everything.load_state_dict(model.state_dict())

    def run(seed):
        """The text, its first draft by transformers' layer, and the second: by what the first
        selected, and by a selection of its own."""
        ids = token_ids(1, 40, seed)
        hidden = model.model(ids, use_cache=False).last_hidden_state
        token = model.lm_head(hidden[:, -1:]).argmax(-1)
        ids, selected = torch.cat([ids, token], 1), []
        hook = layer.self_attn.indexer.register_forward_hook(lambda *x: selected.append(x[2]))
        states = called(model, ids[:, 1:], hidden)
        draft = model.lm_head(states[:, -1:]).argmax(-1)
        after = torch.cat([ids[:, 1:], draft], 1), torch.cat([hidden, states[:, -1:]], 1)
        own = called(model, *after)
        hook.remove()
        seen = torch.full((41,), -torch.inf)
        seen[selected[0][0, -1].long()] = 0
        return ids[:, :40], states[:, -1:], called(everything, *after, seen)[:, -1:], own[:, -1:]

    seed, (ids, first, of_first, own) = clear_case(run)
    assert (of_first - own).abs().max() > 100 * TOLERANCES[kind]  # else nothing is tested
    outputs = outputs_of(monkeypatch)
    models.use_custom_pypto(model, block_size=16)
    options = {"use_mtp": True, "num_assistant_tokens": 2, "do_sample": False}
    model.generate(ids, max_new_tokens=4, **options)
    want = [first, of_first if shares else own]  # behind the rows of the prompt
    for got, state in zip(outputs[1:3], want, strict=True):
        torch.testing.assert_close(got[:, -1:], state, rtol=0, atol=TOLERANCES[kind])


def called(model, ids, before, last=None):
    """transformers' layer over tokens from the second of a text on.

    Args:
        last: what is added to the scores of the last token.
    """
    text, layer, tokens = model.model, model.model.layers[3], ids.size(1)
    embeddings, positions = text.embed_tokens(ids), torch.arange(1, tokens + 1)[None]
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)
    if last is not None:
        mask[-1] = last
    hook = layer.register_forward_hook(first_of_tuple)
    output = of_upstream(layer)(
        embeddings,
        before,
        position_embeddings=text.rotary_emb(embeddings, position_ids=positions),
        attention_mask=mask[None, None],
        position_ids=positions,
        **{CACHE: None},
    )
    hook.remove()
    return output

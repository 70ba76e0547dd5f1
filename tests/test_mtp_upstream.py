"""The MTP layer on the ops gives what transformers' own gives, of the same attention and MLP; of
DeepSeek-V4, of which transformers has none, tests/test_mtp_v4.py has the definition."""

import pytest
import torch
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from mtp_harness import MTP_KINDS, surroundings, upstream_drafting
from published import V4
from tiny import clear_case, token_ids
from torch import nn
from transformers.modeling_layers import MtpLayer

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.mtp import layer as mtp
from custom_pypto.models.patched import text_model

# whose decoder layers have streams, and whose MTP layers have none
PLAIN = ("hy_v4", "glm5_next")


class Block(nn.Module):
    """A decoder layer with plain residuals, around norm and attention and around norm and MLP."""

    def __init__(self, layer):
        super().__init__()
        self.inside = layer

    def forward(self, x, **kwargs):
        layer = self.inside
        x = x + layer.self_attn(layer.input_layernorm(x), **kwargs)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))


class First(nn.Module):
    """A decoder layer of transformers, without the indices that some return."""

    def __init__(self, layer):
        super().__init__()
        self.inside = layer

    def forward(self, x, **kwargs):
        output = self.inside(x, **kwargs)
        return output[0] if isinstance(output, tuple) else output


def of_upstream(layer, kind):
    """transformers' layer with these weights."""
    block = (Block if kind in PLAIN else First)(layer)
    config, norm = layer.self_attn.config, type(layer.enorm)
    made = MtpLayer(config, lambda *_: block, norm, layer.self_attn.layer_idx).eval()
    for name in ("enorm", "hnorm", "eh_proj"):
        getattr(made, name).load_state_dict(getattr(layer, name).state_dict())
    made.post_norm.load_state_dict(layer.shared_head.norm.state_dict())
    return made


def called(model, kind, ids, before):
    """transformers' layer over tokens from the second of a text on."""
    text = text_model(model)
    layer = mtp.mtp_layer(text)
    own = getattr(layer, "embed_tokens", text.embed_tokens)
    embeddings, positions = own(ids), torch.arange(1, ids.size(1) + 1)[None]
    others = surroundings(text, layer, kind, embeddings, positions)
    upstream = of_upstream(layer, kind)
    return upstream(embeddings, before, position_ids=positions, **others, **{CACHE: None})


def hidden_states(model, ids):
    return text_model(model)(ids, use_cache=False).last_hidden_state


def outputs_of(monkeypatch):
    """What the layer gives for the tokens of each call from now on."""
    outputs, plain = [], mtp.run
    monkeypatch.setattr(mtp, "run", lambda *args: outputs.append(plain(*args)) or outputs[-1])
    return outputs


@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind != V4])
def test_rows_of_a_text_are_those_of_transformers_layer(kind, monkeypatch):
    model = upstream_drafting(kind, right=False)

    def run(seed):
        ids = token_ids(2, 40, seed)
        return called(model, kind, ids[:, 1:], hidden_states(model, ids)[:, :-1])

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


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind not in ("dots3_note", V4)])
def test_later_drafts_attend_to_the_selection_of_the_first_if_the_config_says_so(
    kind, shares, monkeypatch
):
    model = upstream_drafting(kind, right=False, index_share_for_mtp_iteration=shares)
    layer = mtp.mtp_layer(text_model(model))
    indexer, head = layer.self_attn.indexer, model.lm_head

    def run(seed):
        """The text, its first draft by transformers' layer, and the second: by what the first
        selected, and by a selection of its own."""
        ids = token_ids(1, 40, seed)
        hidden = hidden_states(model, ids)
        token = head(hidden[:, -1:].to(head.weight.dtype)).argmax(-1)
        ids, selected = torch.cat([ids, token], 1), []
        hook = indexer.register_forward_hook(lambda *x: selected.append(x[2][:, -1:]))
        first = called(model, kind, ids[:, 1:], hidden)[:, -1:]
        hook.remove()
        draft = head(first.to(head.weight.dtype)).argmax(-1)
        after = torch.cat([ids[:, 1:], draft], 1), torch.cat([hidden, first], 1)
        own = called(model, kind, *after)[:, -1:]
        hook = indexer.register_forward_hook(
            lambda *x: torch.cat([x[2][:, :-1], selected[0]], 1)  # in place of the last token's
        )
        of_first = called(model, kind, *after)[:, -1:]
        hook.remove()
        return ids[:, :40], first, of_first, own

    seed, (ids, first, of_first, own) = clear_case(run)
    assert (of_first - own).abs().max() > 10 * TOLERANCES[kind]  # else nothing is tested
    outputs = outputs_of(monkeypatch)
    models.use_custom_pypto(model, block_size=16)
    options = {"use_mtp": True, "num_assistant_tokens": 2, "do_sample": False}
    model.generate(ids, max_new_tokens=4, **options)
    want = [first, of_first if shares else own]  # behind the rows of the prompt
    for got, state in zip(outputs[1:3], want, strict=True):
        torch.testing.assert_close(got[:, -1:], state, rtol=0, atol=TOLERANCES[kind])

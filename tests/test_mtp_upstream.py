"""The MTP layer on the ops gives what transformers' own gives, around the same decoder layer; of
DeepSeek-V4, of which transformers has none, tests/test_mtp_v4.py has the definition."""

import pytest
import torch
from model_harness import TOLERANCES, no_grad_and_one_thread  # noqa: F401
from mtp_harness import MTP_KINDS, upstream_drafting
from published import V4
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


@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind != V4])
def test_rows_of_a_text_are_those_of_transformers_layer(kind, monkeypatch):
    model = upstream_drafting(kind, right=False)
    text, layer = model.model, model.model.layers[3]

    def run(seed):
        ids = token_ids(2, 40, seed)
        hidden = text(ids, use_cache=False).last_hidden_state
        embeddings = text.embed_tokens(ids[:, 1:])
        positions = torch.arange(1, 40)[None]
        hook = layer.register_forward_hook(first_of_tuple)
        output = of_upstream(layer)(
            embeddings,
            hidden[:, :-1],
            position_embeddings=text.rotary_emb(embeddings, position_ids=positions),
            attention_mask=torch.full((39, 39), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            **{CACHE: None},
        )
        hook.remove()
        return output

    seed, want = clear_case(run)
    outputs, plain = [], mtp.run
    monkeypatch.setattr(mtp, "run", lambda *args: outputs.append(plain(*args)))
    models.use_custom_pypto(model, block_size=16)
    ids = token_ids(2, 40, seed)
    for chunks in ([40], [17, 1, 22]):
        outputs.clear()
        cache = models.PagedCache(model, 2, 48, block_size=16)
        for part in ids.split(chunks, 1):
            model(part, **{CACHE: cache})
        got = torch.cat(outputs, 1)[:, 1:]  # the first token has no row
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])

"""Random models with an MTP layer, some of whose drafts are right."""

import pytest
import torch
from model_harness import prompt
from published import V4
from tiny import made, randomise, tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models.architectures import ARCHITECTURES
from custom_pypto.models.mtp import layer as mtp
from custom_pypto.models.patched import decoder_layers, text_model

MTP_KINDS = [it.folder for it in ARCHITECTURES.values() if it.mtp]
# of whose sequences one may be ahead of another
APART = [kind for kind in MTP_KINDS if kind not in ("glm5_next", V4)]
# for what depends on no architecture: a run without ``--all`` tests it of one
OF_ONE = [
    pytest.param(kind, marks=() if kind == "glm_moe_dsa" else pytest.mark.slow)
    for kind in MTP_KINDS
]
NEW = 24
PADS = [0, 13]
DICT = {"return_dict_in_generate": True}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def weakened(layers, factor):
    """Scales down what these layers add: the next token then follows from the last one, mostly."""
    for layer in layers:
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "o_b_proj.weight", "down_proj.weight", "down_proj")):
                weight.mul_(factor)


@torch.no_grad()
def upstream_drafting(kind="deepseek_v32", right=True, **changes):
    """An unpatched model whose next token follows from the last one, mostly, and an MTP layer.

    Args:
        right: the layer drafts by the last token, so that some of its drafts are right; else it is
            random.
    """
    model = tiny_model(kind) if not changes else made(kind, **changes)
    torch.manual_seed(2)
    layer = mtp.add_mtp(model)
    randomise(layer, norm=0.3)
    if right:
        text = text_model(model)
        # the weights of DeepSeek-V4 are twice as large
        weakened(decoder_layers(text), 0.002 if kind == V4 else 0.01)
        layer.enorm.load_state_dict({"weight": torch.ones_like(layer.enorm.weight)}, strict=False)
        if hasattr(layer, "embed_tokens"):
            layer.embed_tokens.load_state_dict(model.get_input_embeddings().state_dict())
        if kind == V4:
            norm, of_token, of_states = layer.kv_norm, layer.e_proj.weight, layer.h_proj.weight
            layer.hc_head.load_state_dict(text.hc_head.state_dict())
        else:
            norm, both = layer.shared_head.norm, layer.eh_proj.weight
            of_token, of_states = both.chunk(2, 1)
        norm.load_state_dict(text.norm.state_dict())
        of_token.mul_(0.1).add_(torch.eye(len(of_token)))
        of_states.mul_(0.1)
    torch.manual_seed(1)
    return model


def drafting_model(kind="deepseek_v32", right=True, **changes):
    """The same, patched."""
    return models.use_custom_pypto(upstream_drafting(kind, right, **changes), block_size=16)


def surroundings(text, layer, kind, x, positions):
    """What a decoder layer of transformers gets besides ``x``."""
    tokens = x.size(1)
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    if kind == "glm5_next":
        return {"position_embeddings": None, "attention_mask": torch.ones(x.shape[:2]).bool()}
    if kind in (V4, "dots3_note"):
        window = layer.self_attn.sliding_window
        mask = mask + torch.full((tokens, tokens), -torch.inf).tril(-window)
    if kind == V4:
        rotations = {"main": text.rotary_emb(x, positions, layer_type="main")}
    elif kind == "dots3_note":
        rotations = text.rotary_emb(x, positions, "sliding_attention")
    else:
        rotations = text.rotary_emb(x, position_ids=positions)
    return {"position_embeddings": rotations, "attention_mask": mask}


def mtp_rows(model, cache, sequence):
    """What the pools of the MTP layer hold of a sequence, by pool; of DeepSeek-V4 the rows in a
    ring that is longer than the texts of the tests."""
    layer = cache.store.layers[mtp.mtp_layer(text_model(model)).self_attn.layer_idx]
    tokens, found = int(cache.lengths[sequence]) - 1, {}
    for name, pool in layer.pools.items():
        layout, count = layer.layouts[name], tokens
        if name != "kv" and layout.ring and not layout.ratio:
            continue  # inputs of groups: tokens that later ones need
        if layout.ring:
            assert tokens <= layout.ring
        else:
            count = tokens // layout.ratio
        rows = pool[layer.tables[layout][sequence].long()].flatten(0, 1)
        found[name] = rows[:count]
    return found


def generated(model, inputs, **options):
    torch.manual_seed(5)
    return model.generate(**inputs, **GREEDY | options)


def padded(seed=1):
    # random tokens: the embedding of a padding token is 0, which would let experts tie
    return prompt(seed, PADS) | {"input_ids": token_ids(len(PADS), 40, seed)}


def alone(seed):
    return {"input_ids": token_ids(1, 40, seed)}

"""Random models with an MTP layer, some of whose drafts are right."""

import torch
from tiny import made, randomise, tiny_model

from custom_pypto import models
from custom_pypto.models.architectures import ARCHITECTURES
from custom_pypto.models.mtp.layer import add_mtp, mtp_layer
from custom_pypto.models.patched import text_model

MTP_KINDS = [it.folder for it in ARCHITECTURES.values() if it.mtp]


def weakened(layers):
    """Scales down what these layers add: the next token then follows from the last one, mostly."""
    for layer in layers:
        for name, weight in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.mul_(0.01)


@torch.no_grad()
def upstream_drafting(kind="deepseek_v32", right=True, **changes):
    """An unpatched model whose next token follows from the last one, mostly, and an MTP layer.

    Args:
        right: the layer drafts by the last token, so that some of its drafts are right; else it is
            random.
    """
    model = tiny_model(kind) if not changes else made(kind, **changes)
    torch.manual_seed(2)
    layer = add_mtp(model)
    randomise(layer, norm=0.3)
    if right:
        weakened(text_model(model).layers)
        layer.enorm.load_state_dict({"weight": torch.ones_like(layer.enorm.weight)}, strict=False)
        layer.shared_head.norm.load_state_dict(text_model(model).norm.state_dict())
        if hasattr(layer, "embed_tokens"):
            layer.embed_tokens.load_state_dict(model.get_input_embeddings().state_dict())
        hidden = layer.eh_proj.out_features
        layer.eh_proj.weight.mul_(0.1)
        layer.eh_proj.weight[:, :hidden] += torch.eye(hidden)
    torch.manual_seed(1)
    return model


def drafting_model(kind="deepseek_v32", right=True, **changes):
    """The same, patched."""
    return models.use_custom_pypto(upstream_drafting(kind, right, **changes), block_size=16)


def mtp_rows(model, cache, sequence):
    """What the pools of the MTP layer hold of a sequence, by pool."""
    layer = cache.store.layers[mtp_layer(text_model(model)).self_attn.layer_idx]
    tokens, found = int(cache.lengths[sequence]) - 1, {}
    for name, pool in layer.pools.items():
        layout = layer.layouts[name]
        if layout.ring and not layout.ratio:  # inputs of groups: tokens that later ones need
            continue
        rows = pool[layer.tables[layout][sequence].long()].flatten(0, 1)
        found[name] = rows[: tokens // layout.ratio]
    return found

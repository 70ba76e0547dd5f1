"""What would be a wrong patch shows in the logits: most of it looks healthy until the context
exceeds ``index_topk``."""

import functools

import pytest
import torch
from model_harness import (
    TOLERANCES,
    WRONG,
    assert_close,
    fed,
    furthest,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    reference,
    upstream_and_patched,
)
from tiny import ALL_KINDS, KINDS, V4_LAYERS, tiny_model
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from custom_pypto.models import compression, deepseek_v4
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.one_op import Rotation
from custom_pypto.models.patched import patched_attentions, text_model

_, SPARSE, HEAVY, _ = V4_LAYERS


def attentions(model):
    return list(patched_attentions(text_model(model)).values())


def each(change, part=None, layer_type=None):
    """A trap: ``change`` of the attention, or of this part of it, in every layer that has one."""

    def apply(monkeypatch, model):
        for attention in attentions(model):
            if layer_type in (None, getattr(attention, "layer_type", None)):
                if (module := getattr(attention, part) if part else attention) is not None:
                    change(module)

    return apply


def replaced(name, wrong, owner=None):
    """A trap: the method ``name`` computes ``wrong(right method, self, *args)``.

    Args:
        owner: the class of the method; None: that of the attention.
    """

    def apply(monkeypatch, model):
        cls = owner or type(attentions(model)[0])
        right = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args: wrong(right, *args))

    return apply


def other_rope(name):
    def apply(monkeypatch, model):
        cls = type(attentions(model)[0])
        interleaved = not getattr(cls, name).interleaved
        function = "apply_rotary_pos_emb" + "_interleave" * interleaved
        other = Rotation(getattr(modeling_deepseek_v32, function), interleaved)
        monkeypatch.setattr(cls, name, other)

    return apply


def other_index_dims(monkeypatch, model):
    cls = type(attentions(model)[0])
    monkeypatch.setattr(cls, "index_rope_last", not cls.index_rope_last)


def unnormed_index_query(index_query, self, q_latent, tokens):
    normed = q_latent[..., : self.q_lora_rank]
    return index_query(self, normed / self.q_a_layernorm.weight, tokens)


TRAPS = {
    "indexer-rotates-the-other-pairs": other_rope("index_rope"),
    "indexer-rotates-the-other-dims": other_index_dims,
    "mla-rotates-half-split-pairs": other_rope("rope"),
    "index-query-from-the-latent-before-its-norm": replaced(
        "index_query", unnormed_index_query, LatentAttention
    ),
    "index-key-without-norm-bias": each(lambda m: m.k_norm.bias.zero_(), "indexer"),
    "index-weights-without-sign": each(lambda m: m.weights_proj.weight.abs_(), "indexer"),
    "softmax-scale-of-latent-plus-rope": each(lambda a: setattr(a, "scaling", 80**-0.5)),
    "no-selection": each(lambda m: setattr(m, "index_topk", 64), "indexer"),
}


# ---- what is particular to an architecture ----------------------------------------------------


def no_gate(project, self, output, gate):
    return project(self, output, torch.full_like(gate, torch.inf))


def wider_gate(project, self, output, gate):
    return project(self, output, 2 * gate)


def normed_latent_twice(compress, self, hidden_states):
    normed = compress(self, hidden_states)[..., : self.q_lora_rank]
    return torch.cat([normed, normed], -1)


def latents_exchanged(project, self, hidden_states, q_latent, tokens):
    return project(self, hidden_states, q_latent.roll(self.q_lora_rank, -1), tokens)


def longer_window(monkeypatch, model):
    attentions(model)[1].sliding_window += 1


def not_shared(monkeypatch, model):
    read = attentions(model)[1].read

    def wrong(x, cos, sin, indices, *others):
        return read(x, cos, sin, indices.clamp(max=3), *others)

    monkeypatch.setattr(attentions(model)[1], "read", wrong)


def one_way(monkeypatch, model):
    cls = deepseek_v4.PagedDeepseekV4Attention
    rope = cls.rope
    forwards = lambda x, cos, sin: rope(x, cos, sin.abs())  # noqa: E731
    monkeypatch.setattr(cls, "rope", staticmethod(forwards))


def ring_shifted(monkeypatch, model):
    cls = deepseek_v4.PagedDeepseekV4Attention
    right = cls.sparse_indices
    monkeypatch.setattr(deepseek_v4, "SLICE", 7)  # a ring that has turned round

    def wrong(self, indices, tokens, layer):
        near, rows = right(self, indices, tokens, layer).tensor_split([self.sliding_window], -1)
        shifted = torch.where(near >= 0, (near + 1) % layer.layouts["kv"].ring, near)
        return torch.cat([shifted, rows], -1)

    monkeypatch.setattr(cls, "sparse_indices", wrong)


def completed(change):
    """Changes rows that are compressed from windows, their numbers, and which are complete."""

    def apply(monkeypatch, model):
        right = compression.completed
        monkeypatch.setattr(compression, "completed", lambda *args: change(*right(*args)))

    return apply


OWN_TRAPS = {
    "deepseek_v32": {
        "softmax-scale-without-yarns-mscale": each(
            lambda a: setattr(a, "scaling", a.qk_head_dim**-0.5)
        ),
    },
    "glm_moe_dsa": {"a-shared-layer-that-does-not-share": not_shared},
    "axk2": {
        "no-gate": replaced("project_output", no_gate),
        "wider-gate": replaced("project_output", wider_gate),
        "normed-latent-twice": replaced("compress_query", normed_latent_twice),
        "latents-exchanged": replaced("project_query", latents_exchanged),
    },
    "hy_v4": {
        "no-gate": replaced("project_output", no_gate),
        "no-sinks": each(lambda a: a.sinks.fill_(-torch.inf)),
        "sinks-of-other-heads": each(lambda a: a.sinks.copy_(a.sinks.roll(1))),
        "sinks-scaled": each(lambda a: a.sinks.mul_(a.scaling)),
    },
    "dots3_note": {
        "no-gate": replaced("project_output", no_gate),
        "longer-window": longer_window,
        "query-latent-not-scaled": each(lambda a: setattr(a, "q_lora_scale", 1.0)),
        "key-latent-not-scaled": each(lambda a: setattr(a, "kv_lora_scale", 1.0)),
        "rope-key-not-normed": each(
            lambda m: setattr(m, "forward", lambda key: key), "k_rope_only_layernorm"
        ),
    },
    "glm5_next": {
        "no-tail": each(lambda m: setattr(m, "index_kpool_always_select_tail", False), "indexer"),
        "no-position-bias": each(lambda m: m.index_kpool_compress_ape.zero_(), "indexer"),
        "neighbouring-groups": replaced(
            "select", lambda select, *args: select(*args) - 1, LatentAttention
        ),
        "groups-of-the-window-after": completed(lambda rows, w, whole: (rows, w + 1, whole)),
    },
    "mistral_large4": {
        "no-query-scaling": each(lambda a: a.softmax_scaling.scale.zero_()),
        "no-index-query-scaling": each(
            lambda m: m.softmax_scaling.scale.copy_(torch.linspace(-3, 3, 32)), "indexer"
        ),
        "no-index-norm": each(
            lambda m: m.q_input_norm.weight.copy_(torch.linspace(-1, 1, 96)), "indexer"
        ),
        "own-latents-only": lambda _, model: setattr(
            attentions(model)[3].config, "kv_source_layers", [0, 1, 2, 1]
        ),
        "index-rotated-without-rope": lambda _, model: setattr(attentions(model)[2], "use_rope", 1),
    },
    "deepseek_v4": {
        "no-sink": each(lambda a: a.sinks.fill_(-1e4)),
        "window-one-shorter": each(lambda a: setattr(a, "sliding_window", a.sliding_window - 1)),
        "window-one-longer": each(lambda a: setattr(a, "sliding_window", a.sliding_window + 1)),
        "window-elsewhere-in-the-ring": ring_shifted,
        "output-not-rotated-back": one_way,
        "no-selection": each(
            lambda m: setattr(m.indexer, "index_topk", 64), "compressor", layer_type=SPARSE
        ),
        "index-weights-without-sign": each(
            lambda m: m.indexer.scorer.weights_proj.weight.abs_(), "compressor", layer_type=SPARSE
        ),
        "no-position-bias": each(lambda m: m.position_bias.zero_(), "compressor", layer_type=HEAVY),
        "no-index-bias": each(
            lambda m: m.indexer.position_bias.zero_(), "compressor", layer_type=SPARSE
        ),
        "bias-of-the-window-before": each(
            lambda m: m.position_bias[:, :64].zero_(), "compressor", layer_type=SPARSE
        ),
        "rows-of-the-window-after": completed(lambda rows, w, whole: (rows, w + 1, whole)),
        "rows-of-the-state-lost": completed(
            lambda rows, w, whole: (rows, w, whole & (w != w[:, :1]))
        ),
    },
}


CALL = [0, 9], (46, 1, 5)  # pads and chunks


@functools.cache
def healthy(kind):
    seed, want = reference(tiny_model(kind), *CALL)
    assert_close(fed(patched_model(kind), seed, *CALL), want, kind)
    return seed, want


@pytest.mark.parametrize(
    "kind, trap",
    [
        pytest.param(kind, trap, id=f"{kind}-{name}")
        for kind in ALL_KINDS
        for name, trap in ((TRAPS if kind in KINDS else {}) | OWN_TRAPS.get(kind, {})).items()
    ],
)
def test_the_logits_show(kind, trap, monkeypatch):
    (seed, want), patched = healthy(kind), patched_model(kind)
    trap(monkeypatch, patched)
    assert not (fed(patched, seed, *CALL) - want).abs().max() <= WRONG  # nan counts


# ---- what must not show -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_indexer_may_rotate_its_first_or_last_dims(kind, monkeypatch):
    # the same indexer with its dims in another order, which no score depends on
    upstream, patched = upstream_and_patched(kind)
    attention, width = attentions(patched)[0], patched.config.index_head_dim
    rotated = attention.qk_rope_head_dim
    other_index_dims(monkeypatch, patched)
    if not attention.index_rope_last:
        rotated = -rotated
    for indexer in [it.indexer for it in attentions(patched) if it.indexer is not None]:
        per_head = indexer.wq_b.weight.unflatten(0, (-1, width))
        for rows in (per_head.mT, indexer.wk.weight.mT, *indexer.k_norm.parameters()):
            rows.copy_(rows.roll(-rotated, -1))
    assert furthest(upstream, patched) <= TOLERANCES[kind]


def test_rows_that_are_not_complete_are_replaced_before_they_are_read(monkeypatch):
    upstream, patched = upstream_and_patched("deepseek_v4")
    completed(lambda rows, w, whole: (rows, w, torch.ones_like(whole)))(monkeypatch, patched)
    assert furthest(upstream, patched) <= TOLERANCES["deepseek_v4"]

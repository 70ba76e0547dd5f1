"""The bits of a sequence's outputs depend on nothing but the sequence, in a batch-invariant model.

Run as a program, this file prints where they do with the kernels of its process: a set of kernels
is for a process. The other tests run the set that this CPU prefers.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from model_harness import left_padded, no_grad_and_one_thread, trace, whole_graph  # noqa: F401
from published import V4, published
from test_determinism import SETS
from test_models_weights import WIDE
from tiny import ALL_KINDS, REPRESENTATIVES, marks_of, tiny_model, token_ids
from training_harness import checkpointed
from transformers import CompileConfig

from custom_pypto import layer_ops, models
from custom_pypto.models import CACHE
from custom_pypto.weight_formats import WEIGHT_FORMATS

# upstream's linear attention takes a prompt by another rule than a token
INVARIANT = [kind for kind in ALL_KINDS if kind != "glm5_next"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVERY = [
    pytest.param(kind, dtype, marks=marks_of(kind) if dtype == torch.bfloat16 else ())
    for kind in INVARIANT
    for dtype in DTYPES.values()
]
TOKENS, PADS = 40, (0, 3, 11, 1)


def invariant(model, **options):
    return models.use_custom_pypto(model, batch_invariant=True, block_size=16, **options)


def model_of(kind, dtype=torch.float32, **options):
    return invariant(tiny_model(kind).to(dtype), **options)


# ---- ways to compute the same sequences ----------------------------------------------------------


def in_chunks(model, ids, sizes):
    cache = models.PagedCache(model, len(ids), ids.size(1), block_size=16)
    return torch.cat([model(x, **{CACHE: cache}).logits for x in ids.split(sizes, 1)], 1)


def behind_a_prefix(model, ids):
    """The first tokens are cached once for all sequences."""
    cache = models.PagedCache(model, 1, ids.size(1), block_size=16)
    first = model(ids[:1, :20], **{CACHE: cache}).logits
    cache.batch_repeat_interleave(len(ids))
    rest = model(ids[:, 20:], **{CACHE: cache}).logits
    return torch.cat([first.expand(len(ids), -1, -1), rest], 1)


def padded(model, ids):
    """Each sequence without its last tokens, which padding replaces in front."""
    moved, (_, mask, positions) = ids.clone(), left_padded(PADS, TOKENS)
    for row, n in enumerate(PADS):
        moved[row, n:], moved[row, :n] = ids[row, : TOKENS - n], 0
    logits = model(moved, attention_mask=mask, position_ids=positions).logits
    return [x[n:] for x, n in zip(logits, PADS, strict=True)]


@torch.enable_grad()
def in_training(model, ids):
    try:
        return model.train()(ids).logits.detach()
    finally:
        model.eval()


def different_ways(model) -> list[str]:
    """The ways that give a sequence other bits than it has alone, in one forward."""
    ids = token_ids(32, TOKENS)
    ids[1, :20] = ids[0, :20]  # of which one is the prefix of another
    alone = torch.cat([model(row[None]).logits for row in ids[:7]])
    found = {f"a batch of {n}": model(ids[:n]).logits for n in (2, 3, 7, 32)}
    found |= {
        "chunks": in_chunks(model, ids[:3], [5, 1, 17, TOKENS - 23]),
        "steps of 7 sequences": in_chunks(model, ids[:7], [9, *[1] * (TOKENS - 9)]),
        "steps of 32 sequences": in_chunks(model, ids[:, :12], [10, 1, 1]),
        "steps of one sequence": in_chunks(model, ids[:1], 1),
        "a cached prefix": behind_a_prefix(model, ids[:2]),
        "padding": padded(model, ids[: len(PADS)]),
    }
    if all(getattr(module, "kind", None) is None for module in model.modules()):
        found["training"] = in_training(model, ids[:5])
    return [name for name, logits in found.items() if not same(logits, alone)]


def same(logits, alone):
    """Of the tokens and sequences that both have."""
    rows = zip(logits, alone, strict=False)
    return all(torch.equal(x, y[: len(x)]) for x, y in rows) and len(logits) > 0


@pytest.mark.parametrize(("kind", "dtype"), EVERY, ids=str)
def test_a_sequence_has_the_same_bits_whatever_runs_beside_it(kind, dtype):
    assert different_ways(model_of(kind, dtype)) == []


def test_without_the_option_bits_depend_on_what_runs_beside_a_sequence():
    model = models.use_custom_pypto(tiny_model(), training="ops", block_size=16)
    if not different_ways(model):
        pytest.skip("torch's products have one order of sums on this machine, at these sizes")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_threads_change_no_bit(dtype):
    model, ids = model_of("glm_moe_dsa", dtype), token_ids(3, TOKENS)
    one = model(ids).logits
    torch.set_num_threads(3)
    assert torch.equal(model(ids).logits, one)


@pytest.mark.parametrize("isa", [pytest.param(x, marks=pytest.mark.slow) for x in SETS])
def test_every_set_of_kernels_is_invariant(isa, with_torch):
    program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    done = with_torch(program, path=[Path(__file__).parent], CUSTOM_PYPTO_CPU_ISA=isa)
    if "CUSTOM_PYPTO_CPU_ISA must be one of" in done.stderr:
        pytest.skip(f"this CPU, or the system, does not grant {isa}")
    assert done.returncode == 0, done.stderr
    used, found = json.loads(done.stdout.splitlines()[-1])
    assert used == isa and found and not any(found.values()), found


@pytest.mark.parametrize("kind", ["deepseek_v32"])
def test_int8_caches_are_invariant(kind):
    wide = dict(kv_lora_rank=128, qk_rope_head_dim=16)
    model = invariant(tiny_model(kind, **wide).bfloat16(), kv_dtype="int8", index_dtype="int8")
    ids = token_ids(3, TOKENS)

    def steps(ids, sizes):
        cache = models.PagedCache(model, len(ids), TOKENS, kv_dtype="int8", index_dtype="int8")
        return torch.cat([model(x, **{CACHE: cache}).logits for x in ids.split(sizes, 1)], 1)

    together = steps(ids, [30, *[1] * 10])
    for row, logits in zip(ids, together, strict=True):
        assert torch.equal(steps(row[None], [7, 33])[0], logits)


# ---- stored weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4", {"experts": "int4"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_models_with_rounded_weights_are_invariant(weights, dtype, tmp_path):
    tiny_model("glm_moe_dsa").save_pretrained(tmp_path)
    model = models.load(tmp_path, dtype=dtype, weights=weights)
    assert different_ways(invariant(model)) == []


@pytest.mark.parametrize(("kind", "formats"), [("deepseek_v32", {"fp8"}), (V4, {"fp8", "fp4"})])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_models_with_published_weights_are_invariant(kind, formats, dtype, tmp_path):
    path = published(tmp_path, kind, **WIDE[kind])
    model = models.load(path, dtype=dtype, weights="stored")
    assert {getattr(module, "kind", None) for module in model.modules()} >= formats
    assert different_ways(invariant(model)) == []


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float16], ids=str)
@pytest.mark.parametrize("form", [*WEIGHT_FORMATS, "plain", "transposed"])
def test_rows_of_a_product_have_the_same_bits_in_any_number(form, dtype):
    g = torch.Generator().manual_seed(3)
    for depth, width in (
        (32, 7),
        (320, 65),
        *(((45, 3),) if form in ("plain", "transposed") else ()),
    ):
        matrix, scales = torch.randn(3, width, depth, generator=g), None
        if form in WEIGHT_FORMATS:
            matrix, scales = WEIGHT_FORMATS[form].quantize(matrix)
        else:
            matrix = matrix.to(dtype)
        if form == "transposed":
            matrix = matrix.mT.contiguous().mT
        x = torch.randn(70, depth, generator=g).to(dtype)
        x[50] = torch.nan
        ids = torch.randint(-1, 4, (70, 2), generator=g)
        first = (matrix[0], None if scales is None else scales[0])
        every = layer_ops.invariant_linear(x, *first)
        by_expert = layer_ops.invariant_linear(x, matrix, scales, experts=ids)
        assert every[:50].isfinite().all() and every[50].isnan().all()
        for n in (1, 2, 3, 7, 32, 65):
            rows = slice(3, 3 + n)
            one = layer_ops.invariant_linear(x[rows], *first)
            assert torch.equal(one.nan_to_num(9), every[rows].nan_to_num(9)), n
            one = layer_ops.invariant_linear(x[rows], matrix, scales, experts=ids[rows])
            assert torch.equal(one.nan_to_num(9), by_expert[rows].nan_to_num(9)), n


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_values_have_the_same_bits_wherever_they_are(name):
    for dtype in DTYPES.values():
        x = 4 * torch.randn(101).to(dtype)
        apart = torch.cat([layer_ops.activate(x[i : i + 1], name) for i in range(101)])
        assert torch.equal(layer_ops.activate(x, name), apart)


# ---- generation and training ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=[] if x == "glm_moe_dsa" else pytest.mark.slow) for x in INVARIANT],
)
def test_generate_gives_the_bits_of_a_batch_alone_and_compiled(kind):
    model, (ids, mask, _) = model_of(kind), left_padded(PADS, 24)
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True)

    def logits(ids, mask, **more):
        done = model.generate(ids, attention_mask=mask, output_logits=True, **options, **more)
        return torch.stack(done.logits, 1)

    together = logits(ids, mask)
    for row, n in enumerate(PADS):
        assert torch.equal(
            logits(ids[row : row + 1, n:], mask[row : row + 1, n:])[0], together[row]
        )
    assert torch.equal(logits(ids, mask, compile_config=whole_graph("aot_eager")), together)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_layers_that_inductor_compiles_have_the_bits_of_eager_ones(dtype):
    model = model_of("glm_moe_dsa", dtype)
    options = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    ids = token_ids(3, 20)
    eager = model.generate(ids, output_logits=True, **options)
    more = dict(output_logits=True, compile_config=CompileConfig(fullgraph=True, dynamic=True))
    compiled = model.generate(ids, **more, **options)
    assert all(map(torch.equal, compiled.logits, eager.logits))


def gradients(model, ids):
    with torch.enable_grad():
        model.train()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("kind", INVARIANT)
def test_gradients_are_those_of_the_ops(kind):
    # token 0 is padding, whose embedding has no gradient
    ids, model = token_ids(2, 30), tiny_model(kind)
    want = gradients(models.use_custom_pypto(copy.deepcopy(model), training="ops"), ids)
    got = gradients(invariant(model), ids)
    assert got.keys() == want.keys()
    scale = max(float(x.norm()) for x in want.values())
    for name in want:
        # float32 sums in another order, through some layers; large weights make them large
        assert float((got[name] - want[name]).norm()) <= 1e-4 * scale, name


@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_checkpointed_layers_repeat_their_bits(kind):
    ids, model = token_ids(2, 30), model_of(kind)
    want = gradients(model, ids)
    checkpointed(model)
    got = gradients(model, ids)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


LOOKUP = Path(__file__).parents[1] / "examples/checkpoints"


@pytest.mark.parametrize("samples", [1, 3, 7])
@pytest.mark.parametrize("name", ["lookup", "lookup_v4"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_ratios_of_a_step_of_grpo_are_one(name, dtype, samples):
    """The rollout samples answers in a batch, with a cache; the step trains on them as a whole."""
    model = invariant(models.load(LOOKUP / name, dtype=dtype))
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)
    prompts = token_ids(2, 33).clamp(max=model.config.vocab_size - 1).repeat_interleave(samples, 0)
    done = model.eval().generate(
        prompts,
        do_sample=True,
        temperature=3.0,
        top_k=0,
        max_new_tokens=8,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = done.sequences[:, -8:, None]
    old = torch.stack(done.logits, 1).log_softmax(-1).gather(2, new)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with torch.enable_grad():
        logits = model.train()(done.sequences[:, :-1]).logits[:, -8:].float()
        ratios = (logits.log_softmax(-1).gather(2, new) - old).exp()
        assert torch.equal(ratios, torch.ones_like(ratios))
        (-ratios * torch.randn(len(prompts), 1, 1)).mean().backward()
    optimizer.step()
    after = model(done.sequences[:, :-1]).logits[:, -8:].log_softmax(-1).gather(2, new)
    assert not torch.equal(after, old)


if __name__ == "__main__":
    torch.set_num_threads(2)
    with torch.no_grad():
        found = {
            f"{kind}, {dtype}": different_ways(model_of(kind, dtype))
            for kind in REPRESENTATIVES
            for dtype in DTYPES.values()
        }
    print(json.dumps([torch.ops.custom_pypto.cpu_isa(), found]))

"""Ranks with experts of their own compute what one process computes, and read those alone."""

import collections
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import in_ranks
from published import published
from safetensors.torch import load_file
from tiny import ALL_KINDS, SHARED_HEADS, clear_case, tiny_config, tiny_model, token_ids
from torch.distributed.tensor import DTensor

from custom_pypto import models
from custom_pypto.models import CACHE, sharing
from custom_pypto.models.loading import plan, reader
from custom_pypto.models.loading.checkpoint import EXPERT
from custom_pypto.models.weights.modules import convert

PREFILL, DECODE = 40, 4
ALONE, BOTH = dict(expert_parallel=True), dict(expert_parallel=True, tensor_parallel=True)
# Of logits up to about 10, in float32: one process is up to 1e-5 away on ranks that share heads,
# 0 on those that share experts alone; what transformers rounds otherwise moves them as much.
NEAR = 2e-4
# heads of sliding layers that 4 ranks can share
HEADS = {"dots3_note": dict(swa_num_attention_heads=4, swa_num_key_value_heads=4)}
# checkpoint, how ranks share it, options of load(); the first ones in every run
CASES = {
    "glm_moe_dsa": ("glm_moe_dsa", ALONE, {}),
    "glm_moe_dsa-heads": ("glm_moe_dsa", BOTH, {}),
    "deepseek_v4-fp4": ("published deepseek_v4", ALONE, dict(weights="stored")),
    "glm_moe_dsa-int4-heads": ("glm_moe_dsa", BOTH, dict(weights={"experts": "int4"})),
    "deepseek_v4-saved": ("saved deepseek_v4", ALONE, {}),
    "deepseek_v32-tied": ("tied deepseek_v32", BOTH, {}),
}
EVERY_RUN = len(CASES)
CASES |= {kind: (kind, ALONE, {}) for kind in ALL_KINDS}
CASES |= {f"{kind}-heads": (kind, BOTH, {}) for kind in SHARED_HEADS}
for weights in (None, "stored", "int8", "int4"):
    for kind in ("deepseek_v32", "deepseek_v4"):
        name = f"{kind}-published-{weights}"
        CASES[name] = (f"published {kind}", ALONE, dict(weights=weights))
NAMES = [
    pytest.param(name, marks=() if i < EVERY_RUN else pytest.mark.slow)
    for i, name in enumerate(CASES)
]


def load(folder, case, ranks=True):
    checkpoint, share, options = CASES[case]
    share = share if ranks else {}
    return models.load(folder / checkpoint, dtype=torch.float32, **share, **options)


def write(folder, checkpoint):
    """A checkpoint of random weights: as transformers saves it, with a tied head, as it is
    published, or as a model in int8 is saved."""
    if (folder / checkpoint).exists():
        return
    form, _, kind = checkpoint.rpartition(" ")
    if form == "published":
        published(folder / checkpoint, kind, moe_intermediate_size=128)  # whole blocks of fp8
    elif form == "saved":
        write(folder, kind)
        saved = models.load(folder / kind, dtype=torch.float32, weights="int8")
        saved.save_pretrained(folder / checkpoint)
    else:
        changes = HEADS.get(kind, {}) | ({"tie_word_embeddings": True} if form == "tied" else {})
        tiny_model(kind, **changes).save_pretrained(folder / checkpoint)


def replayed(model, record):
    """Logits of other tokens, which attend to what these attended to, through their experts."""
    shape = record.indices[max(record.indices)].shape[:2]
    with models.replay_indices(model, record), models.record_indices(model, experts=True) as again:
        logits = model(token_ids(*shape, seed=9)).logits
    torch.testing.assert_close(again.tensors(), record.tensors(), rtol=0, atol=0)
    return logits


@torch.no_grad()
def computed(model, ids):
    """Logits of a prefill and of decode steps, those of transformers' attention, and the tokens
    that follow."""
    cache = models.PagedCache(model, len(ids), ids.size(1))
    calls = ids.split([PREFILL, *[1] * DECODE], 1)
    logits = torch.cat([model(call, **{CACHE: cache}).logits for call in calls], 1)
    with models.record_indices(model, experts=True) as record:
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    logits = torch.cat([logits, replayed(model, record)], 1)
    upstream = models.use_transformers(model)(ids, use_cache=False).logits
    return torch.cat([logits, upstream], 1), tokens


def save(model, checkpoint, target):
    """Saves ``model``, which was read from a checkpoint, as the same tensors; or cannot."""
    if getattr(model, "hf_quantizer", None) is not None:
        with pytest.raises(ValueError, match="save_pretrained: the experts .* ranks share"):
            model.save_pretrained(target)
    elif not checkpoint.name.startswith("published"):
        model.save_pretrained(target)
        if dist.get_rank() == 0:
            saved, original = tensors_in(target), tensors_in(checkpoint)
            assert saved.keys() == original.keys()
            assert all(torch.equal(saved[name], original[name]) for name in original)
        dist.barrier()


def tensors_in(path):
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def work(rank: int, folder: Path, cases: list[str]):
    """What each rank does, and notes in a file."""
    ids, seen = torch.load(folder / "ids.pt"), {}
    stored, fill = reader.Reader.stored, reader.Reader._fill
    for case in cases:
        parts = {}  # by their place: scales are read twice, first to be checked

        def counted(self, name, *args, parts=parts):
            tensor = stored(self, name, *args)
            if self.mapped:
                parts[name, 0] = tensor.nbytes
            return tensor

        def filled(self, name, out, skip, parts=parts):
            fill(self, name, out, skip)
            parts[name, skip] = out.nbytes

        reader.Reader.stored, reader.Reader._fill = counted, filled
        model = load(folder, case)
        read = collections.Counter()
        for (name, _), size in parts.items():
            read[name] += size
        save(model, folder / CASES[case][0], folder / "saved again")
        tied = {"lm_head.weight"} if model.config.get_text_config().tie_word_embeddings else set()
        state = [(name, x) for name, x in model.state_dict().items() if name not in tied]
        seen[case] = {
            "computed": computed(model, ids[case]),
            "read": read,
            "bytes": {n: (x.to_local() if isinstance(x, DTensor) else x).nbytes for n, x in state},
            "shared": {n for n, x in state if isinstance(x, DTensor)},
        }
    torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(request, tmp_path_factory):
    """What ranks have seen, and what one process computes."""
    folder, ranks = tmp_path_factory.mktemp("ranks"), request.param
    torch.set_num_threads(1)
    alone, ids = {}, {}
    cases = list(CASES)[: None if request.config.getoption("all") else EVERY_RUN]
    for case in cases:
        write(folder, CASES[case][0])
        model = load(folder, case, ranks=False)
        models.use_transformers(model)

        @torch.no_grad()
        def run(seed, model=model):  # shows close calls
            ids = token_ids(2, PREFILL + DECODE, seed)
            model.generate(ids, max_new_tokens=8, do_sample=False)
            return ids

        _, ids[case] = clear_case(run)
        alone[case] = model, computed(models.use_custom_pypto(model), ids[case])
    torch.save(ids, folder / "ids.pt")
    in_ranks(work, folder, cases, ranks=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)], alone


@pytest.mark.parametrize("case", NAMES)
def test_ranks_give_what_one_process_gives_and_read_their_own_experts(shared, case):
    ranks, alone = shared
    model, (logits, tokens) = alone[case]
    whole = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    experts = [name for name in whole if ".mlp.experts." in name]
    assert experts
    names = set()
    for i, rank in enumerate(ranks):
        got, got_tokens = rank[case]["computed"]
        torch.testing.assert_close(got, logits, rtol=0, atol=NEAR)
        assert torch.equal(got_tokens, tokens)
        for name in experts:
            assert rank[case]["bytes"][name] * len(ranks) == whole[name], name
        heads = {name for name in rank[case]["shared"] if ".self_attn." in name}
        assert bool(heads) is ("tensor_parallel" in CASES[case][1])
        own = {name: size for name, size in rank[case]["read"].items() if re.search(EXPERT, name)}
        assert not names & own.keys()  # nobody else's
        names |= own.keys()
        if own:
            numbers = {int(re.search(EXPERT, name)[2]) for name in own}
            each = (max(numbers) + 1) // (i + 1)
            assert numbers == set(range(i * each, (i + 1) * each))
        else:  # stacked on disk
            stacked = [size for name, size in rank[case]["read"].items() if ".experts." in name]
            assert sum(stacked) * len(ranks) == sum(whole[name] for name in experts)


def test_the_memory_of_a_rank_is_what_load_expects(shared):
    """:func:`.plan.bytes_of_rank`, which the check of memory and examples/model_memory.py use."""
    ranks, alone = shared
    for case, (model, _) in alone.items():
        share = CASES[case][1]
        config = model.config.get_text_config()
        expected = type(model).config_class.from_dict(model.config.to_dict())
        if "tensor_parallel" not in share:
            sharing.share_experts_alone(expected.get_text_config())
        with torch.device("meta"):
            skeleton = type(model)(expected)
        modules = model.named_modules()
        convert(skeleton, {n: m.kind for n, m in modules if getattr(m, "kind", None)})
        shared_by = sharing.plan_of(skeleton, len(ranks), experts=True)
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        want = plan.bytes_of_rank(skeleton, dtypes, shared_by)
        # of 199 rows of embedding and head the last rank has fewer
        rows = 2 * 4 * config.hidden_size * len(ranks)
        for rank in ranks:
            assert abs(sum(rank[case]["bytes"].values()) - want) <= rows, case
            assert rank[case]["shared"] == sharing.shared_parameters(skeleton, shared_by), case


def test_numbers_of_ranks_that_can_share_experts():
    def sizes(heads=False, **changes):
        config = tiny_config(**changes)
        return sharing.possible_sizes(config, "cpu", heads=heads, experts=True)

    assert sizes() == [1, 2, 4, 8]
    assert sizes(n_routed_experts=6) == [1, 2, 3, 6]
    assert sizes(heads=True) == [1, 2, 4]
    assert sizes(heads=True, n_routed_experts=6) == [1, 2]
    assert sizes(num_attention_heads=6, num_key_value_heads=6) == [1, 2, 4, 8]


@pytest.mark.parametrize("kind", [kind for kind in ALL_KINDS if kind not in SHARED_HEADS])
def test_heads_that_transformers_does_not_share_are_rejected(kind):
    config = tiny_model(kind).config.get_text_config()
    with pytest.raises(ValueError, match="tensor_parallel must be False .* expert_parallel=True"):
        sharing.check_sharing(config, None, heads=True, experts=True)


def test_unequal_numbers_of_experts_are_rejected(tmp_path, monkeypatch):
    tiny_config(n_routed_experts=6).save_pretrained(tmp_path)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    message = "expert_parallel must have 1, 2, 3, 6 ranks for 6 experts on cpu, got 4"
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path, expert_parallel=True)

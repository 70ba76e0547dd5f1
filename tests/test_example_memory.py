"""examples/model_memory.py computes what models.load allocates; the pages show what it prints."""

import io
import os
import runpy
import subprocess
import sys

import pytest
from repository import REPOSITORY

pytest.importorskip("transformers")
sys.path.append(str(REPOSITORY / "examples"))
import model_memory as program  # noqa: E402
from estimates import Range, Streamed, hit_share  # noqa: E402
from memory_tables import Model, Size, by_memory  # noqa: E402
from mtp_harness import MTP_KINDS  # noqa: E402
from published import V4, published  # noqa: E402
from tiny import KINDS  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from custom_pypto import models, requirements  # noqa: E402
from custom_pypto.models import sharing  # noqa: E402

NEWEST = requirements.minor(program.VERSION) == requirements.TRANSFORMERS[-1]


def printed(*arguments: str, status: int = 0, **variables) -> subprocess.CompletedProcess:
    command = [sys.executable, "examples/model_memory.py", *arguments]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind in KINDS])
def test_the_mtp_layer_counts_where_it_is_asked_for(kind, tmp_path):
    path = published(tmp_path / "checkpoint", kind)
    sizes = [
        program.measure(*program.source_of(path, None), mtp=mtp).sizes["bfloat16"]
        for mtp in (False, True)
    ]
    state = models.load(path, mtp=True).state_dict().items()
    own = ".mtp.0." if kind == V4 else ".layers.3."
    layer = sum(x.nbytes for name, x in state if own in name)
    assert sizes[1].weights == sizes[0].weights + layer and sizes[1].read == sizes[0].read


def test_an_mtp_layer_that_is_not_there_to_count_is_named():
    checkpoints = f"{REPOSITORY}/examples/checkpoints"
    error = printed(f"{checkpoints}/lookup", "--mtp", "--layers", "1", status=2).stderr
    assert "--mtp is not for --layers" in error
    error = printed(f"{checkpoints}/lookup_hops", "--mtp", status=1).stderr
    assert "mtp needs a config.json with num_nextn_predict_layers = 1" in error


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("checkpoint", ["lookup", "lookup_v4"])
def test_the_size_is_that_of_the_loaded_model(checkpoint, weights):
    path = f"{REPOSITORY}/examples/checkpoints/{checkpoint}"
    size = program.of_checkpoint(path, None).sizes[weights or "bfloat16"]
    model = models.load(path, weights=weights)
    state = model.state_dict()
    assert size.weights == sum(tensor.nbytes for tensor in state.values())
    # every weight but the embedding, and the experts that a token is not sent to
    read = sum(tensor.nbytes for name, tensor in state.items() if "embed_tokens" not in name)
    config = model.config
    if checkpoint == "lookup_v4":
        experts = sum(tensor.nbytes for name, tensor in state.items() if ".experts." in name)
        read -= experts * (1 - config.num_experts_per_tok / config.n_routed_experts)
    assert size.read == pytest.approx(read)


def test_a_token_does_not_read_indexers_of_layers_that_share():
    config = AutoConfig.from_pretrained(f"{REPOSITORY}/examples/checkpoints/lookup")
    plain = program.measure("lookup", config, None).sizes["bfloat16"]
    config.index_topk_pattern = "FS"
    shared = program.measure("lookup", config, None).sizes["bfloat16"]
    model = models.load(f"{REPOSITORY}/examples/checkpoints/lookup")
    indexer = sum(x.nbytes for x in model.model.layers[1].self_attn.indexer.parameters())
    assert shared.weights == plain.weights and plain.read - shared.read == indexer > 0


@pytest.mark.parametrize("weights", [None, "int8"])
def test_the_size_of_a_rank_is_its_part_of_the_loaded_model(weights):
    path, ranks = f"{REPOSITORY}/examples/checkpoints/lookup_v4", 2
    model = program.build(AutoConfig.from_pretrained(path), None, heads=False)
    shared = sharing.shared_parameters(model, sharing.plan_of(model, ranks, experts=True))
    assert any(".experts." in name for name in shared) and "lm_head.weight" in shared
    formats = weights and dict.fromkeys(("experts", "rest"), weights)
    state = models.load(path, weights=weights).state_dict().items()
    parts = {name: ranks if name.removesuffix("_scale") in shared else 1 for name, _ in state}
    found = program.size(model, formats, shared, ranks).weights
    assert found == sum(tensor.nbytes / parts[name] for name, tensor in state)


def test_fewer_layers_are_those_of_load():
    path = f"{REPOSITORY}/examples/checkpoints/lookup"
    one, all_layers = program.of_checkpoint(path, 1), program.of_checkpoint(path, None)
    model = models.load(path, num_hidden_layers=1)
    assert one.parameters == sum(x.numel() for x in model.parameters()) < all_layers.parameters


@pytest.mark.parametrize("kind", ["deepseek_v32", V4])
def test_the_experts_are_those_that_stay_in_files(tmp_path, kind):
    path = published(tmp_path / "checkpoint", kind, moe_intermediate_size=128, hidden_size=256)
    size = program.of_checkpoint(str(path), None).sizes["stored"]
    state = models.load(path, weights="stored").state_dict().items()
    assert size.experts == sum(x.nbytes for name, x in state if ".experts." in name)
    assert size.routed == size.experts * 2 / 8


@pytest.mark.parametrize(
    "share, hits",
    [
        (0, 0),
        (0.025, 0.12),
        (0.05, 0.24),
        (0.1, 0.46),
        (0.14, 0.53),
        (0.18, 0.6),
        (0.26, 0.72),
        (0.51, 0.85),
        (0.88, 0.99),
        (1, 1),
    ],
)
def test_hits_follow_the_published_points(share, hits):
    assert hit_share(share) == pytest.approx(hits)


#: 20 GB of experts, 2 GB of which a token reads besides 4 GB of other weights
SIZE = Size(weights=25e9, read=6e9, experts=20e9, routed=2e9)


def test_the_speed_with_experts_in_files_is_that_of_a_computation_by_hand():
    # 7 GB hold 2 of 20 GB of experts, so 46 % of a token's; it reads 0.54 of 2 GB at 4 GB/s
    found = Streamed.of(SIZE, 50, memory=7e9, disk=4e9, bandwidth=80e9)
    assert found.kept == 2e9 and found.hits == pytest.approx(0.46)
    assert found.from_files == pytest.approx(1.08e9) and found.prompt == pytest.approx(18 / 4)
    # 0.27 s of that, 6 GB at 60 GB/s are 0.1 s, and 50 layers take 0.03 s
    assert found.speed == pytest.approx((1 / 0.40, 1 / 0.27))
    # where the computation takes longer, it limits
    fast = Streamed.of(SIZE, 50, memory=7e9, disk=40e9, bandwidth=80e9)
    assert fast.speed == pytest.approx((1 / 0.157, 1 / 0.13))


def test_a_model_that_fits_reads_nothing_from_files_and_one_that_cannot_run_has_no_speed():
    found = Streamed.of(SIZE, 50, memory=30e9, disk=4e9, bandwidth=80e9)
    assert (found.kept, found.hits, found.from_files, found.prompt) == (20e9, 1, 0, 0)
    assert found.speed == pytest.approx((1 / 0.13, 1 / 0.13)) and str(found.speed) == "7.7"
    # a token's experts of one of 50 layers take 0.04 GB
    assert Streamed.of(SIZE, 50, memory=5.03e9, disk=4e9, bandwidth=80e9) is None
    assert Streamed.of(SIZE, 50, memory=5.05e9, disk=4e9, bandwidth=80e9).kept == 0.05e9


def test_the_table_of_memory_has_all_of_it():
    of_formats = {"stored": SIZE, "int8": SIZE, "int4": Size(13e9, 3e9, 10e9, 1e9)}
    found = [Model("it", 50, 0, of_formats)]
    _, _, *rows = by_memory(found, 7_000_000_000, 4, 80).splitlines()
    assert rows == [
        "| it, stored | 7 GB | 5 GB | 2 of 20 GB | 46% | 1.1 GB | 2.5 to 3.7 | 4 s |",
        # 40 % of the experts, 79 % of a token's by the points 0.26 and 0.76: 0.21 GB, 0.052 s;
        # 3 GB at 60 GB/s and 50 layers are 0.08 s
        "| it, int4 | 7 GB | 3 GB | 4 of 10 GB | 79% | 0.21 GB | 7.6 to 12 | 2 s |",
    ]
    first = by_memory(found, 30_000_000_000, 4, 80).splitlines()[2]
    assert first == "| it, stored | 30 GB | 5 GB | all of 20 GB | – | – | 7.7 | – |"
    first = by_memory(found, 5_000_000_000, 4, 80).splitlines()[2]
    assert first == "| it, stored | 5 GB | 5 GB | too few | – | – | – | – |"
    assert str(Range.of(0.5, 0.25)) == "1.3 to 2"


#: of the page: --memory, --disk, and how many of its rows the page has
OF_PAGE = {("26GB", "3.5"): 4, ("56GB", "7"): 6, ("86GB", "7"): 6}


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
def test_the_pages_have_what_it_estimates_with_experts_in_files():
    found = program.defaults()
    for page in ("docs/larger_than_memory.md",):
        text = (REPOSITORY / page).read_text()
        for (memory, disk), count in OF_PAGE.items():
            size = program.check_memory_option(memory)
            rows = by_memory(found, size, float(disk), program.BANDWIDTH).splitlines()
            assert sum(f"{row}\n" in text for row in rows[2:]) == count
            assert f"--memory {memory} --disk {disk}" in text


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
def test_the_pages_have_what_it_prints():
    lines = printed().stdout.splitlines()
    of_models, of_machines = (
        [line for line in lines if line.startswith("|") and line.count("|") == bars]
        for bars in (7, 3)
    )
    assert len(of_models) == 10 and len(of_machines) > 8
    text = (REPOSITORY / "docs/checkpoints.md").read_text()
    assert all(line in text for line in of_models + of_machines)
    text = (REPOSITORY / "docs/zh/checkpoints.md").read_text()  # headings and "text" are translated
    assert all(line in text for line in of_models[1:] if "text" not in line)
    assert all(line in text for line in of_machines[1:])


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
@pytest.mark.parametrize("ranks", ["4", "8"])
def test_the_pages_have_what_it_prints_of_ranks(ranks):
    head, _, *rows = (line for line in printed("--ranks", ranks).stdout.splitlines() if "|" in line)
    text = (REPOSITORY / "docs/many_machines.md").read_text()
    assert len(rows) == 8 and all(f"{row}\n" in text for row in [head, *rows])
    stored = next(row for row in rows if "V4-Flash" in row).split(" | ")[4]
    if ranks == "4":
        assert float(stored) < 0.3 * 156  # of docs/checkpoints.md


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST, reason="the pages have the figures of the newest transformers")
def test_the_page_has_the_speed_that_it_estimates():
    rows = [line for line in printed("--speed").stdout.splitlines() if "|" in line][2:]
    text = (REPOSITORY / "docs/comparison.md").read_text()
    shown = [row for row in rows if row[2:].startswith(("DeepSeek", "GLM-5,"))]
    assert len(shown) == 6 and all(f"{row}\n" in text for row in shown)


@pytest.mark.slow
def test_bad_input_is_named():
    assert "--layers needs a checkpoint" in printed("--layers", "2", status=2).stderr
    done = printed("tests", status=1)
    assert done.stderr.startswith("model_memory.py: ") and " tests" in done.stderr
    assert "Traceback" not in done.stderr
    done = printed("examples/checkpoints/lookup", "--layers", "9", status=1)
    assert "--layers must be 1 to 2, got 9" in done.stderr and "Traceback" not in done.stderr
    done = printed("--memory", "3", status=1)
    assert done.stderr.startswith("model_memory.py: --memory must be bytes, or a string such as")
    assert "--disk and --bandwidth need --memory" in printed("--disk", "7", status=2).stderr
    assert (
        "must be more than 0, got 0.0" in printed("--memory", "9GB", "--disk", "0", status=2).stderr
    )


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("gb2312", marks=pytest.mark.slow)])
def test_an_output_without_dashes_gets_others(encoding, monkeypatch, capsys):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["model_memory.py", "examples/checkpoints/lookup"])
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("examples/model_memory.py", run_name="__main__")
    output.flush()
    row = "| examples/checkpoints/lookup | 0.0019 | 0.0038; 0.0037 | - |"
    assert row in output.buffer.getvalue().decode(encoding)
    assert capsys.readouterr().err == "1 of 1: examples/checkpoints/lookup\n"

"""Checkpoints by name: the real client of the Hub, against a server on loopback."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from hub_server import MAIN, TAGGED, Hub
from loading_harness import INDEX, logits
from repository import REPOSITORY
from tiny import tiny_model
from transformers import LlamaConfig

from custom_pypto import hub, models

NAME = "owner/tiny"
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose layers begin in different shards."""
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model("deepseek_v32").save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    """The Hub that the client knows, with an empty cache."""
    served = Hub()
    served.repositories[NAME] = {MAIN: folder}
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    served.shutdown()
    served.server_close()


def shards_of(folder, layers: int | None = None) -> set[str]:
    """The files with the first layers and what is around them."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    number = {name: re.search(r"layers\.(\d+)\.", name) for name in weight_map}
    return {
        file
        for name, file in weight_map.items()
        if layers is None or number[name] is None or int(number[name][1]) < layers
    }


def test_the_first_layers_need_config_index_and_their_shards(server, folder, capfd):
    model = models.load(NAME, num_hidden_layers=LAYERS)
    wanted = shards_of(folder, LAYERS)
    assert wanted < shards_of(folder)
    assert torch.equal(logits(model), logits(models.load(folder, num_hidden_layers=LAYERS)))
    assert model.name_or_path == NAME
    got = server.downloaded()
    assert set(got[:3]) == {"config.json", "generation_config.json", INDEX}
    assert Counter(got[3:]) == Counter(wanted)
    # before the first of them
    assert Counter(server.headers_read()) == Counter(wanted)
    first = min(i for i, (_, path, _) in enumerate(server.asked) if path.endswith(got[3]))
    assert all(span for _, path, span in server.asked[:first] if path.endswith("safetensors"))
    assert "Fetching" in capfd.readouterr().err  # the client's own progress


def test_what_is_in_the_cache_is_not_asked_for_again(server, folder):
    models.load(NAME, num_hidden_layers=LAYERS)
    server.asked.clear()
    models.load(NAME, num_hidden_layers=LAYERS)
    assert server.downloaded() == server.headers_read() == []
    models.load(NAME)
    rest = shards_of(folder) - shards_of(folder, LAYERS)
    assert Counter(server.downloaded()) == Counter(rest)


def test_a_cached_checkpoint_loads_offline_and_another_says_why_not(server, monkeypatch):
    models.load(NAME, num_hidden_layers=LAYERS)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    models.load(NAME, num_hidden_layers=LAYERS)
    for name in (NAME, "owner/other"):
        with pytest.raises(FileNotFoundError, match=f"HF_HUB_OFFLINE is set, and .*{name}; unset"):
            models.load(name)
    assert server.asked == []


def test_a_revision_is_the_one_asked_for(server, folder, tmp_path):
    tagged = tmp_path / "tagged"
    shutil.copytree(folder, tagged)
    config = json.loads((tagged / "config.json").read_text())
    (tagged / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    server.repositories[NAME][TAGGED] = tagged
    assert models.load(NAME, revision="v1", num_hidden_layers=1).config.rms_norm_eps == 0.25
    assert models.load(NAME, revision=TAGGED, num_hidden_layers=1).config.rms_norm_eps == 0.25
    assert models.load(NAME, num_hidden_layers=1).config.rms_norm_eps != 0.25


# ---- what goes wrong ---------------------------------------------------------------------------


REFUSED = {
    "gated": (
        ("GatedRepo", 403),
        PermissionError,
        rf"{NAME} is gated: accept its conditions at http\S+/{NAME}, then hf auth login",
    ),
    "not-found": (
        ("RepoNotFound", 404),
        FileNotFoundError,
        rf"{NAME} is no directory here and no repository at http\S+ .*check the name.*hf auth",
    ),
    "login": (("", 403), PermissionError, r"refuses this login for .* \(403\); hf auth login"),
    "broken": (("", 400), ConnectionError, r"answers 400 .*check the network and HF_ENDPOINT"),
}


@pytest.mark.parametrize("answer, error, message", REFUSED.values(), ids=REFUSED)
def test_what_the_hub_refuses_is_one_sentence(answer, error, message, server):
    server.closed[NAME] = answer
    with pytest.raises(error, match=f"^load: path: .*{message}") as raised:
        models.load(NAME)
    assert "\n" not in str(raised.value)


def test_an_unknown_revision_is_named(server):
    with pytest.raises(FileNotFoundError, match=f"load: path: {NAME} has no revision 'v9'; see"):
        models.load(NAME, revision="v9")


def test_a_hub_that_does_not_answer_is_one_sentence(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(
        ConnectionError, match="does not answer .*hf download owner/tiny "
    ) as raised:
        models.load(NAME)
    assert "\n" not in str(raised.value)


def test_another_models_config_ends_before_any_shard(server, tmp_path):
    other = tmp_path / "llama"
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(other)
    (other / "model.safetensors").write_bytes(b"x" * 1000)
    server.repositories["owner/llama"] = {MAIN: other}
    with pytest.raises(TypeError, match=r"is of a LlamaForCausalLM, without index_topk"):
        models.load("owner/llama")
    assert server.downloaded() == ["config.json"]


def test_a_repository_without_config_is_named(server, tmp_path):
    server.repositories["owner/empty"] = {MAIN: tmp_path}
    with pytest.raises(FileNotFoundError, match="owner/empty must have a config.json"):
        models.load("owner/empty")


def test_too_little_memory_ends_before_any_shard(server, monkeypatch):
    monkeypatch.setattr("custom_pypto.models.loading.plan.free_memory", lambda device: 1000)
    with pytest.raises(MemoryError, match="the model needs .*, this machine has 1.00kB free"):
        models.load(NAME)
    assert not any(file.endswith("safetensors") for file in server.downloaded())


def test_too_small_a_disk_ends_before_any_shard(server, folder, monkeypatch):
    needed = sum((folder / file).stat().st_size for file in shards_of(folder, 1))
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(OSError, match="needs 0.0 GB in .*cache, which has .* free; set HF_HOME"):
        models.load(NAME, num_hidden_layers=1)
    assert not any(file.endswith("safetensors") for file in server.downloaded())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    models.load(NAME, num_hidden_layers=1)


def test_a_download_that_is_cut_off_goes_on_where_it_was(server, folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 100)  # else 10 MB
    shard = sorted(shards_of(folder, 1))[0]
    server.cut[shard] = [1000, 500]
    model = models.load(NAME, num_hidden_layers=1)
    spans = [span for _, path, span in server.asked if path.endswith(shard) and span]
    assert spans == ["bytes=0-100000", "bytes=1000-", "bytes=1500-"]
    assert torch.equal(logits(model), logits(models.load(folder, num_hidden_layers=1)))


def test_a_download_that_stays_cut_off_is_one_sentence_and_the_next_keeps_the_rest(
    server, folder, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    shard = sorted(shards_of(folder))[-1]
    server.cut[shard] = [0] * 100
    with pytest.raises(ConnectionError, match=f"download of {NAME} broke off .*run the same again"):
        models.load(NAME)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    kept = {file.name for file in cache.glob("**/*.safetensors")}
    assert shard not in kept
    server.cut.clear()
    server.asked.clear()
    models.load(NAME)
    assert Counter(server.downloaded()) == Counter(shards_of(folder) - kept)


# ---- names and directories ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["owner/tiny", "deepseek-ai/DeepSeek-V3.2", "a.b/c_d"])
def test_a_name_is_one(path):
    assert hub.is_name(path)


@pytest.mark.parametrize(
    "path",
    ["tiny", "/owner/tiny", "./tiny", "~/tiny", "a/b/c", "owner/ti ny", "docs/site", "a/b.git"],
)
def test_a_path_is_no_name(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert not hub.is_name(path)


def test_a_directory_takes_no_revision(folder):
    with pytest.raises(ValueError, match="load: path must be the name of a repository .*revision="):
        models.load(folder, revision="v1")


def test_a_directory_that_is_missing_is_named_with_both_ways():
    with pytest.raises(FileNotFoundError, match="must be a directory, or the name of a repository"):
        models.load("/nowhere/tiny")


# ---- programs ----------------------------------------------------------------------------------


def program(name: str, *arguments: str, server: Hub, home) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        cwd=REPOSITORY,
        env=os.environ
        | {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_generate_takes_a_name(server, tmp_path):
    server.repositories["owner/lookup"] = {MAIN: REPOSITORY / "examples/checkpoints/lookup"}
    arguments = ["--model", "owner/lookup", "--prompt", "the old sailor otter=red crossed . otter?"]
    arguments += ["--max-new-tokens", "1", "--backend", "custom_pypto", "--json"]
    done = program("generate.py", *arguments, server=server, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == "owner/lookup"
    assert report["results"][0]["answers"][0][0].split() == ["red"]
    assert list((tmp_path / "home").glob("hub/models--owner--lookup/snapshots/*/*.safetensors"))


@pytest.fixture
def run(server, monkeypatch, capsys):
    """Runs a program in this process, whose client knows the server: its exit and its errors."""

    def run(name: str, *arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
        code = 0
        try:
            runpy.run_path(str(REPOSITORY / "examples" / name), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    yield run
    transformers.utils.logging.enable_progress_bar()  # programs whose output is piped have none


def test_convert_checkpoint_takes_a_name_and_fetches_what_it_reads(run, server, folder, tmp_path):
    target = tmp_path / "target"
    code, said = run("convert_checkpoint.py", NAME, str(target), "--layers", str(LAYERS))
    assert not code, said
    shards = [file for file in server.downloaded() if file.endswith("safetensors")]
    assert Counter(shards) == Counter(shards_of(folder, LAYERS))
    want = models.load(folder, num_hidden_layers=LAYERS)
    assert torch.equal(logits(models.load(target)), logits(want))


def test_serve_takes_a_name(server, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(REPOSITORY / "integrations/vllm"))
    from custom_pypto_vllm import serve

    def start(checkpoint, model, port, arguments):  # in place of vLLM's server
        sys.exit(f"{model} in {checkpoint}")

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(os, "environ", {**os.environ})  # which the program changes
    with pytest.raises(SystemExit) as end:
        serve.main([NAME])
    folder_of_name = f"{tmp_path}/cache/models--owner--tiny/snapshots/{MAIN}"
    assert end.value.code == f"tiny in {folder_of_name}"
    assert shards_of(folder) < set(server.downloaded())
    with pytest.raises(SystemExit):
        serve.main(["owner/none"])
    assert "CHECKPOINT: owner/none is no directory here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("generate.py", "needle.py")),
        "convert_checkpoint.py",
    ],
)
def test_programs_say_what_is_wrong_with_a_name(script, run, tmp_path):
    option = ["--model"] if script != "convert_checkpoint.py" else []
    more = [] if option else [str(tmp_path / "target")]
    code, said = run(script, *option, "owner/none", *more)
    what = "--model" if option else "SOURCE"
    said = said.splitlines() if code == 1 else [code]  # which Python prints
    assert said[-1].startswith(f"{script}: {what}: owner/none is no directory")

"""The server that `run.sh serve` starts: what it prints, load, abuse, and its end."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import psutil
import pytest
from second_host import FAR, NEAR, second_host
from traffic import LOOKUP, metric, questions, send

START_SECONDS = 1800  # a busy machine takes many times as long as a quiet one
LENGTH = 4096
SMALL = "the weary sailor otter=red slowly found every silent village near rain , otter?"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Serving:
    """``python -m custom_pypto_vllm.serve`` in a process, ready."""

    def __init__(self, *arguments, checkpoint=LOOKUP):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "custom_pypto_vllm.serve", checkpoint, f"--port={port}"]
        command += [f"--max-model-len={LENGTH}", "--max-num-seqs=32", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        watch = threading.Timer(START_SECONDS, self.process.terminate)
        watch.start()
        self.printed = ""
        for line in self.process.stdout:  # the server's log, too
            self.printed += line
            if "Ctrl-C ends the server" in line:
                break
        watch.cancel()
        assert self.process.poll() is None, self.printed[-8000:]
        # or the pipe fills and the server waits
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def stop(self, sent):
        started = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(sent)
        self.process.wait(60)
        return started


@pytest.fixture(scope="module")
def serving():
    serving = Serving()
    yield serving
    serving.stop(signal.SIGTERM)


@pytest.fixture
def client(serving):
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", timeout=600, max_retries=0)


def wait_until_idle(url):
    for _ in range(60):
        running = metric(url, "vllm:num_requests_running") + metric(
            url, "vllm:num_requests_waiting"
        )
        if running == 0:
            break
        time.sleep(0.5)
    assert running == 0
    assert metric(url, "vllm:kv_cache_usage_perc") == 0
    assert httpx.get(f"{url}/health").status_code == 200


def test_the_printed_curl_command_works(serving):
    command = re.search(r"^curl .*?\}'$", serving.printed, re.S | re.M)[0]
    reply = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert '"text":" red"' in reply.stdout.replace('"text": ', '"text":')


def test_the_printed_python_snippet_works(serving):
    code = re.search(r"^from openai.*?^print\(.*?$", serving.printed, re.S | re.M)[0]
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert reply.stdout.strip() == "red"


def cache_tokens(serving):
    """As printed, and as the engine has them."""
    for line in httpx.get(f"{serving.url}/metrics").text.splitlines():
        if line.startswith("vllm:cache_config_info"):
            settings = dict(re.findall(r'(\w+)="([^"]*)"', line))
            has = int(settings["num_gpu_blocks"]) * int(settings["block_size"])
            said = re.search(r"^cache .* ([\d,]+) tokens", serving.printed, re.M)[1]
            return int(said.replace(",", "")), has
    raise AssertionError("the server has no metric vllm:cache_config_info")


def test_prints_what_it_uses(serving):
    names = [line.partition(" ")[0] for line in serving.printed.splitlines()[:5]]
    assert names == ["kernels", "weights", "cache", "memory", "address"]
    assert f"address  {serving.url}/v1" in serving.printed
    said, has = cache_tokens(serving)
    assert has == pytest.approx(said, rel=1e-3)


def test_200_requests_32_at_a_time_are_answered_right(serving):
    replies = send(serving.url, questions())
    assert all(reply.tokens == 32 for reply in replies)
    assert sum(reply.right for reply in replies) >= 0.97 * len(replies)  # the checkpoint: 0.99
    assert metric(serving.url, "vllm:prefix_cache_hits_total") > 0
    wait_until_idle(serving.url)


REJECTED = {
    "longer prompt than the model takes": dict(prompt=" ".join(["the"] * (LENGTH + 1000))),
    "more new tokens than the model takes": dict(max_tokens=100_000),
    "negative temperature": dict(temperature=-1.0),
    "temperature is not a number": dict(extra_body={"temperature": "NaN"}),
    "top_p above 1": dict(top_p=2.0),
    "no completion": dict(n=0),
    "a million completions": dict(n=1_000_000),
    "negative top_k": dict(extra_body={"top_k": -7}),
    "token beyond the vocabulary": dict(prompt=[5, 99_999]),
    "negative token": dict(prompt=[5, -3]),
    "empty prompt": dict(prompt=""),
    "bias of a token beyond the vocabulary": dict(logit_bias={"99999": 5}),
    "10000 log-probabilities": dict(logprobs=10_000),
    "broken regular expression": dict(extra_body={"structured_outputs": {"regex": "("}}),
    "broken JSON schema": dict(extra_body={"structured_outputs": {"json": "{"}}),
}


@pytest.mark.parametrize("arguments", REJECTED.values(), ids=REJECTED)
def test_a_bad_request_is_rejected_and_the_next_is_answered(arguments, client, serving):
    defaults = dict(model=LOOKUP.name, prompt=SMALL, max_tokens=1, temperature=0)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**defaults | arguments)
    assert client.completions.create(**defaults).choices[0].text.strip() == "red"


def test_a_grammar_constrains_the_answer(client):
    choice = {"structured_outputs": {"choice": ["blue", "green"]}}
    reply = client.completions.create(
        model=LOOKUP.name, prompt=SMALL, max_tokens=1, temperature=0, extra_body=choice
    )
    assert reply.choices[0].text.strip() in ("blue", "green")


def test_requests_of_vanished_clients_end(serving):
    asked = questions()[:10]
    for question in asked:
        request = dict(
            model=LOOKUP.name, prompt=question.prompt, max_tokens=2000, stream=True, ignore_eos=True
        )
        with httpx.stream("POST", f"{serving.url}/v1/completions", json=request) as stream:
            list(itertools.islice(stream.iter_lines(), 4))
    wait_until_idle(serving.url)
    assert all(reply.right for reply in send(serving.url, asked, tokens=1))


def test_a_seed_repeats_an_answer_whatever_the_chunks():
    """The second time most of the prompt is cached. vLLM alone dies of the first chunk."""
    serving = Serving("--max-num-batched-tokens=64", "--max-num-seqs=4")
    ask = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", timeout=600, max_retries=0)
    request = dict(model=LOOKUP.name, prompt=questions()[0].prompt, max_tokens=32, temperature=2.0)
    try:
        texts = [
            ask.completions.create(**request, seed=seed, extra_body={"ignore_eos": True})
            .choices[0]
            .text
            for seed in (5, 5, 6)
        ]
    finally:
        serving.stop(signal.SIGTERM)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.matrix
def test_two_engines_answer_right():
    serving = Serving("--data-parallel-size=2")
    try:
        replies = send(serving.url, questions(), tokens=1)
        assert all(metric(serving.url, "vllm:num_requests_running", engine=n) == 0 for n in "01")
        served = [metric(serving.url, "vllm:request_success_total", engine=n) for n in "01"]
    finally:
        serving.stop(signal.SIGTERM)
    assert sum(reply.right for reply in replies) >= 0.97 * len(replies)
    assert min(served) > 0 and sum(served) == len(replies)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "seconds, loss, asked", [(0, 0, 200), (0.02, 0.01, 40)], ids=["near", "far"]
)
@pytest.mark.parametrize("split, worker", [("tensor", "TP1"), ("pipeline", "PP1")])
def test_two_hosts_share_a_model(split, worker, seconds, loss, asked, monkeypatch):
    if split == "pipeline":
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")  # vLLM needs compilation for it
    with second_host(seconds, loss) as (there, near, far), contextlib.ExitStack() as stack:
        both = [f"--{split}-parallel-size=2", "--nnodes=2"]
        both += [f"--master-addr={NEAR}", f"--master-port={free_port()}"]
        further = [*there, sys.executable, "-m", "custom_pypto_vllm.serve", LOOKUP, *both]
        other = subprocess.Popen(
            [*further, "--node-rank=1", "--headless"],
            env=os.environ | {"VLLM_HOST_IP": FAR, "GLOO_SOCKET_IFNAME": far},
        )
        stack.callback(other.wait, 60)
        stack.callback(other.terminate)
        monkeypatch.setenv("VLLM_HOST_IP", NEAR)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", near)
        serving = Serving(*both)
        stack.callback(serving.stop, signal.SIGTERM)
        replies = send(serving.url, questions()[:asked])
        computing = [p.name() for p in psutil.Process(other.pid).children(recursive=True)]
    assert sum(reply.right for reply in replies) >= 0.97 * len(replies)
    assert any(name.startswith(f"VLLM::Worker_{worker}") for name in computing), computing


@pytest.mark.matrix
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(sent):
    started = Serving().stop(sent)
    assert len(started) >= 3  # this program, the server, the engine
    for process in started[1:]:
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_killed_process_ends_the_server(name):
    serving = Serving()
    started = psutil.Process(serving.process.pid).children(recursive=True)
    next(process for process in started if process.name().startswith(name[:15])).kill()
    assert serving.process.wait(60) != 0
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_a_folder_without_a_model_is_rejected(tmp_path):
    command = [sys.executable, "-m", "custom_pypto_vllm.serve", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert run.returncode == 2 and "config.json" in run.stderr


@pytest.mark.parametrize(
    "argument", ["--enable-prefix-caching", "--data-parallel-size=2", "--worker-extension-cls=x.Y"]
)
def test_what_a_record_of_selections_rules_out_is_rejected(argument):
    command = [sys.executable, "-m", "custom_pypto_vllm.vllm_serve", LOOKUP, argument]
    command.append("--enable-return-indexer-topk")
    run = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    name, _, _ = argument.partition("=")
    assert run.returncode == 2 and f"does not go with {name}" in run.stderr

"""Serves a checkpoint by vLLM's OpenAI server on this machine: python -m custom_pypto_vllm.serve.

Prints a request that works when pasted as soon as the server answers. Ctrl-C, or the end of this
process, ends all processes of the server.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from custom_pypto import hub

from .resources import describe

HOST = "127.0.0.1"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the checkpoint is a folder
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # unset, vLLM wants 92 % of the memory to be free
    # Unset, 5: a machine that is busy for longer reads a client's next request too late, and
    # closes the connection instead.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
    # Unset, 1024: a worker keeps a compiled product for each number of tokens that a step had, and
    # grows by hundreds of MB for half an hour.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")  # of a repository, beside its safetensors
# the trained checkpoint examples/checkpoints/lookup answers with a fact of the text
PROMPT = "the weary sailor otter=red slowly found every silent village near rain , otter?"

REQUESTS = """\
{model} is served at {url}/v1, and only on this machine. In another terminal:

curl -s {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "prompt": "{prompt}", "max_tokens": 1, "temperature": 0}}'

or, with {python}:

from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.completions.create(model="{model}", prompt="{prompt}", max_tokens=1, temperature=0)
print(answer.choices[0].text)

Ctrl-C ends the server."""


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="run.sh serve", description=__doc__.partition(":")[0])
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder with config.json and safetensors, or the name of a repository on the Hub",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    options, others = parser.parse_known_args(arguments)
    try:
        checkpoint = fetched(options.checkpoint, options.revision)
        url = f"http://{HOST}:{options.port}"
        os.environ |= ENVIRONMENT | os.environ  # the server's, and describe reads it
        print(describe(checkpoint, others, url), flush=True)
    except (MemoryError, OSError, ValueError) as error:
        parser.error(str(error))
    model = Path(options.checkpoint).resolve().name
    server = start(checkpoint, model, options.port, others)
    # as Ctrl-C: the finally below must run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if "--headless" in others:
            print("This host only computes: requests go to the host of --node-rank 0.", flush=True)
        elif wait_until_ready(server, url):
            print(REQUESTS.format(model=model, url=url, prompt=PROMPT, python=sys.executable))
            sys.stdout.flush()
        code = server.wait()
        if "--headless" in others:
            return code
        print("run.sh serve: the server ended by itself, see above", file=sys.stderr)
        return code or 1  # vLLM ends with 0 after its engine died
    except KeyboardInterrupt:
        return 0
    finally:
        stop(server)


def fetched(name: str, revision: str | None) -> Path:
    """The folder of a checkpoint, or of a repository, whose files are then downloaded.

    Raises:
        MemoryError: the files are larger than the available memory; nothing was downloaded.
    """
    source = hub.find("CHECKPOINT", name, revision)
    files = [file for file in source.files() if not file.endswith(OTHER_WEIGHTS)]
    needed = sum(source.lacking(files).values())
    if needed > (available := psutil.virtual_memory().available):
        raise MemoryError(
            f"CHECKPOINT: {name} has {needed / 1e9:.1f} GB of files to download, this machine has "
            f"{available / 1e9:.1f} GB of memory available"
        )
    source.fetch(files)
    return source.folder


def start(checkpoint: Path, model: str, port: int, arguments=()) -> subprocess.Popen:
    """Starts vLLM's OpenAI server on loopback, in a process group of its own.

    ``arguments`` are vLLM's own and come last, so that they win.
    """
    command = [sys.executable, "-m", "custom_pypto_vllm.vllm_serve", str(checkpoint)]
    command += ["--served-model-name", model, "--host", HOST, "--port", str(port), *arguments]
    return subprocess.Popen(command, start_new_session=True)


def wait_until_ready(server: subprocess.Popen, url: str) -> bool:
    """Waits for the server's first answer; False if the server ends before."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def stop(server: subprocess.Popen, seconds: float = 10) -> None:
    """Ends the server, and after ``seconds`` whatever is left of its processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt this
    server.terminate()
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left
    server.wait()


if __name__ == "__main__":
    sys.exit(main())

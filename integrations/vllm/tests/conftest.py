import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # tiny.py
os.environ |= {
    "HF_HUB_OFFLINE": "1",  # no look-up of models, no usage report: loopback alone
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # vLLM binds each worker to a NUMA node of its own, of which most machines have one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# a script runs what it puts into the background without Ctrl-C, and so the servers of the tests
signal.signal(signal.SIGINT, signal.default_int_handler)

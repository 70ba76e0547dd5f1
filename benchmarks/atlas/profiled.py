"""torch_npu's profile of a decode step of the small model: its trace and tables, for the archive.

python benchmarks/atlas/profiled.py FOLDER     # the files: FOLDER/*/ASCEND_PROFILER_OUTPUT
"""

import sys
from pathlib import Path

import torch
import torch_npu
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from atlas.answer import CHECKPOINT, TEXT  # noqa: E402
from atlas.children import NOT_HERE  # noqa: E402
from custom_pypto import models  # noqa: E402
from custom_pypto.simulation import ascend_host  # noqa: E402

TRACE = "trace_view.json"  # for https://ui.perfetto.dev


def profiled(step, folder: Path) -> list[Path]:
    """Runs a step; the files that torch_npu made of its profile, none where it could not start."""
    profiler = torch_npu.profiler
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        # a name, because torch_npu takes that of the machine else
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder), worker_name="decode"),
        record_shapes=True,
    ):
        step()
        torch.npu.synchronize()
    return sorted(folder.glob("*/ASCEND_PROFILER_OUTPUT/*"))


def main() -> int:
    model = models.load(CHECKPOINT, dtype=torch.bfloat16, device="npu:0")
    cache = models.PagedCache(model, batch_size=1, max_cache_len=64)
    ids = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True, trust_remote_code=False)(
        TEXT, return_tensors="pt"
    ).input_ids.npu()
    with torch.no_grad():
        model(ids[:, :-2], cache=cache)
        model(ids[:, -2:-1], cache=cache)  # compiles what a step calls
        files = profiled(lambda: model(ids[:, -1:], cache=cache), Path(sys.argv[1]))
    for file in files:
        print(f"{file.name}: {file.stat().st_size} bytes")
    if any(file.name == TRACE for file in files):
        return 0
    if ascend_host.is_running():
        print("the simulator has no profiler: torch_npu does not find CANN's aclprofInit in it")
        return NOT_HERE
    print(f"FAILED  torch_npu.profiler wrote no {TRACE}; what it lacks is above")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""The answer of a small model on an NPU, right only if indexer, attention and caches are."""

import sys
from pathlib import Path

import torch
import torch_npu  # noqa: F401
from transformers import AutoTokenizer

from custom_pypto import models

CHECKPOINT = Path(__file__).parents[2] / "examples/checkpoints/lookup"
TEXT = "the old sailor otter=red slowly crossed a wide harbour , otter?"
ANSWER = "red"


def main() -> int:
    model = models.load(CHECKPOINT, dtype=torch.bfloat16, device="npu:0")
    tokenizer = AutoTokenizer.from_pretrained(
        CHECKPOINT, local_files_only=True, trust_remote_code=False
    )
    ids = tokenizer(TEXT, return_tensors="pt").input_ids.to("npu:0")
    said = tokenizer.decode(model.generate(ids, max_new_tokens=1)[0, -1]).strip()
    right = said == ANSWER
    print(f"{TEXT} {said}" + ("" if right else f"  (wrong: {ANSWER})"))
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())

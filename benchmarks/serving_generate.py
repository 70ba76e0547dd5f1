"""Answers the questions of bench_serving.py by model.generate() in batches, in its own process.

serving_generate.py QUESTIONS.json CHECKPOINT BATCH TOKENS prints seconds and right answers as JSON.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from custom_pypto import models


def main(questions: Path, checkpoint: str, batch: int, tokens: int) -> dict:
    asked = json.loads(questions.read_text())
    model = models.load(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    encode = {"return_tensors": "pt", "padding": True}
    model.generate(**tokenizer([asked[0]["prompt"]], **encode), max_new_tokens=4)  # warm up
    asked.sort(key=lambda question: len(question["prompt"]))  # batches with little padding
    right, start = 0, time.monotonic()
    for first in range(0, len(asked), batch):
        questions = asked[first : first + batch]
        inputs = tokenizer([question["prompt"] for question in questions], **encode)
        out = model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        answers = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1]][:, None])
        right += sum(
            answer.strip() == question["answer"]
            for answer, question in zip(answers, questions, strict=True)
        )
    return dict(seconds=time.monotonic() - start, right=right)


if __name__ == "__main__":
    torch.set_num_threads(1)
    questions, checkpoint, batch, tokens = sys.argv[1:]
    print(json.dumps(main(Path(questions), checkpoint, int(batch), int(tokens))))

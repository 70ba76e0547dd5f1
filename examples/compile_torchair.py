"""Generates with a model whose decode step is compiled by torchair, and with the same one eagerly.

    python examples/compile_torchair.py                        # max-autotune: GE graphs
    python examples/compile_torchair.py --mode npugraph_ex     # capture and replay (aclgraph)

On a machine with an NPU and CANN it runs there. Anywhere else it starts the host simulator of CANN:
the real torch_npu and torchair, on CPU memory, with the NPU programs in PyPTO's interpreter. That
shows what is compiled and computed; its times are not NPU times. docs/graph_mode.md lists what each
mode requires of CANN.
"""

import argparse
import sys
import time
from pathlib import Path

from options import Help, at_least

# before importing torch, which would import torch_npu and fail without CANN
from custom_pypto.simulation import ascend_host

# isort: split
import torch

MODES = ["max-autotune", "reduce-overhead", "npugraph_ex"]
CHECKPOINT = Path(__file__).resolve().parent / "checkpoints/lookup"


def backend(mode):
    """The ``torch.compile`` backend of a torchair mode."""
    if mode == "npugraph_ex":
        return mode  # registered by name
    import torchair

    config = torchair.CompilerConfig()
    config.mode = mode
    return torchair.get_npu_backend(compiler_config=config)


def load(path, prompt_tokens, questions):
    """The model on the NPU in bfloat16, its tokenizer, a text and ``(question, value)`` pairs."""
    # after the NPU is set up, because transformers looks for one
    import transformers
    from train_lookup import lookup_prompt

    from custom_pypto import models

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    model = models.load(path, dtype=torch.bfloat16, device="npu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    return model, tokenizer, *lookup_prompt(prompt_tokens, questions=questions, seed=0)


class Decoder:
    """Text on its own cache, one token at a time by ``step``, the model's forward."""

    def __init__(self, model, step, length):
        from custom_pypto import models

        self.model, self.step, self.position = model, step, 0
        self.cache = models.PagedCache(model, batch_size=1, max_cache_len=length)

    def prefill(self, input_ids):
        self.model(input_ids, cache=self.cache, logits_to_keep=1)
        self.position += input_ids.size(1)

    def next_token(self, token):
        """The token after ``token`` ``[1, 1]``."""
        position_ids = torch.tensor([[self.position]], device=token.device)
        self.position += 1
        logits = self.step(token, position_ids=position_ids, cache=self.cache).logits
        return logits[:, -1:].argmax(-1)


@torch.no_grad()
def answers(decoder, prompt_ids, questions):
    """The token after each question, and the seconds of each."""
    decoder.prefill(prompt_ids)
    said, seconds = [], []
    for question in questions:
        begin = time.perf_counter()
        said.append(decoder.next_token(question).item())
        seconds.append(time.perf_counter() - begin)
        decoder.next_token(torch.tensor([[said[-1]]], device=question.device))
    return said, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--prompt-tokens", type=int, default=96, help="length of the demo's text")
    parser.add_argument("--questions", type=at_least(1), default=3, help="of the demo, 1 to 32")
    args = parser.parse_args()
    try:
        real = ascend_host.start_unless_npu()
    except ascend_host.AscendHostUnavailable as error:
        sys.exit(f"compile_torchair.py: {error}")

    model, tokenizer, prompt, dialogue = load(CHECKPOINT, args.prompt_tokens, args.questions)

    def encode(text):
        return tokenizer(text, return_tensors="pt").input_ids.npu()

    prompt_ids, questions = encode(prompt), [encode(question) for question, _ in dialogue]
    length = prompt_ids.size(1) + 2 * len(questions)
    step = torch.compile(model.forward, backend=backend(args.mode), fullgraph=True, dynamic=False)
    eager, eager_seconds = answers(Decoder(model, model, length), prompt_ids, questions)
    said, seconds = answers(Decoder(model, step, length), prompt_ids, questions)

    for (question, value), token in zip(dialogue, said, strict=True):
        answer = tokenizer.decode(token).strip()
        print(f"  {question} {answer}" + ("" if answer == value else f"  (wrong: {value})"))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(
        f"mode {args.mode}: {graphs} graph, compiled in the first step of {seconds[0]:.1f} s; "
        f"answers {'equal' if said == eager else 'DIFFER FROM'} eager's"
    )
    if real and len(seconds) > 2:
        compiled, plain = (sorted(s[1:])[len(s) // 2] for s in (seconds, eager_seconds))
        print(f"then {compiled * 1e3:.2f} ms a token, eager {plain * 1e3:.2f} ms")
    return said != eager


if __name__ == "__main__":
    sys.exit(main())

"""Times stored weights on one thread: linear layers next to torch's in bfloat16 and to the read
bandwidth, and a full-size layer of DeepSeek-V3.2 with 8 experts in each format."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from floors import ROUNDED, UNPACKING, WEIGHTS, here
from inputs import as_loaded, compare
from measure import READ, Benchmark, Floor, interleaved, known, median_ms, ratio
from model_sides import LAYER, layer_decode_call, layer_prefill_call
from torch.nn import functional
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

import custom_pypto
from custom_pypto import models
from custom_pypto.models.memory import empty
from custom_pypto.models.weights.choice import layers_of
from custom_pypto.models.weights.modules import ROUNDING, convert, stored_parameters
from custom_pypto.reference.weight_only_linear import FEW_TOKENS
from custom_pypto.weight_formats import WEIGHT_FORMATS, values_of

# gate and up of one expert
ROWS, COLUMNS = 4096, 7168
TOKENS = (1, 2, 4, 16, 64, 2048)
KINDS = ("plain", *WEIGHT_FORMATS)
# a format, and whether x is rounded to int8, too
WAYS = {kind: (kind, False) for kind in WEIGHT_FORMATS}
WAYS |= {f"{kind}, x in int8": (kind, True) for kind in ROUNDING}
EXPERTS = 8
CONTEXTS = (4096, 65536)
# shares of the plain layer in bfloat16
MOST_MEMORY = {"fp8": 0.53, "int8": 0.53, "fp4": 0.30, "int4": 0.30}
MOST_TIME = {"fp8": 0.6, "int8": 0.6, "fp4": 0.5, "int4": 0.4}


def both_as_loaded(values: torch.Tensor, scales: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [as_loaded(values), None if scales is None else as_loaded(scales, values.nbytes)]


# ---- linear layers ------------------------------------------------------------------------------


def rounds(way: str, tokens: int) -> bool:
    """Whether x is rounded to int8: for a weight in int8 in prompts alone."""
    kind, int8_x = WAYS[way]
    return int8_x and (kind != "int8" or tokens > FEW_TOKENS)


class Linears:
    """A weight in each format; each call finds the caches full of others."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(ROWS, COLUMNS, generator=generator)
        self.weights = {
            kind: both_as_loaded(*form.quantize(matrix)) for kind, form in WEIGHT_FORMATS.items()
        }
        self.plain = as_loaded(matrix.bfloat16())
        self.other = as_loaded(torch.randn(READ // 4))
        self.x = {tokens: torch.randn(tokens, COLUMNS).bfloat16() for tokens in TOKENS}

    def compare(self) -> None:
        for kind, int8_x in WAYS.values():
            weight, scales = self.weights[kind]
            for tokens in (4, 64):
                call = dict(x=self.x[tokens], weight=weight, scales=scales, int8_x=int8_x)
                compare("weight_only_linear", call)

    def error(self, way: str) -> float:
        """Of the product of a token, relative to that of the weight's values in float64."""
        kind, int8_x = WAYS[way]
        x, (weight, scales) = self.x[1], self.weights[kind]
        got = custom_pypto.weight_only_linear(x, weight, scales, int8_x=int8_x)
        exact = x.double() @ values_of(weight, scales).double().mT
        return ((got - exact).norm() / exact.norm()).item()

    def calls(self, tokens: int) -> dict[str, Callable]:
        x = self.x[tokens]
        calls = {
            way: partial(custom_pypto.weight_only_linear, x, *self.weights[kind], int8_x=int8_x)
            for way, (kind, int8_x) in WAYS.items()
            if rounds(way, tokens) == int8_x
        }
        return calls | {"torch": lambda: functional.linear(x, self.plain)}

    def measured(self, tokens: int, repeats: int) -> dict[str, list[float]]:
        return interleaved(self.calls(tokens), repeats)

    def share_of_read(self, way: str, repeats: int) -> float:
        """Of the bandwidth of torch's sum of floats: one after the other, as in a model, weights of
        as many bytes."""
        kind, int8_x = WAYS[way]
        size = sum(x.nbytes for x in self.weights[kind] if x is not None)
        copies = [both_as_loaded(*self.weights[kind]) for _ in range(READ // size)]

        def multiply():
            for weight, scales in copies:
                custom_pypto.weight_only_linear(self.x[1], weight, scales, int8_x=int8_x)

        seconds = interleaved({"read": self.other.sum, way: multiply}, repeats)
        return ratio(seconds["read"], seconds[way]) * len(copies) * size / READ


# ---- a layer ------------------------------------------------------------------------------------


def layer(kind: str, experts: int = EXPERTS):
    """A model of one layer with random weights; a token goes through 8 of its routed experts."""
    config = DeepseekV32Config(
        **LAYER | dict(vocab_size=64),
        n_routed_experts=experts,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=EXPERTS,
        mlp_layer_types=["sparse"],
    )
    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(config).eval()
    if kind != "plain":
        convert(model, {name: kind for name, _ in layers_of(model)})
    stored = stored_parameters(model)
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype if name in stored else torch.bfloat16
        module, _, own = name.rpartition(".")
        value = torch.nn.Parameter(empty(parameter.shape, dtype), requires_grad=False)
        model.get_submodule(module).register_parameter(own, filled(name, value))
    model.model.rotary_emb = DeepseekV32RotaryEmbedding(config)
    for name, _ in [*model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, torch.zeros(experts))
    return models.use_custom_pypto(model)


@torch.no_grad()
def filled(name: str, x: torch.nn.Parameter) -> torch.nn.Parameter:
    """Random values of a size that keeps activations finite."""
    if x.dtype == torch.float8_e8m0fnu:
        x.view(torch.uint8).fill_(118)
    elif x.dtype == torch.int8:
        x.random_(-120, 121)
    elif x.dtype == torch.uint8:  # two values of 4 bits
        x.random_(0, 256)
    elif x.element_size() == 1:
        x.view(torch.uint8).random_(0, 120)
    elif name.endswith("_scale"):
        x.fill_(2e-4)
    elif "norm" in name:
        x.fill_(1)
    else:
        x.normal_(0, 0.02)
    return x


def bytes_of(model) -> int:
    return sum(x.nbytes for x in model.parameters())


def decode_call(model) -> Callable:
    """Attention and experts of one token, few tokens cached."""
    cache = models.PagedCache(model, 1, 128)
    prompt, token = torch.randint(0, 64, (1, 64)), torch.tensor([[7]])
    with torch.no_grad():
        model(prompt, cache=cache)

    @torch.no_grad()
    def step():
        logits = model(token, cache=cache).logits
        cache.crop(-1)
        return logits

    return step


# ---- reports ------------------------------------------------------------------------------------


def linear_rows(repeats: int) -> Iterator[list[str]]:
    linears = Linears()
    linears.compare()
    seconds = [linears.measured(n, repeats if n < 64 else 2) for n in TOKENS]
    for way in (*WAYS, "torch"):
        ms = [median_ms(of[way], 1) if way in of else "-" for of in seconds]
        share, error = "-", "-"
        if way in WAYS and rounds(way, 1) == WAYS[way][1]:
            share = f"{linears.share_of_read(way, repeats):.2f}"
            error = f"{linears.error(way) * 100:.2f}"
        yield [way, *ms, share, error]


def linear_floors(repeats: int) -> Iterator[Floor]:
    linears = Linears()
    linears.compare()
    for way, least in here(WEIGHTS).items():
        share = partial(linears.share_of_read, way, repeats)
        yield Floor(f"{way}, 1 token, of the read bandwidth", share, least)

    def slowest_of(tokens: int, int8_x: bool) -> float:
        seconds = linears.measured(tokens, repeats if tokens < 64 else 2)
        ways = [way for way in WAYS if way in seconds and WAYS[way][1] == int8_x]
        return min(ratio(seconds["torch"], seconds[way]) for way in ways)

    for tokens in TOKENS:

        def slowest(tokens=tokens) -> float:
            return slowest_of(tokens, int8_x=False)

        unpacks = tokens >= UNPACKING.get(torch.ops.custom_pypto.cpu_isa(), math.inf)
        least = 0.9 if unpacks else 1.0
        yield Floor(f"slowest format, {tokens} tokens, speedup over torch", slowest, least)
    for tokens, least in here(ROUNDED).items():
        rounded = partial(slowest_of, tokens, int8_x=True)
        yield Floor(f"slowest, x in int8, {tokens} tokens, speedup over torch", rounded, least)


@torch.no_grad()
def layer_rows(repeats: int, tokens: int) -> Iterator[list[str]]:
    plain = None
    for kind in KINDS:
        model = layer(kind)
        step = min(interleaved({"step": decode_call(model)}, repeats)["step"])
        size = bytes_of(model)
        plain = plain or (size, step)
        cells = [kind, f"{size / 1e9:.2f}", f"{size / plain[0]:.2f}"]
        cells += [f"{step * 1e3:.0f}", f"{step / plain[1]:.2f}"]
        for context in CONTEXTS:
            call = layer_decode_call("custom_pypto", model, context)
            cells.append(f"{min(interleaved({'step': call}, repeats)['step']) * 1e3:.0f}")
        call = layer_prefill_call("custom_pypto", model, tokens)
        yield [*cells, f"{min(interleaved({'once': call}, 1)['once']):.1f}"]


def layer_floors(repeats: int, tokens: int) -> Iterator[Floor]:
    """Memory and time of each format, as shares of plain bfloat16."""
    for kind, most in MOST_TIME.items():
        sides = {side: layer(side) for side in ("plain", kind)}
        memory = bytes_of(sides[kind]) / bytes_of(sides["plain"])
        yield known(f"layer in {kind}, memory", memory, MOST_MEMORY[kind], at_least=False)
        calls = {side: decode_call(model) for side, model in sides.items()}

        def time(calls=calls, kind=kind) -> float:
            seconds = interleaved(calls, repeats)
            return ratio(seconds[kind], seconds["plain"])

        yield Floor(f"layer in {kind}, time", time, most, at_least=False)


BENCHMARKS = {
    "weights": Benchmark(
        [
            *("format", *(f"{n} tokens, ms" for n in TOKENS)),
            *("of the read bandwidth, 1 token", "error, 1 token, %"),
        ],
        linear_rows,
        linear_floors,
    ),
    "layer_weights": Benchmark(
        [
            *("weights", "GB", "of plain", "token with experts, ms", "of plain's"),
            *(f"attention, {context // 1024}K, ms" for context in CONTEXTS),
            "attention, prompt, s",
        ],
        layer_rows,
        layer_floors,
        variant="prompt: {tokens}",
    ),
}

"""Comparisons of the layer ops with their reference, each within a bound from its roundings."""

import torch
from torch import Tensor

from custom_pypto.reference import MODULES
from custom_pypto.reference import layer_ops as reference
from custom_pypto.reference.checks import STEP as FLOAT32
from custom_pypto.reference.checks import largest
from custom_pypto.reference.hyper_connection import of_collapsed, of_numbers


def steps(dtype: torch.dtype) -> float:
    """The distance of neighbours, relative to their value."""
    return torch.finfo(dtype).eps


def subnormal(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny * steps(dtype)


def results(got) -> tuple[Tensor, ...]:
    return () if got is None else got if isinstance(got, tuple) else (got,)


def assert_equals_reference(op: str, got, arguments: dict) -> None:
    """``got`` is the result of a call of ``op`` with these arguments; those that are written have
    what they had before the call, and get what the reference writes."""
    if op in CHOICES:
        return CHOICES[op](*results(got), **arguments)
    want = getattr(reference, op)(**arguments)
    if op == "expanded_attention" and not want[1]:  # then the first result is undefined
        got, want = got[1:], want[1:]
    bounds = BOUNDS[op](want, **arguments) if op in BOUNDS else [0] * len(results(want))
    for one, other, bound in zip(results(got), results(want), bounds, strict=True):
        assert_within(one, other, bound)


def assert_within(got: Tensor, want: Tensor, bound: Tensor | float) -> None:
    """Within ``bound`` and a few subnormal steps, and NaN only where ``want`` is."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not got.is_floating_point():
        assert got.equal(want)
        return
    assert got.isnan().equal(want.isnan()), "NaN elsewhere"
    # a sum near the largest number may be that or infinite
    limits = torch.finfo(got.dtype)
    one, other = (x.double().nan_to_num(0).clamp(limits.min, limits.max) for x in (got, want))
    exact = isinstance(bound, int)
    allowed = torch.as_tensor(bound).double() + (0 if exact else 4 * subnormal(got.dtype))
    # the bound of a sum with an infinity is no number
    excess = ((one - other).abs() - allowed).nan_to_num(0, 0, 0)
    assert (excess <= 0).all(), f"{excess.max()} more than allowed"


# ---- rows --------------------------------------------------------------------------------------


def of_activation(want, x, name) -> list:
    # an exponential within two steps, whose logarithm near 0 has an absolute one, a sum, a quotient
    return [(8 * FLOAT32 + steps(x.dtype)) * (want.double().abs() + (name == "softplus") * 2**-24)]


def of_norm(want, x, weight, eps) -> list:
    # sums of D squares differ by D float32 steps, which may round both factors to a neighbour
    relative = (1 + steps(x.dtype)) ** 2 - 1 + (x.size(-1) + 4) * FLOAT32
    largest = 1.0 if weight is None else weight.float().abs()
    return [relative * want.double().abs() + 2 * subnormal(x.dtype) * (1 + largest)]


def of_rotation(want, x, cos, sin, first, interleaved) -> list:
    if x.dtype != torch.float32:
        return [0]
    # a compiler may round a product and a sum at once
    return [2 * FLOAT32 * largest(x) * max(largest(cos), largest(sin))]


def of_pairs(want, x, cos, sin) -> list:
    # the same; then the sum may be rounded to a neighbour
    rounded = steps(x.dtype) * want.double().abs() if x.dtype != torch.float32 else 0.0
    return [2 * FLOAT32 * largest(x) * max(largest(cos), largest(sin)) + rounded]


def of_weighted_sum(want, x, weights) -> list:
    magnitude = torch.einsum("tkd,tk->td", x.double().abs(), weights.double().abs())
    return [steps(x.dtype) * want.double().abs() + (x.size(1) + 1) * FLOAT32 * magnitude]


# ---- experts -----------------------------------------------------------------------------------


def chosen_by_sigmoids(weights, experts, logits, bias, groups, kept, k, normalize, scale) -> None:
    scores = logits.sigmoid()
    choice, sums = reference.choice_of_groups(scores + bias, groups, kept)
    allowed = rounding_of(scores + bias, FLOAT32)
    best = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if not experts.equal(best):
        # another group, which is as good within rounding
        sums, used = ranked(sums), torch.zeros_like(sums, dtype=torch.bool)
        used.scatter_(1, experts // (logits.size(1) // groups), True)
        last = sums.sort(dim=-1, descending=True).values[:, kept - 1 : kept]
        assert (sums >= last - 2 * allowed)[used].all(), "of a worse group"
        open_groups = used | (sums > last + 2 * allowed)
        open_groups = open_groups.repeat_interleave(logits.size(1) // groups, 1)
        choice = (scores + bias).masked_fill(~open_groups, -torch.inf)
        assert_best(experts, choice, allowed)
    assert_within(
        weights,
        want := reference.weights_of(scores, experts, normalize, scale),
        (k + 8) * FLOAT32 * want.double().abs(),
    )


def chosen_by_roots(weights, experts, logits, bias, k, scale) -> None:
    scores = torch.nn.functional.softplus(logits).sqrt()
    step = steps(logits.dtype)
    if not experts.equal((scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]):
        assert_best(experts, scores + bias, rounding_of(scores + bias, step))
    want = reference.weights_of(scores, experts, True, scale)
    assert_within(weights, want, (k + 8) * step * want.double().abs())


def of_one_row(got, x, weight, scales, experts, block_size) -> None:
    """Each row within what a call of few rows may differ by."""
    products = MODULES["weight_only_linear"]
    rows, shape = x.reshape(-1, x.size(-1)), got.shape[x.dim() - 1 :]
    ids = None if experts is None else experts.reshape(len(rows), *shape[:-1])
    for i, one in enumerate(got.reshape(len(rows), *shape)):
        call = dict(x=rows[i], weight=weight, scales=scales, block_size=block_size)
        call["experts"] = None if ids is None else ids[i]
        error, bound = products.error(one, products.weight_only_linear(**call), call, call)
        assert error <= bound, f"{error} from the reference, {bound} allowed"


CHOICES = {
    "invariant_linear": of_one_row,
    "route": chosen_by_sigmoids,
    "route_roots": chosen_by_roots,
}


def ranked(x: Tensor) -> Tensor:
    """In torch's order: NaN is the largest."""
    return x.double().nan_to_num(1e30, 1e20, -1e20)


def rounding_of(choice: Tensor, step: float) -> Tensor:
    """Of a function and a sum, of the numbers of each token."""
    return 4 * step * (1 + choice.double().nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True))


def assert_best(experts: Tensor, choice: Tensor, allowed: Tensor) -> None:
    """The experts of each token are those of the largest numbers, best first, within rounding."""
    choice = ranked(choice)
    mine = choice.gather(1, experts)
    assert (mine[:, 1:] <= mine[:, :-1] + allowed).all(), "not best first"
    rest = choice.scatter(1, experts, -torch.inf)
    assert rest.isneginf().sum(1).eq(experts.size(1)).all(), "an expert twice"
    assert (rest.amax(1) <= mine.amin(1) + allowed[:, 0]).all(), "another one is better"


# ---- streams -----------------------------------------------------------------------------------


def of_collapse(want, streams, weight, base, scale, eps, norm_eps) -> list:
    off = of_numbers(streams, weight, scale, norm_eps) + 4 * FLOAT32 * (1 + largest(base))
    return [of_collapsed(want, streams, off, eps)]


def of_mix(want, streams, x, post, comb) -> list:
    # sums of N products in another order, which may round to a neighbour, and then their sum
    added = (post.double().unsqueeze(-1) * x.double().unsqueeze(-2)).abs()
    sizes = added + comb.double().abs().mT @ streams.double().abs()
    n = streams.size(2)
    return [(2.1 * steps(x.dtype) + (n + 2) * FLOAT32) * sizes + 4 * subnormal(x.dtype)]


# ---- prompts -----------------------------------------------------------------------------------


def of_expanded(want, q_nope, q_rope, latent, k_rope, weight, indices, ends, scale) -> list:
    # Of a value v_j: its rounding, that of its weight p_j, and of the result, 2**-9 each. Of a
    # logit, the rounding of the key, 2**-9 |q| |k| scale: p_j changes by twice that at most, since
    # the others change, too.
    if len(want) == 1:
        return [0]
    nope = q_nope.size(-1)
    both = torch.einsum("bnl,hdl->bhnd", latent.double(), weight.double())
    k, v = both[..., :nope].norm(dim=-1), both[..., nope:].abs().amax(-1)
    q = q_nope.double().norm(dim=-1)
    if not latent.size(1):
        return [0, 0]
    rounding = 0.0
    if q_rope is not None:
        dots = torch.einsum("bshr,bnr->bshn", q_rope.double().abs(), k_rope.double().abs())
        rounding = dots.amax(-1)
    k, v = k.amax(-1)[:, None], v.amax(-1)[:, None]
    logit = scale * (2**-9 * q * k + 2**-20 * (q * k + rounding))
    # numbers below the normal ones of float32 count as 0
    return [((3 * 2**-9 + (2 * logit).expm1()) * v * 1.1 + 2**-100)[..., None], 0]


BOUNDS = {
    "activate": of_activation,
    "collapse_streams": of_collapse,
    "expanded_attention": of_expanded,
    "hyper_connection": MODULES["hyper_connection"].bounds,
    "mix_streams": of_mix,
    "pool_groups": MODULES["pool_groups"].bounds,
    "rms_norm": of_norm,
    "rotate": of_rotation,
    "rotate_pairs": of_pairs,
    "weighted_sum": of_weighted_sum,
}

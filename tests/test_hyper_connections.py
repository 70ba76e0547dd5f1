"""Hyper-connections of patched models by one op."""

import pytest
import torch
from cases import DTYPES
from layer_numerics import assert_equals_reference, steps
from model_harness import no_grad_and_one_thread  # noqa: F401
from test_one_op import Calls, by_transformers, one_op_modules, ops
from tiny import representatives, tiny_model, token_ids
from torch import nn
from torch.nn import functional

from custom_pypto import models
from custom_pypto.schemas import overload

# streams, weight, base, scale, iterations, eps, norm_eps
CONNECTION = (
    torch.ones(1, 1, 2, 16),
    torch.zeros(8, 32),
    torch.zeros(8),
    torch.ones(3),
    3,
    1e-6,
    1e-6,
)
# streams, weight, base, scale, eps, norm_eps
COLLAPSED = torch.ones(1, 1, 2, 16), torch.zeros(2, 32), torch.zeros(2), torch.ones(1), 1e-6, 1e-6
REJECTED = {
    "hyper_connection: weight.size(0) must be 8 ((2 + N) N of streams), got 6": lambda: (
        ops.hyper_connection(CONNECTION[0], torch.zeros(6, 32), *CONNECTION[2:])
    ),
    "hyper_connection: weight.size(1) must be 32 (N D of streams), got 16": lambda: (
        ops.hyper_connection(CONNECTION[0], torch.zeros(8, 16), *CONNECTION[2:])
    ),
    "hyper_connection: streams must be of shape [B, S, N, D], got [2, 16]": lambda: (
        ops.hyper_connection(CONNECTION[0][0, 0], *CONNECTION[1:])
    ),
    "collapse_streams: base.size(0) must be 2 (N of streams), got 3": lambda: ops.collapse_streams(
        *COLLAPSED[:2], torch.zeros(3), *COLLAPSED[3:]
    ),
    "collapse_streams: scale.size(0) must be 1 (of pre), got 3": lambda: ops.collapse_streams(
        *COLLAPSED[:3], torch.zeros(3), *COLLAPSED[4:]
    ),
    "hyper_connection: scale.size(0) must be 3 (of pre, post and comb), got 2": lambda: (
        ops.hyper_connection(*CONNECTION[:3], torch.ones(2), *CONNECTION[4:])
    ),
}


def assert_are_defined(op, results, *values):
    arguments = dict(zip((a.name for a in overload(op)._schema.arguments), values, strict=True))
    assert_equals_reference(op, results, arguments)


def arguments(norm, streams, weight, base, scale):
    """The largest argument of a sigmoid, and what two orders of its sums may differ by."""
    x, weight = norm(streams.flatten(2).float()), weight.float()
    most = functional.linear(x, weight).abs().max() * scale.abs().max() + base.abs().max()
    # the product, and the mean of squares
    magnitude = functional.linear(x.abs(), weight.abs()).max() * scale.abs().max()
    return most, 4 * x.size(-1) * steps(torch.float32) * magnitude


@pytest.mark.parametrize("iterations", [0, 1, 2, 20])
@pytest.mark.parametrize("kind", representatives(("deepseek_v4", "glm5_next")))
@pytest.mark.parametrize("dtype", DTYPES)
def test_hyper_connections_equal_those_of_transformers(kind, dtype, iterations):
    n = 4
    model = models.use_custom_pypto(tiny_model(kind, hc_mult=n)).to(dtype)
    for module in one_op_modules(model, "HyperConnection")[:2]:
        module.hc_sinkhorn_iters = iterations
        nn.init.normal_(module.base)
        nn.init.normal_(module.scale)
        x = torch.randn(2, 3, n, module.fn.size(1) // n).to(dtype)
        with Calls() as calls:
            post, comb, collapsed = module(x)
        assert calls.counts[ops.hyper_connection.default] == 1
        want = by_transformers(module, x)
        weights = module.fn.float(), module.base.float(), module.scale.float()
        eps = module.hc_eps, module.input_norm.eps
        for results in ((post, comb, collapsed), want):
            assert_are_defined("hyper_connection", results, x, *weights, iterations, *eps)
        step = steps(torch.float32)
        most, off = arguments(module.input_norm, x, module.fn, module.base, module.scale)
        # a product and a sum of weights; a sigmoid changes by less than its argument, in relation
        # to its value, and exponentials are within two steps
        of_sigmoid = off + (2 * most + 7) * step
        assert ((post - want[0]).abs() <= of_sigmoid * want[0]).all()
        # a difference of two weights, an exponential, a sum of n, a quotient, and eps
        of_softmax = 2 * off + (12 * most + n + 10) * step
        # comb = diag(u) M diag(v): a normalization sets u to 1 / (M v + eps / u), or v, so that
        # it is off by no more than M and the other one together. M has the roundings so far
        normalizations = max(1, 2 * iterations - 1)
        of_comb = 2 * normalizations * (of_softmax + normalizations * (n + 1) * step)
        assert ((comb - want[1]).abs() <= of_comb * want[1]).all()
        bound = steps(dtype) * want[2].abs() + (of_sigmoid + (n + 2) * step) * x.abs().sum(2)
        assert ((collapsed - want[2]).abs() <= bound).all() and collapsed.dtype == dtype


@pytest.mark.parametrize("tokens", [1, 3, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_streams_equals_that_of_transformers(dtype, tokens):
    n = 4
    model = models.use_custom_pypto(tiny_model("deepseek_v4", hc_mult=n)).to(dtype)
    (head,) = one_op_modules(model, "HyperHead")
    nn.init.normal_(head.hc_base)
    nn.init.normal_(head.hc_scale)
    x = torch.randn(2, tokens, n, head.hc_fn.size(1) // n).to(dtype)
    with Calls() as calls:
        got = head(x)
    assert calls.counts[ops.collapse_streams.default] == 1
    want, step = by_transformers(head, x), steps(torch.float32)
    weights = head.hc_fn.float(), head.hc_base.float(), head.hc_scale.float()
    eps = head.eps, head.input_norm.eps
    for result in (got, want):
        assert_are_defined("collapse_streams", result, x, *weights, *eps)
    most, off = arguments(head.input_norm, x, head.hc_fn, head.hc_base, head.hc_scale)
    of_sigmoid = off + (2 * most + 7) * step
    bound = steps(dtype) * want.abs() + (of_sigmoid + (n + 2) * step) * x.abs().sum(2)
    assert ((got - want).abs() <= bound).all() and got.dtype == dtype


@pytest.mark.parametrize("name", ["hyper_connection", "collapse_streams"])
def test_weights_of_streams_do_not_depend_on_threads_or_other_tokens(name):
    op, outputs = getattr(ops, name), []
    streams = torch.randn(1, 37, 2, 24)
    if name == "collapse_streams":
        weights = torch.randn(2, 48), torch.randn(2), torch.randn(1), 1e-6, 1e-6
    else:
        weights = torch.randn(8, 48), torch.randn(8), torch.randn(3), 3, 1e-6, 1e-6

    def flat(x):
        parts = op(x, *weights)
        return torch.cat([y.flatten(2) for y in parts], -1) if type(parts) is tuple else parts

    for threads in (1, 3):
        torch.set_num_threads(threads)
        outputs += [flat(streams), torch.cat([flat(x) for x in streams.split(1, 1)], 1)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_hook_on_the_norm_of_streams_runs():
    model = models.use_custom_pypto(tiny_model("deepseek_v4"))
    seen = []
    norms = [module.input_norm for module in one_op_modules(model, "Hyper")]
    for norm in norms:
        norm.register_forward_hook(lambda module, args, output: seen.append(module))
    model(token_ids(1, 1), cache=models.PagedCache(model, 1, 32))
    assert set(seen) == set(norms)


def test_the_ops_pass_opcheck():
    torch.library.opcheck(ops.hyper_connection.default, CONNECTION)
    torch.library.opcheck(ops.collapse_streams.default, COLLAPSED)


@pytest.mark.parametrize("message", REJECTED)
def test_rejections_name_op_and_argument(message):
    with pytest.raises(RuntimeError) as error:
        REJECTED[message]()
    assert message in str(error.value)

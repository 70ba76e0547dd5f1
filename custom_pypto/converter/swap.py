"""Graph passes that put ops of this package in place of torch_npu's standard ones, and back.

They are for torchair's option ``post_grad_custom_pre_pass``, which changes what a model compiles to
and leaves the model as it is::

    config.post_grad_custom_pre_pass = swap.use_custom_pypto  # max-autotune, reduce-overhead
    torch.compile(model, backend="npugraph_ex",
                  options={"post_grad_custom_pre_pass": swap.use_custom_pypto})

Both need torch_npu. The swapped ops are ``npu_lightning_indexer`` and
``npu_sparse_flash_attention``.
"""

import functools
from collections.abc import Callable

import torch
from torch._inductor.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

from ..schemas import bound, overload
from ..standard import KEYWORDS

SWAPPED = ("npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto")


def standard(op: str) -> torch._ops.OpOverload:
    """torch_npu's op."""
    return getattr(torch.ops.npu, op.removesuffix("_pto")).default


def use_custom_pypto(graph_module: torch.fx.GraphModule, example_inputs=None, config=None) -> None:
    """Replaces torch_npu's ops in the graph.

    Raises:
        RuntimeError: an argument has a value that the op of this package does not support.
    """
    _passes("use_custom_pypto", standard, _call_ours).apply(graph_module)


def use_torch_npu(graph_module: torch.fx.GraphModule, example_inputs=None, config=None) -> None:
    """Replaces the ops of this package in the graph by torch_npu's.

    Raises:
        RuntimeError: an argument has a value that torch_npu's op does not support.
    """
    _passes("use_torch_npu", overload, _call_standard).apply(graph_module)


@functools.cache
def _passes(name: str, target: Callable, call: Callable) -> PatternMatcherPass:
    passes = PatternMatcherPass(pass_name=name)
    for op in SWAPPED:
        _register(passes, target(op), functools.partial(call, op))
    return passes


def _register(passes: PatternMatcherPass, target: torch._ops.OpOverload, call: Callable) -> None:
    """Replaces each call of ``target`` by what ``call`` does with its arguments."""

    def replace(match: Match, *args, **kwargs) -> None:
        leaves, structure = torch.utils._pytree.tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]

        def replacement(*tensors):
            filled = list(leaves)
            for i, tensor in zip(at, tensors, strict=True):
                filled[i] = tensor
            args, kwargs = torch.utils._pytree.tree_unflatten(filled, structure)
            return call(*args, **kwargs)

        match.replace_by_example(replacement, [leaves[i] for i in at], run_functional_passes=False)

    register_graph_pattern(CallFunctionVarArgs(target), pass_dict=passes)(replace)


def _call_ours(op: str, *args, **kwargs) -> tuple:
    schema = standard(op)._schema
    names = [argument.name for argument in schema.arguments]
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    named |= dict(zip(names, args, strict=False)) | kwargs
    for name, keyword in KEYWORDS[op].items():
        if (value := named.pop(name)) != keyword.legal:
            raise RuntimeError(
                f"use_custom_pypto: {name} of {schema.name} must be {keyword.legal} "
                f"({keyword.meaning}), got {value}; pass that to the op, or compile without this "
                "pass"
            )
    return overload(op)(**named)


def _call_standard(op: str, *args, **kwargs) -> tuple:
    named, schema = bound(op, args, kwargs), standard(op)._schema
    names = [argument.name for argument in schema.arguments]
    own = {a.name: a.default_value for a in overload(op)._schema.arguments if a.name not in names}
    for name, legal in own.items():
        if (value := named.pop(name)) != legal:
            raise RuntimeError(
                f"use_torch_npu: {name} of {op} must be {legal}, got {value}: {schema.name} has no "
                "such argument; compile without this pass"
            )
    if named.get("value", True) is None:  # as in eager mode; torch_npu takes None from CANN 9.2 on
        named["value"] = named["key"]
    legal = {name: keyword.legal for name, keyword in KEYWORDS[op].items()}
    return standard(op)(**named, **legal)

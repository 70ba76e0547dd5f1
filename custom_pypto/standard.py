"""Keywords of torch_npu's standard ops that the ops here support with one value only.

torch_npu's ops of these names without ``_pto`` take them. The functions of :mod:`custom_pypto.ops`
accept them too, so that calls can be ported unchanged. Each has one legal value, which describes
what these ops do; any other value is rejected rather than ignored.
"""

from typing import Any, Literal, NamedTuple, TypedDict

from torch import Tensor


class Keyword(NamedTuple):
    legal: Any
    meaning: str  # of the legal value
    remedy: str


_NO_WINDOW = Keyword(
    2**63 - 1,
    "2**63 - 1: no window",
    "omit it (sparse_mode and the lengths determine the keys that a token sees)",
)
_WINDOW = {"pre_tokens": _NO_WINDOW, "next_tokens": _NO_WINDOW}
_ABSORBED = Keyword(
    2, "MLA, absorbed", "omit it, and pass the RoPE dims as query_rope and key_rope"
)
_INT8 = Keyword(None, "int8", "omit it (only Ascend 950 has another type, hifloat8)")
_OWN_DTYPE = Keyword(None, "None: int8", "omit it (hifloat8 needs an Ascend 950)")
_NO_SINKS = Keyword(
    None, "sinks are in the statistics", "omit them (softmax_max and softmax_sum hold them)"
)

# for type checkers: a test compares with the table and the functions; the ops check the values
Layout = Literal["BSND", "TND"]
KeyLayout = Literal["BSND", "TND", "PA_BSND"]


class Window(TypedDict, total=False):
    pre_tokens: int
    next_tokens: int


class AbsorbedWindow(Window, total=False):
    attention_mode: int


class Int8Window(Window, total=False):
    query_dtype: None
    key_dtype: None


class OwnDtypesWindow(Window, total=False):
    key_dtype: None
    value_dtype: None


class NoSinksWindow(Window, total=False):
    sinks: None


class IndexerKeywords(Window, total=False):
    actual_seq_lengths_query: Tensor | None
    actual_seq_lengths_key: Tensor | None
    block_table: Tensor | None
    layout_query: Layout
    layout_key: KeyLayout
    sparse_count: int
    sparse_mode: int
    cmp_ratio: int


class AttentionKeywords(AbsorbedWindow, total=False):
    block_table: Tensor | None
    actual_seq_lengths_query: Tensor | None
    actual_seq_lengths_kv: Tensor | None
    query_rope: Tensor | None
    key_rope: Tensor | None
    sparse_block_size: int
    layout_query: Layout
    layout_kv: KeyLayout
    sparse_mode: int
    sinks: Tensor | None


KEYWORDS = {
    "npu_lightning_indexer_pto": _WINDOW,
    "npu_quant_lightning_indexer_pto": _WINDOW | {"query_dtype": _INT8, "key_dtype": _INT8},
    "npu_sparse_flash_attention_pto": _WINDOW | {"attention_mode": _ABSORBED},
    "npu_sparse_flash_attention_grad_pto": _WINDOW | {"attention_mode": _ABSORBED},
    "npu_lightning_indexer_grad_pto": _WINDOW,
    "npu_sparse_lightning_indexer_grad_kl_loss_pto": _WINDOW | {"sinks": _NO_SINKS},
    "npu_dense_lightning_indexer_softmax_lse_pto": _WINDOW,
    "npu_dense_lightning_indexer_grad_kl_loss_pto": _WINDOW,
    "npu_kv_quant_sparse_flash_attention_pto": _WINDOW
    | {"key_dtype": _OWN_DTYPE, "value_dtype": _OWN_DTYPE},
}


def check_keywords(op: str, given: dict[str, Any]) -> None:
    """Rejects every keyword without its legal value.

    Raises:
        RuntimeError: a keyword of :data:`KEYWORDS` has another value.
        TypeError: a keyword that the standard op lacks too.
    """
    for name, value in given.items():
        keyword = KEYWORDS.get(op, {}).get(name)
        if keyword is None:
            raise TypeError(f"{op}() got an unexpected keyword argument '{name}'")
        if isinstance(value, Tensor) or value != keyword.legal:
            got = "a tensor" if isinstance(value, Tensor) else value
            if type(value) is int:
                got = int(value)  # torch.compile may have made it a symbol, which has no text
            raise RuntimeError(
                f"{op}: {name} must be {keyword.legal} ({keyword.meaning}), got {got}; "
                f"{keyword.remedy}"
            )

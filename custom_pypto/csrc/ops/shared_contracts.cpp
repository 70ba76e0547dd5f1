#include "shared_contracts.h"

#include <string>

namespace custom_pypto {

void check_scale(const char* op, double scale_value) {
  CHECK_ARGUMENT(is_scale(scale_value), op, "scale_value", kScales, scale_value);
}

void check_sparse_count(const char* op, int64_t sparse_count) {
  const bool small = sparse_count >= 1 && sparse_count <= 2048;
  const bool large = sparse_count >= 3072 && sparse_count <= 8192 && sparse_count % 1024 == 0;
  CHECK_ARGUMENT(small || large, op, "sparse_count", "1 to 2048, or 3072 to 8192 in steps of 1024",
                 sparse_count);
}

namespace {

// returns whether `lengths` is given
bool check_lengths(const char* op, const char* name, const OptionalTensor& lengths, bool required,
                   const char* meaning, const Tensor& query) {
  CHECK_ARGUMENT(lengths || !required, op, name, c10::str("an int32 tensor: ", meaning), "None");
  if (!lengths) return false;
  Argument(op, name, *lengths).rank(1, "[B]").dtype(at::kInt, meaning).device_of(query);
  return true;
}

std::string other_query_layout(const KeyNames& names, Layout given) {
  if (given == Layout::kTnd) {
    return c10::str("; [B, S1, N1, D] needs ", names.query_layout, " 'BSND', ", names.layout,
                    " 'PA_BSND' or 'BSND', and ", names.query_lengths,
                    " None or int32 query tokens of each sequence [B]");
  }
  return c10::str("; [T1, N1, D] needs ", names.query_layout, " 'TND', ", names.layout,
                  " 'PA_BSND' or 'TND', and ", names.query_lengths,
                  ": int32 inclusive prefix sums of query tokens [B]");
}

std::string other_key_layout(const KeyNames& names, Layout given) {
  if (given == Layout::kTnd) {
    return c10::str("; [blocks, block_size, 1, D] needs ", names.layout,
                    " 'PA_BSND' and block_table; [B, S2, 1, D] needs ", names.query_layout, " and ",
                    names.layout, " 'BSND'");
  }
  return c10::str(given == Layout::kPaged
                      ? "; [blocks, block_size, D] lacks the head dim: pass key.unsqueeze(2)"
                      : "",
                  "; [T2, 1, D] needs ", names.query_layout, " and ", names.layout,
                  " 'TND', and int32 inclusive prefix sums [B] in ", names.query_lengths, " and ",
                  names.lengths);
}

// For callers who did not choose the layout of keys: by default they are paged.
std::string keys_are_paged(const KeyNames& names, const SequenceParams& p) {
  return c10::str("; ", names.layout, " is 'PA_BSND', pass '", p.layout_query,
                  "' for keys that are not paged");
}

// Argument::rank with a hint: a tensor with the other layout's rank most often has that layout.
void check_layout_rank(const KeyNames& names, const char* name, const Tensor& tensor, Layout layout,
                       const std::string& shape,
                       std::string (*other_layout)(const KeyNames& names, Layout given)) {
  Argument(names.op, name, tensor);
  const int64_t rank = layout == Layout::kTnd ? 3 : 4;
  CHECK_ARGUMENT(tensor.dim() == rank, names.op, name, c10::str("of shape ", shape),
                 tensor.sym_sizes(), tensor.dim() == 7 - rank ? other_layout(names, layout) : "");
}

void check_lengths_and_blocks(const KeyNames& names, const SequenceParams& p) {
  const char* op = names.op;
  const bool packed = p.query_layout == Layout::kTnd, paged = p.key_layout == Layout::kPaged;
  const OptionalTensor& query_lengths = p.actual_seq_lengths_query;
  const bool given = check_lengths(op, names.query_lengths, query_lengths, packed,
                                   packed ? "inclusive prefix sums of query tokens [B], for 'TND'"
                                          : "query tokens of each sequence [B]",
                                   p.query);
  const c10::SymInt B = packed ? query_lengths->sym_size(0) : p.query.sym_size(0);
  if (given) Argument(op, names.query_lengths, *query_lengths).size(0, B, "B");
  const OptionalTensor& key_lengths = p.actual_seq_lengths_key;
  const char* meaning = paged    ? "keys of each sequence [B], for a paged cache"
                        : packed ? "inclusive prefix sums of keys [B], for 'TND'"
                                 : "keys of each sequence [B]";
  CHECK_ARGUMENT(key_lengths || !paged, op, names.lengths, c10::str("an int32 tensor: ", meaning),
                 "None", keys_are_paged(names, p));
  if (check_lengths(op, names.lengths, key_lengths, packed, meaning, p.query)) {
    Argument(op, names.lengths, *key_lengths).size(0, B, "B");
  }
  if (paged) {
    CHECK_ARGUMENT(p.block_table, op, "block_table",
                   "an int32 tensor: block ids [B, blocks per sequence], for a paged cache", "None",
                   keys_are_paged(names, p));
    Argument(op, "block_table", *p.block_table)
        .rank(2, "[B, blocks per sequence]")
        .dtype(at::kInt, "block ids")
        .device_of(p.query)
        .size(0, B, "B");
    Argument(op, names.key, p.key).keeps(1, Dim::kBlockSize, "block_size");
  } else {
    CHECK_ARGUMENT(!p.block_table, op, "block_table",
                   c10::str("None (", names.layout, " is '", p.layout_key, "', not 'PA_BSND')"),
                   "a tensor");
    if (!packed) Argument(op, names.key, p.key).size(0, B, "B of query");
  }
}

}  // namespace

void check_sequences(const KeyNames& names, SequenceParams& p) {
  const char* op = names.op;
  CHECK_ARGUMENT(p.cmp_ratio >= 1 && p.cmp_ratio <= 128, op, "cmp_ratio",
                 "1 to 128 (tokens per key)", p.cmp_ratio);
  CHECK_ARGUMENT(p.sparse_mode == 0 || p.sparse_mode == 3, op, "sparse_mode",
                 "0 (every key) or 3 (causal, right-aligned)", p.sparse_mode);
  CHECK_ARGUMENT(p.layout_query == "BSND" || p.layout_query == "TND", op, names.query_layout,
                 "'BSND' or 'TND'", c10::str("'", p.layout_query, "'"));
  CHECK_ARGUMENT(p.layout_key == "PA_BSND" || p.layout_key == p.layout_query, op, names.layout,
                 c10::str("'PA_BSND' or '", p.layout_query, "' (", names.query_layout, ")"),
                 c10::str("'", p.layout_key, "'"));
  const bool packed = p.layout_query == "TND", paged = p.layout_key == "PA_BSND";
  p.query_layout = packed ? Layout::kTnd : Layout::kBsnd;
  p.key_layout = paged ? Layout::kPaged : p.query_layout;
  const std::string shape = packed ? "[T1, N1, D]" : "[B, S1, N1, D]";
  check_layout_rank(names, names.query, p.query, p.query_layout,
                    c10::str(shape, " (", names.query_layout, " '", p.layout_query, "')"),
                    other_query_layout);
  check_layout_rank(names, names.key, p.key, p.key_layout,
                    paged    ? "[blocks, block_size, 1, D] (paged)"
                    : packed ? "[T2, 1, D] (TND)"
                             : "[B, S2, 1, D] (BSND)",
                    other_key_layout);
  Argument(op, names.key, p.key).size(p.key.dim() - 2, 1, "N2: one key head");
  Argument(op, names.query, p.query).keeps(p.query.dim() - 2, Dim::kPositive, "N1");
  check_lengths_and_blocks(names, p);
}

void check_index(const KeyNames& names, SequenceParams& p, const Tensor& weights) {
  const char* op = names.op;
  check_sequences(names, p);
  const int64_t rank = p.query.dim();
  Argument(op, names.key, p.key)
      .device_of(p.query)
      .size(p.key.dim() - 1, p.query.sym_size(-1), c10::str("D of ", names.query).c_str())
      .dense_rows();
  Argument(op, "weights", weights)
      .rank(rank - 1, rank == 4 ? "[B, S1, N1]" : "[T1, N1]")
      .sizes(p.query, rank - 1, c10::str("shape of ", names.query, " without D").c_str())
      .device_of(p.query);
}

void check_indexer(const KeyNames& names, IndexerParams& p) {
  check_sparse_count(names.op, p.sparse_count);
  check_index(names, p.sequences, p.weights);
  const Tensor& query = p.sequences.query;
  c10::SymDimVector shape(query.sym_sizes().begin(), query.sym_sizes().end());
  shape[query.dim() - 2] = 1;
  shape[query.dim() - 1] = p.sparse_count;
  p.out = empty(shape, query.options().dtype(at::kInt));
}

void check_unquantized_index(const KeyNames& names, const SequenceParams& p,
                             const Tensor& weights) {
  const char* op = names.op;
  const std::string why = c10::str("dtype of ", names.query);
  const auto dtype = p.query.scalar_type();
  Argument(op, names.query, p.query)
      .dtype(kFloating)
      .keeps(p.query.dim() - 1, Dim::kMultipleOf16, "D");
  Argument(op, names.key, p.key).dtype(dtype, why.c_str());
  Argument(op, "weights", weights).dtype_or_float32(dtype, why.c_str());
}

void check_sparse_indices(const KeyNames& names, const SequenceParams& p, const Tensor& indices) {
  const int64_t heads = p.query.dim() - 2;
  Argument(names.op, "sparse_indices", indices)
      .rank(p.query.dim(), p.query_layout == Layout::kTnd ? "[T1, 1, K]" : "[B, S1, 1, K]")
      .sizes(p.query, heads, "as query")
      .size(heads, 1, "N2: one key head")
      .dtype(at::kInt, "positions")
      .device_of(p.query);
}

void check_attention(const KeyNames& names, AttentionParams& p) {
  CHECK_ARGUMENT(p.sparse_block_size == 1, names.op, "sparse_block_size",
                 "1 (an index names one key)", p.sparse_block_size);
  check_scale(names.op, p.scale_value);
  check_sequences(names, p.sequences);
  check_sparse_indices(names, p.sequences, p.sparse_indices);
}

namespace {

// Checks that rank, dtype, device and all sizes but the last match `like`.
Argument like(const KeyNames& names, const Tensor& like, const char* name, const Tensor& tensor,
              const char* why) {
  return Argument(names.op, name, tensor)
      .rank(like.dim(), why)
      .sizes(like, like.dim() - 1, why)
      .dtype(like.scalar_type(), why)
      .device_of(like);
}

}  // namespace

void check_unquantized_rows(const KeyNames& names, const SequenceParams& p,
                            const OptionalTensor& value, const OptionalTensor& query_rope,
                            const OptionalTensor& key_rope, const OptionalTensor& sinks) {
  const char* op = names.op;
  const Tensor &query = p.query, &key = p.key;
  const int64_t query_last = query.dim() - 1, key_last = key.dim() - 1;
  const c10::SymInt L = query.sym_size(-1);
  Argument(op, "query", query).dtype(kFloating).keeps(query_last, Dim::kMultipleOf16, "L");
  Argument(op, "key", key)
      .dtype(query.scalar_type(), "dtype of query")
      .device_of(query)
      .size(key_last, L, "L of query")
      .dense_rows();
  if (value) like(names, key, "value", *value, "as key").size(key_last, L, "as key").dense_rows();
  CHECK_ARGUMENT(query_rope.has_value() == key_rope.has_value(), op, "key_rope",
                 query_rope ? "a tensor, as query_rope is" : "None, as query_rope is",
                 key_rope ? "a tensor" : "None");
  if (query_rope) {
    like(names, query, "query_rope", *query_rope, "as query, except R")
        .keeps(query_last, Dim::kMultipleOf16, "R");
    like(names, key, "key_rope", *key_rope, "as key, except R")
        .size(key_last, query_rope->sym_size(-1), "R of query_rope")
        .dense_rows();
  }
  if (sinks) {
    Argument(op, "sinks", *sinks)
        .rank(1, "[N1]")
        .size(0, query.sym_size(-2), "N1 of query")
        .dtype(at::kFloat, "a logit per head")
        .device_of(query);
  }
}

void check_unquantized_attention(const KeyNames& names, AttentionParams& p) {
  check_attention(names, p);
  check_unquantized_rows(names, p.sequences, p.value, p.query_rope, p.key_rope, p.sinks);
}

void check_statistics(const KeyNames& names, const char* name, const Tensor& tensor,
                      const Tensor& query) {
  const bool packed = query.dim() == 3;
  const Argument argument(names.op, name, tensor);
  argument.rank(query.dim(), packed ? "[N2, T1, N1]" : "[B, N2, S1, N1]")
      .dtype(at::kFloat, "of the forward, with return_softmax_lse=True")
      .device_of(query);
  const int64_t heads = packed ? 0 : 1;
  if (!packed) argument.size(0, query.sym_size(0), "B of query");
  argument.size(heads, 1, "N2: one key head")
      .size(heads + 1, query.sym_size(heads), packed ? "T1 of query" : "S1 of query")
      .size(heads + 2, query.sym_size(heads + 1), "N1 of query");
}

bool wants_gradient(const char* op, std::initializer_list<OptionalTensor> arguments) {
  bool wanted = false;
  for (const OptionalTensor& x : arguments) {
    if (!x || !x->defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !x->_fw_grad(/*level=*/0).defined(), op,
        ": arguments must have no tangent, got one: forward-mode derivatives (torch.func.jvp, "
        "torch.autograd.forward_ad) are not implemented; use backward(), or torch.func.vjp");
    wanted |= x->requires_grad();
  }
  return wanted && at::GradMode::is_enabled();
}

void reject_cut_cache(const char* op) {
  TORCH_CHECK(
      false, op,
      ": key must require a gradient if another tensor does, got a paged cache without: the "
      "gradient of the keys would be lost; write the rows under autograd, or pass the keys "
      "of the call (layout 'TND' or 'BSND')");
}

void check_index_rows(const char* op, const Tensor& x, const OptionalTensor& hadamard) {
  Argument(op, "x", x).dtype(kFloating);
  CHECK_ARGUMENT(x.dim() > 0, op, "x", "of shape [.., D]", x.sym_sizes());
  Argument(op, "x", x).keeps(x.dim() - 1, Dim::kInt8Dims, "D");
  if (!hadamard) return;
  Argument(op, "hadamard", *hadamard)
      .rank(2, "[D, D]")
      .size(0, x.sym_size(-1), "D of x")
      .size(1, x.sym_size(-1), "D of x")
      .dtype(x.scalar_type(), "dtype of x")
      .device_of(x);
}

}  // namespace custom_pypto

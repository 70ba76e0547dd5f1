#include "ops_common.h"

#include <cstdlib>
#include <string>

namespace custom_pypto {

std::string_view dtype_name(at::ScalarType dtype) { return c10::getDtypeNames(dtype).first; }

void check_given(const char* op, const char* name, const Tensor& tensor) {
  CHECK_ARGUMENT(tensor.defined(), op, name, "a tensor", "None");
}

void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank,
                const char* shape) {
  check_given(op, name, tensor);
  CHECK_ARGUMENT(tensor.dim() == rank, op, name, c10::str("of shape ", shape), tensor.sym_sizes());
}

void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                const c10::SymInt& expected, const char* why) {
  TORCH_SYM_CHECK(tensor.sym_size(dim).sym_eq(expected), op, ": ", name, ".size(", dim,
                  ") must be ", expected, " (", why, "), got ", tensor.sym_size(dim));
}

void check_multiple_of_16(const char* op, const char* name, const Tensor& tensor, int64_t dim) {
  const c10::SymInt size = tensor.sym_size(dim);
  TORCH_CHECK(size > 0 && size % 16 == 0, op, ": ", name, ".size(", dim,
              ") must be a positive multiple of 16, got ", size);
}

void check_floating(const char* op, const char* name, const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  CHECK_ARGUMENT(dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat, op,
                 c10::str(name, ".dtype"), "bfloat16, float16 or float32", dtype_name(dtype));
}

void check_dtype(const char* op, const char* name, const Tensor& tensor, at::ScalarType expected,
                 const char* why) {
  CHECK_ARGUMENT(tensor.scalar_type() == expected, op, c10::str(name, ".dtype"),
                 c10::str(dtype_name(expected), " (", why, ")"), dtype_name(tensor.scalar_type()));
}

void check_dtype_or_float32(const char* op, const char* name, const Tensor& tensor,
                            at::ScalarType expected, const char* why) {
  if (tensor.scalar_type() == at::kFloat) return;
  CHECK_ARGUMENT(
      tensor.scalar_type() == expected, op, c10::str(name, ".dtype"),
      c10::str(dtype_name(expected), " (", why, ")", expected == at::kFloat ? "" : " or float32"),
      dtype_name(tensor.scalar_type()));
}

void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& query) {
  CHECK_ARGUMENT(tensor.device() == query.device(), op, c10::str(name, ".device"),
                 c10::str(query.device(), " (that of the first argument)"), tensor.device());
}

void check_dense_rows(const char* op, const char* name, const Tensor& tensor) {
  TORCH_SYM_CHECK(tensor.sym_stride(-1).sym_eq(1), op, ": ", name,
                  ".stride(-1) must be 1 (rows are read as they lie; call .contiguous()), got ",
                  tensor.sym_stride(-1));
}

void check_sparse_count(const char* op, int64_t sparse_count) {
  const bool small = sparse_count >= 1 && sparse_count <= 2048;
  const bool large = sparse_count >= 3072 && sparse_count <= 8192 && sparse_count % 1024 == 0;
  CHECK_ARGUMENT(small || large, op, "sparse_count", "1 to 2048, or 3072 to 8192 in steps of 1024",
                 sparse_count);
}

void check_sparse_mode(const char* op, int64_t sparse_mode) {
  CHECK_ARGUMENT(sparse_mode == 0 || sparse_mode == 3, op, "sparse_mode",
                 "0 (every key) or 3 (causal, right-aligned)", sparse_mode);
}

namespace {

void check_lengths(const char* op, const char* name, const OptionalTensor& lengths, bool required,
                   const char* meaning, const std::optional<c10::SymInt>& batch,
                   const Tensor& query) {
  if (!lengths) {
    CHECK_ARGUMENT(!required, op, name, c10::str("given: int32 ", meaning), "None");
    return;
  }
  check_rank(op, name, *lengths, 1, "[B]");
  check_dtype(op, name, *lengths, at::kInt, meaning);
  check_device(op, name, *lengths, query);
  if (batch) check_size(op, name, *lengths, 0, *batch, "B");
}

std::string other_query_layout(const KeyNames& names, Layout given) {
  if (given == Layout::kTnd) {
    return c10::str("; [B, S1, N1, D] needs layout_query 'BSND', ", names.layout,
                    " 'PA_BSND' or 'BSND', and actual_seq_lengths_query None or int32 query tokens "
                    "of each sequence [B]");
  }
  return c10::str("; [T1, N1, D] needs layout_query 'TND', ", names.layout,
                  " 'PA_BSND' or 'TND', and actual_seq_lengths_query: int32 inclusive prefix sums "
                  "of query tokens [B]");
}

std::string other_key_layout(const KeyNames& names, Layout given) {
  if (given == Layout::kTnd) {
    return c10::str("; [blocks, block_size, 1, D] needs ", names.layout,
                    " 'PA_BSND' and block_table; [B, S2, 1, D] needs layout_query and ",
                    names.layout, " 'BSND'");
  }
  return c10::str(given == Layout::kPaged
                      ? "; [blocks, block_size, D] needs its head dim: key.unsqueeze(2)"
                      : "",
                  "; [T2, 1, D] needs layout_query and ", names.layout,
                  " 'TND', and int32 inclusive prefix sums [B] in actual_seq_lengths_query and ",
                  names.lengths);
}

// As check_rank; a tensor with the dims of the other layout is most often in that one.
void check_layout_rank(const KeyNames& names, const char* name, const Tensor& tensor, Layout layout,
                       const char* shape,
                       std::string (*other_layout)(const KeyNames& names, Layout given)) {
  check_given(names.op, name, tensor);
  const int64_t rank = layout == Layout::kTnd ? 3 : 4;
  CHECK_ARGUMENT(tensor.dim() == rank, names.op, name, c10::str("of shape ", shape),
                 tensor.sym_sizes(), tensor.dim() == 7 - rank ? other_layout(names, layout) : "");
}

}  // namespace

Layouts check_layouts(const KeyNames& names, c10::string_view layout_query,
                      c10::string_view layout_key, const Tensor& query, const Tensor& key,
                      const OptionalTensor& lengths_query, const OptionalTensor& lengths_key,
                      const OptionalTensor& block_table) {
  const char* op = names.op;
  CHECK_ARGUMENT(layout_query == "BSND" || layout_query == "TND", op, "layout_query",
                 "'BSND' or 'TND'", c10::str("'", layout_query, "'"));
  const bool packed = layout_query == "TND";
  CHECK_ARGUMENT(layout_key == "PA_BSND" || layout_key == layout_query, op, names.layout,
                 c10::str("'PA_BSND' or '", layout_query, "' (layout_query)"),
                 c10::str("'", layout_key, "'"));
  const bool paged = layout_key == "PA_BSND";
  const Layouts layouts{packed ? Layout::kTnd : Layout::kBsnd, paged    ? Layout::kPaged
                                                               : packed ? Layout::kTnd
                                                                        : Layout::kBsnd};

  check_layout_rank(
      names, "query", query, layouts.query,
      packed ? "[T1, N1, D] (layout_query 'TND')" : "[B, S1, N1, D] (layout_query 'BSND')",
      other_query_layout);
  check_layout_rank(names, "key", key, layouts.key,
                    paged    ? "[blocks, block_size, 1, D] (paged)"
                    : packed ? "[T2, 1, D] (TND)"
                             : "[B, S2, 1, D] (BSND)",
                    other_key_layout);
  check_size(op, "key", key, layouts.key_dims() - 2, 1, "N2: one key head");
  CHECK_ARGUMENT(query.sym_size(-2) > 0, op, c10::str("query.size(", layouts.query_dims() - 2, ")"),
                 "at least 1 (N1)", query.sym_size(-2));

  std::optional<c10::SymInt> batch;
  if (!packed) batch = query.sym_size(0);
  check_lengths(op, "actual_seq_lengths_query", lengths_query, packed,
                packed ? "inclusive prefix sums of query tokens [B], for 'TND'"
                       : "query tokens of each sequence [B]",
                batch, query);
  if (packed) batch = lengths_query->sym_size(0);
  check_lengths(op, names.lengths, lengths_key, paged || packed,
                paged    ? "keys of each sequence [B], for a paged cache"
                : packed ? "inclusive prefix sums of keys [B], for 'TND'"
                         : "keys of each sequence [B]",
                batch, query);
  if (paged) {
    CHECK_ARGUMENT(block_table.has_value(), op, "block_table",
                   "given: int32 [B, blocks of a sequence], for a paged cache", "None");
    check_rank(op, "block_table", *block_table, 2, "[B, blocks of a sequence]");
    check_dtype(op, "block_table", *block_table, at::kInt, "block ids");
    check_device(op, "block_table", *block_table, query);
    check_size(op, "block_table", *block_table, 0, *batch, "B");
    const c10::SymInt block_size = key.sym_size(1);
    TORCH_CHECK(block_size > 0 && block_size <= 1024 && block_size % 16 == 0, op,
                ": key.size(1) must be a multiple of 16 up to 1024 (block_size), got ", block_size);
  } else {
    CHECK_ARGUMENT(!block_table.has_value(), op, "block_table",
                   c10::str("None (", names.layout, " is '", layout_key, "', not 'PA_BSND')"),
                   "a tensor");
    if (!packed) check_size(op, "key", key, 0, *batch, "B of query");
  }
  return layouts;
}

namespace {

// (start, length) of each sequence: TND starts follow from the prefix sums, others are 0
std::vector<std::pair<int64_t, int64_t>> read_spans(const OptionalTensor& lengths, bool prefix_sums,
                                                    int64_t batch, int64_t capacity) {
  std::vector<std::pair<int64_t, int64_t>> spans(batch, {0, capacity});
  if (!lengths) return spans;
  const Tensor values = lengths->contiguous();
  const int32_t* value = values.const_data_ptr<int32_t>();
  int64_t start = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (prefix_sums) {
      const int64_t end = std::clamp<int64_t>(value[b], start, capacity);
      spans[b] = {start, end - start};
      start = end;
    } else {
      spans[b].second = std::clamp<int64_t>(value[b], 0, capacity);
    }
  }
  return spans;
}

}  // namespace

std::vector<Sequence> read_sequences(const Layouts& layouts, const Tensor& query, const Tensor& key,
                                     const OptionalTensor& lengths_query,
                                     const OptionalTensor& lengths_key,
                                     const OptionalTensor& block_table) {
  const bool packed = layouts.query == Layout::kTnd;
  const int64_t batch = packed ? lengths_query->size(0) : query.size(0);
  const int64_t tokens = packed ? query.size(0) : query.size(1);
  const int64_t capacity = layouts.key == Layout::kPaged ? block_table->size(1) * key.size(1)
                           : layouts.key == Layout::kTnd ? key.size(0)
                                                         : key.size(1);
  const auto queries = read_spans(lengths_query, packed, batch, tokens);
  const auto keys = read_spans(lengths_key, layouts.key == Layout::kTnd, batch, capacity);
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first_token = packed ? queries[b].first : b * tokens;
    sequences.push_back({b, first_token, queries[b].second, keys[b].second, keys[b].first});
  }
  return sequences;
}

KeyMap::KeyMap(const Layouts& layouts, const Tensor& key, const OptionalTensor& block_table)
    : layout_(layouts.key),
      blocks_(layouts.key == Layout::kTnd ? 1 : key.size(0)),
      // at least 1: with no key at all nothing is ever looked up, but positions are divided by it
      block_size_(std::max<int64_t>(1, key.size(layouts.key == Layout::kTnd ? 0 : 1))) {
  if ((block_size_ & (block_size_ - 1)) == 0) shift_ = __builtin_ctzll(block_size_);
  if (!block_table) return;
  table_ = block_table->contiguous();
  blocks_of_ = table_.const_data_ptr<int32_t>();
  pages_ = table_.size(1);
}

const cpu::Kernels& kernels() {
  static const cpu::Kernels& chosen = []() -> const cpu::Kernels& {
    // best first
    std::vector<const cpu::Kernels*> usable;
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) usable.push_back(&cpu::kAvx512Bf16);
    if (avx512) usable.push_back(&cpu::kAvx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      usable.push_back(&cpu::kAvx2);
    }
#endif
    usable.push_back(&cpu::kGeneric);
    const char* asked = std::getenv("CUSTOM_PYPTO_CPU_ISA");
    if (!asked || !*asked) return *usable.front();
    std::string names;
    for (const cpu::Kernels* candidate : usable) {
      if (candidate->name == std::string(asked)) return *candidate;
      names += std::string(names.empty() ? "" : ", ") + candidate->name;
    }
    TORCH_CHECK(false, "custom_pypto: CUSTOM_PYPTO_CPU_ISA must be one of ", names,
                " on this machine, got '", asked, "'");
  }();
  return chosen;
}

}  // namespace custom_pypto

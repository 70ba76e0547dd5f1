#include "contract.h"

#include <algorithm>
#include <string>

#include "../tasks/params.h"

namespace custom_pypto {

// a copy: torch returns a string or a view, by version
std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

Argument::Argument(const char* op, const char* name, const Tensor& tensor)
    : op_(op), name_(name), tensor_(tensor) {
  CHECK_ARGUMENT(tensor.defined(), op, name, "a tensor", "None");
}

const Argument& Argument::rank(int64_t rank, const char* shape) const {
  CHECK_ARGUMENT(tensor_.dim() == rank, op_, name_, c10::str("of shape ", shape),
                 tensor_.sym_sizes());
  return *this;
}

const Argument& Argument::size(int64_t dim, const Dim& expected) const {
  TORCH_SYM_CHECK(tensor_.sym_size(dim).sym_eq(expected.size), op_, ": ", name_, ".size(", dim,
                  ") must be ", expected.size, " (",
                  expected.why ? expected.why : c10::str(expected.name, " of ", expected.owner),
                  "), got ", tensor_.sym_size(dim));
  return *this;
}

const Argument& Argument::size(int64_t dim, const c10::SymInt& expected, const char* why) const {
  return size(dim, Dim("", why, expected));
}

const Argument& Argument::sizes(const Tensor& like, int64_t dims, const char* why) const {
  for (int64_t i = 0; i < dims; ++i) size(i, like.sym_size(i), why);
  return *this;
}

const Argument& Argument::keeps(int64_t dim, Dim::Rule rule, const char* letter) const {
  const c10::SymInt size = tensor_.sym_size(dim);
  const auto check = [&](bool kept, const auto&... expected) {
    CHECK_ARGUMENT(kept, op_, c10::str(name_, ".size(", dim, ")"), c10::str(expected...), size);
  };
  if (rule == Dim::kPositive) check(size > 0, "at least 1 (", letter, ")");
  if (rule == Dim::kMultipleOf16) check(size > 0 && size % 16 == 0, "a positive multiple of 16");
  if (rule == Dim::kBlockSize) {
    check(size > 0 && size <= 1024 && size % 16 == 0, "a multiple of 16 up to 1024 (block_size)");
  }
  if (rule == Dim::kInt8Dims) {
    check(size > 0 && size <= 1024 && size % 16 == 0, "a multiple of 16 up to 1024 (", letter, ")");
  }
  return *this;
}

const Argument& Argument::dtype(at::ArrayRef<at::ScalarType> expected, const char* why) const {
  const auto dtype = tensor_.scalar_type();
  if (std::count(expected.begin(), expected.end(), dtype)) return *this;
  std::string names(dtype_name(expected[0]));
  for (size_t i = 1; i < expected.size(); ++i) {
    names += c10::str(i + 1 < expected.size() ? ", " : " or ", dtype_name(expected[i]));
  }
  CHECK_ARGUMENT(false, op_, c10::str(name_, ".dtype"),
                 why ? c10::str(names, " (", why, ")") : names, dtype_name(dtype));
}

const Argument& Argument::dtype_or_float32(at::ScalarType expected, const char* why) const {
  const auto dtype = tensor_.scalar_type();
  CHECK_ARGUMENT(
      dtype == expected || dtype == at::kFloat, op_, c10::str(name_, ".dtype"),
      c10::str(dtype_name(expected), " (", why, ")", expected == at::kFloat ? "" : " or float32"),
      dtype_name(dtype));
  return *this;
}

const Argument& Argument::int8(const char* unquantised) const {
  const auto dtype = tensor_.scalar_type();
  const bool wide = std::count(std::begin(kFloating), std::end(kFloating), dtype);
  // hifloat8, which torch lacks, is passed as uint8
  const bool float8 = c10::isFloat8Type(dtype) || dtype == at::kByte;
  CHECK_ARGUMENT(dtype == at::kChar, op_, c10::str(name_, ".dtype"), "int8", dtype_name(dtype),
                 wide     ? c10::str("; ", unquantised, " takes it")
                 : float8 ? "; only Ascend 950 multiplies 8-bit floats, this op does not"
                          : "");
  return *this;
}

const Argument& Argument::device_of(const Tensor& first) const {
  CHECK_ARGUMENT(tensor_.device() == first.device(), op_, c10::str(name_, ".device"),
                 c10::str(first.device(), " (device of the first argument)"), tensor_.device());
  return *this;
}

const Argument& Argument::dense_rows() const {
  TORCH_SYM_CHECK(tensor_.sym_stride(-1).sym_eq(1), op_, ": ", name_,
                  ".stride(-1) must be 1 (contiguous last dim), got ", tensor_.sym_stride(-1),
                  "; call .contiguous()");
  return *this;
}

Argument ShapeTable::row(const char* name, const Tensor& tensor,
                         std::initializer_list<std::reference_wrapper<Dim>> shape) {
  const Argument argument(op_, name, tensor);
  if (tensor.dim() != static_cast<int64_t>(shape.size())) {
    std::string letters;
    for (const Dim& dim : shape) letters += (letters.empty() ? "" : ", ") + std::string(dim.name);
    argument.rank(shape.size(), c10::str("[", letters, "]").c_str());
  }
  int64_t i = 0;
  for (Dim& dim : shape) {
    if (dim.owner || dim.why) {
      sizes_.push_back({argument, i, dim});
    } else {
      dim.owner = name;
      dim.size = tensor.sym_size(i);
      argument.keeps(i, dim.rule, dim.name);
    }
    ++i;
  }
  return argument;
}

void ShapeTable::check_sizes() const {
  for (const Size& size : sizes_) size.argument.size(size.dim, size.expected);
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
                      ? "; [blocks, block_size, D] lacks the head dim: pass key.unsqueeze(2)"
                      : "",
                  "; [T2, 1, D] needs layout_query and ", names.layout,
                  " 'TND', and int32 inclusive prefix sums [B] in actual_seq_lengths_query and ",
                  names.lengths);
}

// Argument::rank with a hint: a tensor with the other layout's rank most often has that layout.
void check_layout_rank(const KeyNames& names, const char* name, const Tensor& tensor, Layout layout,
                       const char* shape,
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
  const bool given = check_lengths(op, "actual_seq_lengths_query", query_lengths, packed,
                                   packed ? "inclusive prefix sums of query tokens [B], for 'TND'"
                                          : "query tokens of each sequence [B]",
                                   p.query);
  const c10::SymInt B = packed ? query_lengths->sym_size(0) : p.query.sym_size(0);
  if (given) Argument(op, "actual_seq_lengths_query", *query_lengths).size(0, B, "B");
  const OptionalTensor& key_lengths = p.actual_seq_lengths_key;
  if (check_lengths(op, names.lengths, key_lengths, paged || packed,
                    paged    ? "keys of each sequence [B], for a paged cache"
                    : packed ? "inclusive prefix sums of keys [B], for 'TND'"
                             : "keys of each sequence [B]",
                    p.query)) {
    Argument(op, names.lengths, *key_lengths).size(0, B, "B");
  }
  if (paged) {
    CHECK_ARGUMENT(p.block_table, op, "block_table",
                   "an int32 tensor: block ids [B, blocks per sequence], for a paged cache",
                   "None");
    Argument(op, "block_table", *p.block_table)
        .rank(2, "[B, blocks per sequence]")
        .dtype(at::kInt, "block ids")
        .device_of(p.query)
        .size(0, B, "B");
    Argument(op, "key", p.key).keeps(1, Dim::kBlockSize, "block_size");
  } else {
    CHECK_ARGUMENT(!p.block_table, op, "block_table",
                   c10::str("None (", names.layout, " is '", p.layout_key, "', not 'PA_BSND')"),
                   "a tensor");
    if (!packed) Argument(op, "key", p.key).size(0, B, "B of query");
  }
}

}  // namespace

void check_indexer(const KeyNames& names, IndexerParams& p) {
  const char* op = names.op;
  check_sparse_count(op, p.sparse_count);
  check_sequences(names, p);
  const int64_t rank = p.query.dim();
  Argument(op, "key", p.key)
      .device_of(p.query)
      .size(p.key.dim() - 1, p.query.sym_size(-1), "D of query")
      .dense_rows();
  Argument(op, "weights", p.weights)
      .rank(rank - 1, rank == 4 ? "[B, S1, N1]" : "[T1, N1]")
      .sizes(p.query, rank - 1, "shape of query without D")
      .device_of(p.query);
  c10::SymDimVector shape(p.query.sym_sizes().begin(), p.query.sym_sizes().end());
  shape[rank - 2] = 1;
  shape[rank - 1] = p.sparse_count;
  p.out = at::empty_symint(shape, p.query.options().dtype(at::kInt));
}

void check_sequences(const KeyNames& names, SequenceParams& p) {
  const char* op = names.op;
  CHECK_ARGUMENT(p.sparse_mode == 0 || p.sparse_mode == 3, op, "sparse_mode",
                 "0 (every key) or 3 (causal, right-aligned)", p.sparse_mode);
  CHECK_ARGUMENT(p.layout_query == "BSND" || p.layout_query == "TND", op, "layout_query",
                 "'BSND' or 'TND'", c10::str("'", p.layout_query, "'"));
  CHECK_ARGUMENT(p.layout_key == "PA_BSND" || p.layout_key == p.layout_query, op, names.layout,
                 c10::str("'PA_BSND' or '", p.layout_query, "' (layout_query)"),
                 c10::str("'", p.layout_key, "'"));
  const bool packed = p.layout_query == "TND", paged = p.layout_key == "PA_BSND";
  p.query_layout = packed ? Layout::kTnd : Layout::kBsnd;
  p.key_layout = paged ? Layout::kPaged : p.query_layout;
  check_layout_rank(
      names, "query", p.query, p.query_layout,
      packed ? "[T1, N1, D] (layout_query 'TND')" : "[B, S1, N1, D] (layout_query 'BSND')",
      other_query_layout);
  check_layout_rank(names, "key", p.key, p.key_layout,
                    paged    ? "[blocks, block_size, 1, D] (paged)"
                    : packed ? "[T2, 1, D] (TND)"
                             : "[B, S2, 1, D] (BSND)",
                    other_key_layout);
  Argument(op, "key", p.key).size(p.key.dim() - 2, 1, "N2: one key head");
  Argument(op, "query", p.query).keeps(p.query.dim() - 2, Dim::kPositive, "N1");
  check_lengths_and_blocks(names, p);
}

}  // namespace custom_pypto

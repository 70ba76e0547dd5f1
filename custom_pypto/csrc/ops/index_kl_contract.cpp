#include "index_kl_contract.h"

#include <algorithm>
#include <limits>

namespace custom_pypto {
namespace {

// int32, without values unless `computes`
OptionalTensor as_tensor(const HostLengths& lengths, const Tensor& query, bool computes) {
  if (!lengths) return std::nullopt;
  const auto size = static_cast<int64_t>(lengths->size());
  const Tensor tensor = at::empty({size}, query.options().dtype(at::kInt));
  for (int64_t i = 0; computes && i < size; ++i) {
    using Limits = std::numeric_limits<int32_t>;
    const int64_t length = (*lengths)[i].guard_int(__FILE__, __LINE__);
    tensor.mutable_data_ptr<int32_t>()[i] =
        static_cast<int32_t>(std::clamp<int64_t>(length, Limits::min(), Limits::max()));
  }
  return tensor;
}

}  // namespace

HostSequences::HostSequences(const KeyNames& names, const Tensor& query,
                             const HostLengths& query_lengths, const HostLengths& key_lengths,
                             std::string_view layout, int64_t sparse_mode, int64_t cmp_ratio,
                             bool computes)
    : layout_(layout), sparse_mode_(sparse_mode), cmp_ratio_(cmp_ratio) {
  Argument(names.op, names.query, query);
  if (layout == "TND") {
    CHECK_ARGUMENT(query_lengths, names.op, names.query_lengths,
                   "a list of int: inclusive prefix sums of query tokens, for 'TND'", "None");
    CHECK_ARGUMENT(key_lengths, names.op, names.lengths,
                   "a list of int: inclusive prefix sums of keys, for 'TND'", "None");
  }
  query_lengths_ = as_tensor(query_lengths, query, computes);
  key_lengths_ = as_tensor(key_lengths, query, computes);
}

SequenceParams HostSequences::of(const Tensor& query, const Tensor& key) const {
  return {.query = query,
          .key = key,
          .actual_seq_lengths_query = query_lengths_,
          .actual_seq_lengths_key = key_lengths_,
          .layout_query = layout_,
          .layout_key = layout_,
          .sparse_mode = sparse_mode_,
          .cmp_ratio = cmp_ratio_};
}

void check_index_kl(const KeyNames& names, SequenceParams& attention, IndexKlParams& p) {
  const char* op = names.op;
  check_scale(op, p.scale_value);
  check_sequences(names, attention);
  check_unquantized_rows(names, attention, kNone, p.query_rope, p.key_rope, kNone);
  check_statistics(names, "softmax_max", p.softmax_max, p.query);
  check_statistics(names, "softmax_sum", p.softmax_sum, p.query);
  SequenceParams& index = p.index.sequences;
  const int64_t rank = p.query.dim();
  Argument(op, "query_index", index.query)
      .rank(rank, rank == 4 ? "[B, S1, N, D]" : "[T1, N, D]")
      .sizes(p.query, rank - 2, "as query")
      .device_of(p.query);
  Argument(op, "key_index", index.key)
      .rank(rank, rank == 4 ? "[B, S2, 1, D]" : "[T2, 1, D]")
      .sizes(p.key, rank - 1, "as key");
  Argument(op, "query_index", index.query).dtype(p.query.scalar_type(), "dtype of query");
  KeyNames of_index = names;
  of_index.query = "query_index";
  of_index.key = "key_index";
  check_index(of_index, index, p.index.weights);
  check_unquantized_index(of_index, index, p.index.weights);
  const auto like = [](const Tensor& x) { return empty(x.sym_sizes(), x.options()); };
  p.index.d_query = like(index.query);
  p.index.d_key = like(index.key);
  p.index.d_weights = like(p.index.weights);
  p.loss = at::empty({1}, p.query.options().dtype(at::kFloat));
}

}  // namespace custom_pypto

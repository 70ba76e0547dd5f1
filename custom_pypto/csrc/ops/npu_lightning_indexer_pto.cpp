// Lightning indexer: which keys matter most to each query token. docs/npu_lightning_indexer_pto.md
#include "npu_lightning_indexer_pto.h"

#include "../tasks/indexer.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {
    .op = "npu_lightning_indexer_pto", .layout = "layout_key", .lengths = "actual_seq_lengths_key"};

// Checks every argument and allocates the output.
void contract(IndexerParams& p) {
  const char* op = kNames.op;
  const SequenceParams& s = p.sequences;
  CHECK_ARGUMENT(s.cmp_ratio >= 1 && s.cmp_ratio <= 128, op, "cmp_ratio",
                 "1 to 128 (tokens per key)", s.cmp_ratio);
  check_indexer(kNames, p);
  const auto dtype = s.query.scalar_type();
  Argument(op, "query", s.query).dtype(kFloating).keeps(s.query.dim() - 1, Dim::kMultipleOf16, "D");
  Argument(op, "key", s.key).dtype(dtype, "dtype of query");
  Argument(op, "weights", p.weights).dtype_or_float32(dtype, "dtype of query");
}

}  // namespace

void lightning_indexer(IndexerParams& p) {
  contract(p);
  select_keys(p);
}

template <bool computes>
Tensor npu_lightning_indexer_pto(const Tensor& query, const Tensor& key, const Tensor& weights,
                                 const OptionalTensor& actual_seq_lengths_query,
                                 const OptionalTensor& actual_seq_lengths_key,
                                 const OptionalTensor& block_table, c10::string_view layout_query,
                                 c10::string_view layout_key, int64_t sparse_count,
                                 int64_t sparse_mode, int64_t cmp_ratio) {
  IndexerParams p{.sequences = {.query = query,
                                .key = key,
                                .actual_seq_lengths_query = actual_seq_lengths_query,
                                .actual_seq_lengths_key = actual_seq_lengths_key,
                                .block_table = block_table,
                                .layout_query = layout_query,
                                .layout_key = layout_key,
                                .sparse_mode = sparse_mode,
                                .cmp_ratio = cmp_ratio},
                  .weights = weights,
                  .sparse_count = sparse_count};
  computes ? lightning_indexer(p) : contract(p);
  return p.out;
}

REGISTER_OP(
    npu_lightning_indexer_pto,
    "(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
    "str layout_key='PA_BSND', int sparse_count=2048, int sparse_mode=3, "
    "int cmp_ratio=1) -> Tensor")

}  // namespace custom_pypto

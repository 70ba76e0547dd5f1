// Lightning indexer: which keys matter most to each query token. docs/npu_lightning_indexer_pto.md
#include "../tasks/index_operands.h"
#include "../tasks/index_tasks.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {"npu_lightning_indexer_pto", "layout_key", "actual_seq_lengths_key"};

// Checks every argument and allocates the output.
void contract(IndexerParams& p) {
  const char* op = kNames.op;
  CHECK_ARGUMENT(p.cmp_ratio >= 1 && p.cmp_ratio <= 128, op, "cmp_ratio",
                 "1 to 128 (tokens per key)", p.cmp_ratio);
  check_indexer(kNames, p);
  const auto dtype = p.query.scalar_type();
  Argument(op, "query", p.query).dtype(kFloating).keeps(p.query.dim() - 1, Dim::kMultipleOf16, "D");
  Argument(op, "key", p.key).dtype(dtype, "dtype of query");
  Argument(op, "weights", p.weights).dtype_or_float32(dtype, "dtype of query");
}

}  // namespace

void lightning_indexer(IndexerParams& p) {
  contract(p);
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.out.numel() == 0) return;
  const cpu::Bf16Kernels* bf16 = index_kernels(p.query.size(-1));
  dispatch_elements(p.query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    const IndexOperands<decltype(multiplied), decltype(stored)> operands(
        p.query, p.key, p.weights.to(at::kFloat).contiguous(), bf16);
    Indexer(p, operands).run();
  });
}

template <bool computes>
Tensor npu_lightning_indexer_pto(const Tensor& query, const Tensor& key, const Tensor& weights,
                                 const OptionalTensor& actual_seq_lengths_query,
                                 const OptionalTensor& actual_seq_lengths_key,
                                 const OptionalTensor& block_table, c10::string_view layout_query,
                                 c10::string_view layout_key, int64_t sparse_count,
                                 int64_t sparse_mode, int64_t cmp_ratio) {
  IndexerParams p{{query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
                   layout_query, layout_key, sparse_mode, cmp_ratio},
                  weights,
                  sparse_count};
  computes ? lightning_indexer(p) : contract(p);
  return p.out;
}

REGISTER_CPU_AND_META(npu_lightning_indexer_pto)

}  // namespace custom_pypto

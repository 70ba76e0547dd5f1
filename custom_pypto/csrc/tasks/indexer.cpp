#include "indexer.h"

#include "index_operands.h"
#include "index_tasks.h"

namespace custom_pypto {
namespace {

// Calls f(operands) for rows in the dtype of the query.
template <typename F>
void with_operands(const SequenceParams& p, const Tensor& weights, const F& f) {
  const cpu::Bf16Kernels* bf16 = index_kernels(p.query.size(-1));
  dispatch_elements(p.query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    const IndexOperands<decltype(multiplied), decltype(stored)> operands(
        p, weights.to(at::kFloat).contiguous(), bf16);
    f(operands);
  });
}

// E is the compute type, S the type of the scales
template <typename E, typename S>
void select_scaled(const IndexerParams& p, const Tensor& query_scale, const Tensor& key_scale) {
  const Tensor weights = p.weights.to(at::kFloat).mul(query_scale.to(at::kFloat));
  const ScaledOperands<E, S> operands(p.sequences, weights.contiguous(), key_scale);
  Indexer(p, operands).run();
}

template <typename E>
void select_int8(const IndexerParams& p, const Tensor& query_scale, const Tensor& key_scale) {
  if (key_scale.scalar_type() == at::kHalf) {
    select_scaled<E, c10::Half>(p, query_scale, key_scale);
  } else {
    select_scaled<E, float>(p, query_scale, key_scale);
  }
}

}  // namespace

void select_keys(const IndexerParams& p) {
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.out.numel() == 0) return;
  with_operands(p.sequences, p.weights, [&](const auto& operands) { Indexer(p, operands).run(); });
}

void index_statistics(const SequenceParams& p, const Tensor& weights, const Tensor& max,
                      const Tensor& sum) {
  if (max.numel() == 0) return;  // as above
  with_operands(p, weights,
                [&](const auto& operands) { IndexStatistics(p, operands, max, sum).run(); });
}

void select_int8_keys(const IndexerParams& p, const Tensor& query_scale, const Tensor& key_scale) {
  if (p.out.numel() == 0) return;  // as above
  if (kernels().tiles && cpu::fills_int8_tiles(p.sequences.query.size(-1))) {
    select_int8<int8_t>(p, query_scale, key_scale);
  } else if (kernels().int8_as_uint8) {
    select_int8<uint8_t>(p, query_scale, key_scale);
  } else if (kernels().int8_as_int16) {
    select_int8<int16_t>(p, query_scale, key_scale);
  } else {
    select_int8<float>(p, query_scale, key_scale);
  }
}

}  // namespace custom_pypto

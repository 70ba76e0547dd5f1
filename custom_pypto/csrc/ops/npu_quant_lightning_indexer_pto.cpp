// Lightning indexer over int8 rows, each with a scale. docs/npu_quant_lightning_indexer_pto.md
#include "../tasks/index_operands.h"
#include "../tasks/index_tasks.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {"npu_quant_lightning_indexer_pto", "layout_key",
                             "actual_seq_lengths_key"};
constexpr at::ScalarType kScaleDtypes[] = {at::kHalf, at::kFloat};

// Checks every argument and allocates the output.
void contract(QuantIndexerParams& p) {
  const char *op = kNames.op, *unquantised = "npu_lightning_indexer_pto";
  constexpr char kMode[] = "0 (int8, one scale per row)";
  CHECK_ARGUMENT(p.query_quant_mode == 0, op, "query_quant_mode", kMode, p.query_quant_mode);
  CHECK_ARGUMENT(p.key_quant_mode == 0, op, "key_quant_mode", kMode, p.key_quant_mode);
  check_indexer(kNames, p);
  const int64_t query_last = p.query.dim() - 1, key_last = p.key.dim() - 1;
  Argument(op, "query", p.query).int8(unquantised).keeps(query_last, Dim::kInt8Dims, "D");
  Argument(op, "key", p.key).int8(unquantised);
  Argument(op, "weights", p.weights).dtype(kFloating);
  Argument(op, "query_dequant_scale", p.query_dequant_scale)
      .rank(query_last, query_last == 3 ? "[B, S1, N1]" : "[T1, N1]")
      .sizes(p.query, query_last, "shape of query without D")
      .dtype(kScaleDtypes)
      .device_of(p.query);
  Argument(op, "key_dequant_scale", p.key_dequant_scale)
      .rank(key_last,
            key_last == 3 ? p.block_table ? "[blocks, block_size, 1]" : "[B, S2, 1]" : "[T2, 1]")
      .sizes(p.key, key_last, "shape of key without D")
      .dtype(p.query_dequant_scale.scalar_type(), "dtype of query_dequant_scale")
      .device_of(p.query);
}

// int8 operands whose scores are multiplied by the scales of their keys, of type S.
template <typename E, typename S>
class ScaledOperands : public IndexOperands<E, int8_t> {
  using Base = IndexOperands<E, int8_t>;

 public:
  explicit ScaledOperands(const QuantIndexerParams& p)
      : Base(p.query, p.key,
             (p.weights.to(at::kFloat) * p.query_dequant_scale.to(at::kFloat)).contiguous()),
        key_scales_(p.key_dequant_scale.unsqueeze(-1)),
        scales_(key_scales_) {}

  struct Scratch : Base::Scratch {
    using Base::Scratch::Scratch;
    float key_scales[cpu::kMaxKeys];
  };

  void read(const KeyMap::Slot& slot, int n, const KeyMap::Slot* next, Scratch& scratch) const {
    Base::read(slot, n, next, scratch);
    const S* scale = scales_.row(slot);
    for (int j = 0; j < n; ++j) scratch.key_scales[j] = scale[j * scales_.stride];
  }

  void score(int64_t place, int n, Scratch& scratch, float* scores) const {
    Base::score(place, n, scratch, scores);
    for (int j = 0; j < n; ++j) scores[j] *= scratch.key_scales[j];
  }

 private:
  Tensor key_scales_;
  Cache<S> scales_;
};

template <typename E>
void select(const QuantIndexerParams& p) {
  if (p.key_dequant_scale.scalar_type() == at::kHalf) {
    Indexer(p, ScaledOperands<E, c10::Half>(p)).run();
  } else {
    Indexer(p, ScaledOperands<E, float>(p)).run();
  }
}

}  // namespace

template <bool computes>
Tensor npu_quant_lightning_indexer_pto(const Tensor& query, const Tensor& key,
                                       const Tensor& weights, const Tensor& query_dequant_scale,
                                       const Tensor& key_dequant_scale, int64_t query_quant_mode,
                                       int64_t key_quant_mode,
                                       const OptionalTensor& actual_seq_lengths_query,
                                       const OptionalTensor& actual_seq_lengths_key,
                                       const OptionalTensor& block_table,
                                       c10::string_view layout_query, c10::string_view layout_key,
                                       int64_t sparse_count, int64_t sparse_mode) {
  QuantIndexerParams p{{{query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
                         layout_query, layout_key, sparse_mode},
                        weights,
                        sparse_count},
                       query_dequant_scale,
                       key_dequant_scale,
                       query_quant_mode,
                       key_quant_mode};
  contract(p);
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (computes && p.out.numel() != 0) kernels().int8 ? select<uint8_t>(p) : select<float>(p);
  return p.out;
}

REGISTER_CPU_AND_META(npu_quant_lightning_indexer_pto)

}  // namespace custom_pypto

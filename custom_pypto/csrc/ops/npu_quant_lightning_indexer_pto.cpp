// Lightning indexer over int8 rows, each with a scale. docs/npu_quant_lightning_indexer_pto.md
#include "../tasks/indexer.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {.op = "npu_quant_lightning_indexer_pto",
                             .layout = "layout_key",
                             .lengths = "actual_seq_lengths_key"};
constexpr at::ScalarType kScaleDtypes[] = {at::kHalf, at::kFloat};

struct QuantIndexerParams {
  IndexerParams indexer;
  const Tensor &query_dequant_scale, &key_dequant_scale;
  int64_t query_quant_mode, key_quant_mode;
};

// Checks every argument and allocates the output.
void contract(QuantIndexerParams& p) {
  const char *op = kNames.op, *unquantized = "npu_lightning_indexer_pto";
  constexpr char kMode[] = "0 (int8, one scale per row)";
  CHECK_ARGUMENT(p.query_quant_mode == 0, op, "query_quant_mode", kMode, p.query_quant_mode);
  CHECK_ARGUMENT(p.key_quant_mode == 0, op, "key_quant_mode", kMode, p.key_quant_mode);
  check_indexer(kNames, p.indexer);
  const SequenceParams& s = p.indexer.sequences;
  const int64_t query_last = s.query.dim() - 1, key_last = s.key.dim() - 1;
  Argument(op, "query", s.query).int8(unquantized).keeps(query_last, Dim::kInt8Dims, "D");
  Argument(op, "key", s.key).int8(unquantized);
  Argument(op, "weights", p.indexer.weights).dtype(kFloating);
  Argument(op, "query_dequant_scale", p.query_dequant_scale)
      .rank(query_last, query_last == 3 ? "[B, S1, N1]" : "[T1, N1]")
      .sizes(s.query, query_last, "shape of query without D")
      .dtype(kScaleDtypes)
      .device_of(s.query);
  Argument(op, "key_dequant_scale", p.key_dequant_scale)
      .rank(key_last,
            key_last == 3 ? s.block_table ? "[blocks, block_size, 1]" : "[B, S2, 1]" : "[T2, 1]")
      .sizes(s.key, key_last, "shape of key without D")
      .dtype(p.query_dequant_scale.scalar_type(), "dtype of query_dequant_scale")
      .device_of(s.query);
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
  QuantIndexerParams p{
      .indexer = {.sequences = {.query = query,
                                .key = key,
                                .actual_seq_lengths_query = actual_seq_lengths_query,
                                .actual_seq_lengths_key = actual_seq_lengths_key,
                                .block_table = block_table,
                                .layout_query = layout_query,
                                .layout_key = layout_key,
                                .sparse_mode = sparse_mode},
                  .weights = weights,
                  .sparse_count = sparse_count},
      .query_dequant_scale = query_dequant_scale,
      .key_dequant_scale = key_dequant_scale,
      .query_quant_mode = query_quant_mode,
      .key_quant_mode = key_quant_mode};
  contract(p);
  if (computes) select_int8_keys(p.indexer, query_dequant_scale, key_dequant_scale);
  return p.indexer.out;
}

REGISTER_OP(npu_quant_lightning_indexer_pto,
            "(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
            "Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, "
            "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
            "Tensor? block_table=None, str layout_query='BSND', str layout_key='PA_BSND', "
            "int sparse_count=2048, int sparse_mode=3) -> Tensor")

}  // namespace custom_pypto

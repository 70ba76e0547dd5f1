// Quantizes index keys into a paged cache. docs/int8_caches.md
#include "../tasks/index_rows.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_quant_index_update_pto";

// Every rule is checked here, before the caches are touched.
void contract(const Tensor& x, const Tensor& slots, const Tensor& cache, const Tensor& scale_cache,
              const OptionalTensor& hadamard) {
  check_index_rows(kOp, x, hadamard);
  Argument(kOp, "slots", slots)
      .rank(x.dim() - 1, "that of x without D")
      .sizes(x, x.dim() - 1, "shape of x without D")
      .dtype(kSlots, "flat slots of the caches")
      .device_of(x);
  Argument(kOp, "cache", cache)
      .rank(4, "[blocks, block_size, 1, D]")
      .keeps(1, Dim::kBlockSize, "block_size")
      .size(2, 1, "N2: one key head")
      .size(3, x.sym_size(-1), "D of x")
      .dtype(at::kChar)
      .device_of(x)
      .dense_rows();
  Argument(kOp, "scale_cache", scale_cache)
      .rank(3, "[blocks, block_size, 1]")
      .sizes(cache, 3, "shape of cache without D")
      .dtype(at::kHalf)
      .device_of(x);
}

}  // namespace

template <bool computes>
void npu_quant_index_update_pto(const Tensor& x, const Tensor& slots, const Tensor& cache,
                                const Tensor& scale_cache, const OptionalTensor& hadamard) {
  contract(x, slots, cache, scale_cache, hadamard);
  if (computes && x.numel() != 0) quantize_into_cache(x, hadamard, slots, cache, scale_cache);
}

REGISTER_OP(npu_quant_index_update_pto,
            "(Tensor x, Tensor slots, Tensor(a!) cache, Tensor(b!) scale_cache, *, "
            "Tensor? hadamard=None) -> ()")

}  // namespace custom_pypto

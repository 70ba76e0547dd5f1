// Quantizes key rows into a paged cache. docs/int8_caches.md
#include "../tasks/int8_rows.h"
#include "contract.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_kv_quant_update_pto";

// Every rule is checked here, before the cache is touched.
void contract(const Tensor& latent, const Tensor& rope, const Tensor& slots, const Tensor& cache) {
  Argument(kOp, "latent", latent).dtype(kHalves, "that of the RoPE part of the cache's rows");
  CHECK_ARGUMENT(latent.dim() > 0, kOp, "latent", "of shape [.., L]", latent.sym_sizes());
  const int64_t last = latent.dim() - 1;
  const c10::SymInt L = latent.sym_size(last);
  CHECK_ARGUMENT(L > 0 && L % kScaleGroup == 0, kOp, c10::str("latent.size(", last, ")"),
                 "a positive multiple of 128 (L)", L);
  Argument(kOp, "rope", rope)
      .rank(last + 1, "that of latent with R for L")
      .sizes(latent, last, "as latent, except R")
      .keeps(last, Dim::kMultipleOf16, "R")
      .dtype(latent.scalar_type(), "dtype of latent")
      .device_of(latent);
  Argument(kOp, "slots", slots)
      .rank(last, "that of latent without L")
      .sizes(latent, last, "shape of latent without L")
      .dtype(kSlots, "flat slots of the cache")
      .device_of(latent);
  const Int8RowLayout<c10::SymInt> layout{.latent = L, .rope = rope.sym_size(last)};
  Argument(kOp, "cache", cache)
      .rank(4, "[blocks, block_size, 1, bytes of a row]")
      .keeps(1, Dim::kBlockSize, "block_size")
      .size(2, 1, "N2: one key head")
      .size(3, layout.bytes(), kRowBytes)
      .dtype(at::kChar)
      .device_of(latent)
      .dense_rows();
}

}  // namespace

template <bool computes>
void npu_kv_quant_update_pto(const Tensor& latent, const Tensor& rope, const Tensor& slots,
                             const Tensor& cache) {
  contract(latent, rope, slots, cache);
  if (computes && latent.numel() != 0) write_int8_rows(latent, rope, slots, cache);
}

REGISTER_OP(npu_kv_quant_update_pto,
            "(Tensor latent, Tensor rope, Tensor slots, Tensor(a!) cache) -> ()")

}  // namespace custom_pypto

// Quantises key rows into a paged cache. docs/npu_kv_quant_update_pto.md
#include <cmath>
#include <cstring>

#include "../tasks/int8_rows.h"
#include "../tasks/quantise.h"
#include "../tasks/sequences.h"
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
  CHECK_ARGUMENT(L > 0 && L % kTile == 0, kOp, c10::str("latent.size(", last, ")"),
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
  Argument(kOp, "cache", cache)
      .rank(4, "[blocks, block_size, 1, bytes of a row]")
      .keeps(1, Dim::kBlockSize, "block_size")
      .size(2, 1, "N2: one key head")
      .size(3, quantised_row_bytes(L, rope.sym_size(last)), kRowBytes)
      .dtype(at::kChar)
      .device_of(latent)
      .dense_rows();
}

void write_row(const float* latent, int64_t dims, const char* rope, int64_t rope_bytes,
               int8_t* row) {
  int8_t* scales = row + dims + rope_bytes;
  for (int64_t l = 0; l < dims; l += kTile, scales += sizeof(float)) {
    float scale = quantise(latent + l, kTile, row + l);
    if (std::isnan(scale)) scale = NAN;  // one of the many, so that the bytes are defined
    std::memcpy(scales, &scale, sizeof(scale));
  }
  std::memcpy(row + dims, rope, rope_bytes);
}

}  // namespace

template <bool computes>
void npu_kv_quant_update_pto(const Tensor& latent, const Tensor& rope, const Tensor& slots,
                             const Tensor& cache) {
  contract(latent, rope, slots, cache);
  if (!computes || latent.numel() == 0) return;
  const Tensor values = latent.to(at::kFloat).contiguous(), ropes = rope.contiguous();
  const Tensor where = slots.to(at::kLong).contiguous();
  const float* value = values.const_data_ptr<float>();
  const char* rope_row = static_cast<const char*>(ropes.const_data_ptr());
  const int64_t* slot = where.const_data_ptr<int64_t>();
  const int64_t dims = latent.size(-1), rope_bytes = rope.size(-1) * rope.element_size();
  const CacheSlots rows(cache);
  // in order: of two rows for one slot the later one stays
  for (int64_t i = 0; i < where.numel(); ++i) {
    if (void* row = rows.row(slot[i])) {
      write_row(value + i * dims, dims, rope_row + i * rope_bytes, rope_bytes,
                static_cast<int8_t*>(row));
    }
  }
}

REGISTER_CPU_AND_META(npu_kv_quant_update_pto)

}  // namespace custom_pypto

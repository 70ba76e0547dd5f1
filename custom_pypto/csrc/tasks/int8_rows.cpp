#include "int8_rows.h"

#include <cmath>

#include "cache_slots.h"
#include "quantize.h"

namespace custom_pypto {
namespace {

void write_row(const float* latent, const char* rope, const Int8RowLayout<int64_t>& layout,
               int8_t* row) {
  int8_t* scales = row + layout.scales_at();
  for (int64_t l = 0; l < layout.latent; l += kScaleGroup, scales += sizeof(float)) {
    float scale = quantize(latent + l, kScaleGroup, row + l);
    if (std::isnan(scale)) scale = NAN;  // one of the many, so that the bytes are defined
    std::memcpy(scales, &scale, sizeof(scale));
  }
  std::memcpy(row + layout.rope_at(), rope, layout.rope * 2);
}

}  // namespace

void write_int8_rows(const Tensor& latent, const Tensor& rope, const Tensor& slots,
                     const Tensor& cache) {
  const Tensor values = latent.to(at::kFloat).contiguous(), ropes = rope.contiguous();
  const Int8RowLayout<int64_t> layout{.latent = latent.size(-1), .rope = rope.size(-1)};
  const float* value = values.const_data_ptr<float>();
  const char* rope_row = static_cast<const char*>(ropes.const_data_ptr());
  for_each_slot(slots, cache, [&](int64_t i, void* row) {
    write_row(value + i * layout.latent, rope_row + i * layout.rope * 2, layout,
              static_cast<int8_t*>(row));
  });
}

}  // namespace custom_pypto

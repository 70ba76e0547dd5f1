#include "index_rows.h"

#include <algorithm>
#include <cstddef>

#include "cache_slots.h"
#include "quantize.h"
#include "run_tasks.h"

namespace custom_pypto {
namespace {

// a prompt has 64 rows per token: rotated in float32 at once they would take more than the cache
constexpr int64_t kRowsAtOnce = 4096;
constexpr int64_t kRowsPerTask = 64;

// x, or x . hadamard with sums in float32, rounded to the dtype of x; returned as contiguous
// float32.
Tensor rotated(const Tensor& x, const OptionalTensor& hadamard) {
  Tensor rows = x.to(at::kFloat);
  if (hadamard) rows = rows.matmul(hadamard->to(at::kFloat)).to(x.scalar_type());
  return rows.to(at::kFloat).contiguous();
}

}  // namespace

void quantize_rows(const Tensor& x, const OptionalTensor& hadamard, const Tensor& rows,
                   const Tensor& scales) {
  int8_t* to = rows.mutable_data_ptr<int8_t>();
  auto* scale = scales.mutable_data_ptr<c10::Half>();
  const int64_t dims = x.size(-1), count = scales.numel();
  const Tensor flat = x.reshape({count, dims});
  for (int64_t first = 0; first < count; first += kRowsAtOnce) {
    const int64_t some = std::min(kRowsAtOnce, count - first);
    const Tensor source = rotated(flat.narrow(0, first, some), hadamard);
    const float* from = source.const_data_ptr<float>();
    const auto task = [&](std::nullptr_t, int64_t t) {
      const int64_t begin = t * kRowsPerTask, end = std::min(begin + kRowsPerTask, some);
      for (int64_t i = begin; i < end; ++i) {
        scale[first + i] = quantize(from + i * dims, dims, to + (first + i) * dims);
      }
    };
    run_tasks((some + kRowsPerTask - 1) / kRowsPerTask, [] { return nullptr; }, task);
  }
}

void quantize_into_cache(const Tensor& x, const OptionalTensor& hadamard, const Tensor& slots,
                         const Tensor& cache, const Tensor& scale_cache) {
  const Tensor rows = rotated(x, hadamard), where = slots.to(at::kLong).contiguous();
  const float* from = rows.const_data_ptr<float>();
  const int64_t* slot = where.const_data_ptr<int64_t>();
  const int64_t dims = x.size(-1);
  const CacheSlots scales(scale_cache.unsqueeze(-1));
  for_each_slot(where, cache, [&](int64_t i, void* key) {
    *static_cast<c10::Half*>(scales.row(slot[i])) =
        quantize(from + i * dims, dims, static_cast<int8_t*>(key));
  });
}

}  // namespace custom_pypto

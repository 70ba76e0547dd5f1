#include "convert_weight.h"

#include <ATen/Dispatch.h>

#include <algorithm>

#include "panels.h"
#include "run_tasks.h"

namespace custom_pypto {
namespace {

constexpr int64_t kRowsOfTask = 16;

template <typename T>
T* row_of(const Tensor& matrix, int64_t row) {
  return static_cast<T*>(matrix.data_ptr()) + row * matrix.stride(0);
}

class Source {
 public:
  explicit Source(const ConversionParams& p)
      : weight_(p.weight), rows_(p.block_rows), columns_(p.block_columns) {
    if (p.scales) scales_ = p.scales->to(at::kFloat).contiguous();
  }

  void read(int64_t row, int64_t n, float* to) const {
    if (scales_.defined()) {
      const auto dequantize = weight_.scalar_type() == at::kChar ? kernels().rows->dequantize_fp4
                                                                 : kernels().rows->dequantize_fp8;
      const float* scales = scales_.const_data_ptr<float>() + row / rows_ * scales_.size(1);
      return dequantize(row_of<const uint8_t>(weight_, row), scales, n, columns_, to);
    }
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, weight_.scalar_type(),
                                    "convert_weight",
                                    [&] { widen(row_of<const scalar_t>(weight_, row), n, to); });
  }

 private:
  const Tensor& weight_;
  Tensor scales_;
  int64_t rows_, columns_;
};

void write(const ConversionParams& p, int64_t row, int64_t n, const float* from) {
  const cpu::RowKernels& rows = *kernels().rows;
  switch (p.out.scalar_type()) {
    case at::kBFloat16:
      return rows.round_bf16(from, n, row_of<uint16_t>(p.out, row));
    case at::kHalf:
      return narrow(from, n, row_of<c10::Half>(p.out, row));
    case at::kChar:
      *row_of<float>(*p.out_scales, row) = rows.round_int8(from, n, row_of<int8_t>(p.out, row));
      return;
    default: {
      const int64_t group = n / p.out_scales->size(1);
      rows.round_int4(from, n, group, row_of<uint8_t>(p.out, row),
                      row_of<uint16_t>(*p.out_scales, row));
    }
  }
}

}  // namespace

void write_converted(const ConversionParams& p) {
  const Source source(p);
  const int64_t rows = p.out.size(0),
                n = p.out.size(1) * (p.out.scalar_type() == at::kByte ? 2 : 1);
  const bool in_place = p.out.scalar_type() == at::kFloat;
  run_tasks((rows + kRowsOfTask - 1) / kRowsOfTask,
            [&] { return AlignedVector<float>(in_place ? 0 : n); },
            [&](AlignedVector<float>& values, int64_t task) {
              const int64_t first = task * kRowsOfTask, end = std::min(rows, first + kRowsOfTask);
              for (int64_t row = first; row < end; ++row) {
                float* to = in_place ? row_of<float>(p.out, row) : values.data();
                source.read(row, n, to);
                if (!in_place) write(p, row, n, to);
              }
            },
            {.most = threads_for(p.weight.numel() * p.weight.element_size())});
}

}  // namespace custom_pypto

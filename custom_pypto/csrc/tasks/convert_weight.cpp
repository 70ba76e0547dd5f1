#include "convert_weight.h"

#include <ATen/Dispatch.h>

#include <algorithm>

#include "panels.h"
#include "run_tasks.h"
#include "stored_weight.h"

namespace custom_pypto {
namespace {

constexpr int64_t kRowsOfTask = 16;

template <typename T>
T* row_of(const Tensor& rows, int64_t row) {
  const int64_t bytes = rows.stride(0) * rows.element_size();
  return static_cast<T*>(static_cast<void*>(static_cast<char*>(rows.data_ptr()) + row * bytes));
}

class Source {
 public:
  explicit Source(const ConversionParams& p)
      : weight_(p.weight), rows_(p.block_rows), columns_(p.block_columns) {
    if (p.scales) scales_ = p.scales->to(at::kFloat).contiguous();
  }

  void read(int64_t row, int64_t n, float* to) const {
    if (scales_.defined()) {
      const auto format = weight_.scalar_type() == at::kChar ? cpu::kFp4Weight : cpu::kFp8Weight;
      const float* scales = scales_.const_data_ptr<float>() + row / rows_ * scales_.size(1);
      return kernels().weights[format].dequantize(row_of<const uint8_t>(weight_, row), scales, n,
                                                  columns_, to);
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

class Target {
 public:
  explicit Target(const ConversionParams& p) : out_(p.out), scales_(p.out_scales) {
    if (p.out.scalar_type() == at::kHalf) return;
    const StoredWeight stored(p.out, p.out_scales, 0);
    round_ = stored.kernels().round;
    group_ = stored.group();
  }

  void write(int64_t row, int64_t n, const float* from) const {
    if (!round_) return narrow(from, n, row_of<c10::Half>(out_, row));
    round_(from, n, group_, row_of<void>(out_, row),
           scales_ ? row_of<void>(*scales_, row) : nullptr);
  }

 private:
  const Tensor& out_;
  const OptionalTensor& scales_;
  decltype(cpu::WeightKernels::round) round_ = nullptr;
  int64_t group_ = 0;
};

}  // namespace

void write_converted(const ConversionParams& p) {
  const Source source(p);
  const int64_t rows = p.out.size(0),
                n = p.weight.size(1) * (p.weight.scalar_type() == at::kChar ? 2 : 1);
  const bool in_place = p.out.scalar_type() == at::kFloat;
  const auto target = in_place ? std::nullopt : std::optional<Target>(p);
  run_tasks((rows + kRowsOfTask - 1) / kRowsOfTask,
            [&] { return AlignedVector<float>(in_place ? 0 : n); },
            [&](AlignedVector<float>& values, int64_t task) {
              const int64_t first = task * kRowsOfTask, end = std::min(rows, first + kRowsOfTask);
              for (int64_t row = first; row < end; ++row) {
                float* to = in_place ? row_of<float>(p.out, row) : values.data();
                source.read(row, n, to);
                if (!in_place) target->write(row, n, to);
              }
            },
            {.most = threads_for(p.weight.numel() * p.weight.element_size())});
}

}  // namespace custom_pypto

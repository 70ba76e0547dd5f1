#include "stored_weight.h"

#include <algorithm>

namespace custom_pypto {
namespace {

constexpr int64_t kReadBehind = 16;  // scales that kernels may read behind the last

}  // namespace

std::optional<cpu::WeightFormat> weight_format(at::ScalarType weight,
                                               std::optional<at::ScalarType> scales) {
  if (weight == at::kBFloat16 && !scales) return cpu::kBfloat16Weight;
  if (weight == at::kChar && scales == at::kFloat) return cpu::kInt8Weight;
  if (weight == at::kFloat8_e4m3fn && scales == at::kFloat) return cpu::kFp8Weight;
  if (weight == at::kByte && scales == at::kBFloat16) return cpu::kInt4Weight;
  if (weight == at::kByte && scales == at::kFloat8_e8m0fnu) return cpu::kFp4Weight;
  return std::nullopt;
}

StoredWeight::StoredWeight(const Tensor& weight, const OptionalTensor& scales, int64_t block)
    : format_(*weight_format(weight.scalar_type(),
                             scales ? std::optional(scales->scalar_type()) : std::nullopt)),
      values_(static_cast<const uint8_t*>(weight.const_data_ptr())),
      experts_(weight.dim() == 3 ? weight.size(0) : 1),
      rows_(weight.size(-2)),
      depth_(weight.scalar_type() == at::kByte ? weight.size(-1) * 2 : weight.size(-1)),
      expert_stride_(weight.dim() == 3 ? weight.stride(0) * weight.element_size() : 0),
      row_stride_(weight.stride(-2) * weight.element_size()),
      group_(depth_),
      groups_(1),
      block_(block) {
  if (weight.stride(-1) != 1 && weight.size(-1) > 1) {
    transposed_ = true;
    column_stride_ = weight.stride(-1);
  }
  if (scales) scales_ = scales->contiguous();
  if (format_ == cpu::kFp8Weight) group_ = std::min(block, depth_);
  if (format_ == cpu::kFp4Weight) group_ = cpu::kFp4Group;
  if (format_ == cpu::kInt4Weight) group_ = depth_ / scales_.size(-2);
  groups_ = (depth_ + group_ - 1) / group_;
}

void StoredWeight::read_scales(int64_t row, int64_t rows, float* scales) const {
  const int64_t count = rows * groups_;
  switch (format_) {
    case cpu::kBfloat16Weight:
      std::fill_n(scales, count, 1.0f);
      break;
    case cpu::kInt8Weight:
      std::copy_n(scales_.const_data_ptr<float>() + row, count, scales);
      break;
    case cpu::kFp8Weight: {
      const int64_t bands = (rows_ + block_ - 1) / block_, expert = row / rows_;
      for (int64_t r = row; r < row + rows; ++r, scales += groups_) {
        const int64_t band = expert * bands + r % rows_ / block_;
        const float* from = scales_.const_data_ptr<float>() + band * groups_;
        // the kernels' values of e4m3 count 2^-8 times
        for (int64_t g = 0; g < groups_; ++g) scales[g] = from[g] * 256.0f;
      }
      break;
    }
    case cpu::kInt4Weight:
    case cpu::kFp4Weight: {
      const auto* from = static_cast<const char*>(scales_.const_data_ptr());
      const int64_t bytes = format_ == cpu::kInt4Weight ? 4 : 1;
      from += row * groups_ * bytes;
      kernels().read_scales(from, count, scales);
      // those of the next rows, which would else hold up the stream of values
      for (int64_t i = 0; i < count * bytes; i += 64) __builtin_prefetch(from + count * bytes + i);
    }
  }
}

void StoredWeight::widen_bf16(int64_t expert, int64_t first, int64_t rows, int64_t stride,
                              AlignedVector<float>& scales, uint16_t* to) const {
  const cpu::Dots call = operand(expert, first, rows, scales);
  const auto widen = custom_pypto::kernels().bf16->widen[format_];
  for (int64_t r = 0; r < rows; ++r) widen(call, r, to + r * stride);
}

cpu::Dots StoredWeight::operand(int64_t expert, int64_t first, int64_t rows,
                                AlignedVector<float>& scales) const {
  const bool has_offsets = format_ == cpu::kInt4Weight;
  scales.resize(rows * groups_ * (has_offsets ? 2 : 1) + kReadBehind);
  read_scales(expert * rows_ + first, rows, scales.data());
  return {.weight = values_ + expert * expert_stride_ + first * row_stride_,
          .stride = row_stride_,
          .n = static_cast<int>(rows),
          .depth = static_cast<int>(depth_),
          .group = static_cast<int>(group_),
          .groups = static_cast<int>(groups_),
          .scales = scales.data(),
          .offsets = has_offsets ? scales.data() + rows * groups_ : nullptr,
          .x = nullptr,
          .m = 0,
          .out = nullptr};
}

}  // namespace custom_pypto

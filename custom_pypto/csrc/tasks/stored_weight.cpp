#include "stored_weight.h"

#include <algorithm>

namespace custom_pypto {
namespace {

constexpr int64_t kReadBehind = 16;      // scales that kernels may read behind the last
constexpr int64_t kScalesInTurn = 2048;  // that stay in the level-1 cache

}  // namespace

const WeightFacts kWeightFacts[cpu::kWeightFormats] = {
    {.name = "bfloat16",
     .weight = at::kBFloat16,
     .scales = std::nullopt,
     .codes = 1,
     .blocks = false,
     .group = 0,
     .zeros = false,
     .scale_shape = nullptr},
    {.name = "int8",
     .weight = at::kChar,
     .scales = at::kFloat,
     .codes = 1,
     .blocks = false,
     .group = 0,
     .zeros = false,
     .scale_shape = "N"},
    {.name = "fp8",
     .weight = at::kFloat8_e4m3fn,
     .scales = at::kFloat,
     .codes = 1,
     .blocks = true,
     .group = 0,
     .zeros = false,
     .scale_shape = "N / block_size, K / block_size"},
    {.name = "int4",
     .weight = at::kByte,
     .scales = at::kBFloat16,
     .codes = 2,
     .blocks = false,
     .group = 0,
     .zeros = true,
     .scale_shape = "N, K / G, 2"},
    {.name = "fp4",
     .weight = at::kByte,
     .scales = at::kFloat8_e8m0fnu,
     .codes = 2,
     .blocks = false,
     .group = cpu::kFp4Group,
     .zeros = false,
     .scale_shape = "N, K / 32"}};

std::optional<cpu::WeightFormat> weight_format(at::ScalarType weight,
                                               std::optional<at::ScalarType> scales) {
  for (int i = 0; i < cpu::kWeightFormats; ++i) {
    const WeightFacts& facts = kWeightFacts[i];
    if (facts.weight == weight && facts.scales == scales) return cpu::WeightFormat(i);
  }
  return std::nullopt;
}

StoredWeight::StoredWeight(const Tensor& weight, const OptionalTensor& scales, int64_t block)
    : format_(*weight_format(weight.scalar_type(),
                             scales ? std::optional(scales->scalar_type()) : std::nullopt)),
      values_(static_cast<const uint8_t*>(weight.const_data_ptr())),
      experts_(weight.dim() == 3 ? weight.size(0) : 1),
      rows_(weight.size(-2)),
      depth_(weight.size(-1) * facts().codes),
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
  if (facts().blocks) group_ = std::min(block, depth_);
  if (facts().group) group_ = facts().group;
  if (facts().zeros) group_ = depth_ / scales_.size(-2);
  groups_ = (depth_ + group_ - 1) / group_;
}

const uint8_t* StoredWeight::scales_from(int64_t row) const {
  const int64_t bytes = scales_.element_size() * (facts().zeros ? 2 : 1);
  return static_cast<const uint8_t*>(scales_.const_data_ptr()) + row * groups_ * bytes;
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
      // a call for each row takes as long as a tenth of the product of a short one
      const float* of_expert = scales_.const_data_ptr<float>() + expert * bands * groups_;
      for (int64_t r = row - expert * rows_; rows > 0; ++r, --rows, scales += groups_) {
        const float* from = of_expert + r / block_ * groups_;
        // the kernels' values of e4m3 count 2^-8 times
        for (int64_t g = 0; g < groups_; ++g) scales[g] = from[g] * 256.0f;
      }
      break;
    }
    case cpu::kInt4Weight:
    case cpu::kFp4Weight: {
      const uint8_t *from = scales_from(row), *next = scales_from(row + rows);
      kernels().read_scales(from, count, scales);
      // those of the next rows, which would else hold up the stream of values
      for (int64_t i = 0; i < next - from; i += 64) __builtin_prefetch(next + i, 0, 2);
    }
  }
}

void StoredWeight::widen_bf16(int64_t expert, int64_t first, int64_t rows, int64_t stride,
                              AlignedVector<float>& scales, uint16_t* to) const {
  const cpu::Dots call = operand(expert, first, rows, scales);
  const auto widen = custom_pypto::kernels().bf16->widen[format_];
  for (int64_t r = 0; r < rows; ++r) widen(call, r, to + r * stride);
}

const cpu::WeightWays& StoredWeight::ways(at::ScalarType x) const {
  const cpu::WeightPolicy& policy = custom_pypto::kernels().ways;
  if (x == at::kBFloat16) return policy.bfloat16[format_];
  return x == at::kHalf ? policy.float16 : policy.float32;
}

const cpu::DotsKernels& StoredWeight::dots(bool x_in_bfloat16) const {
  const cpu::Kernels& set = custom_pypto::kernels();
  const cpu::Dots call = shape();
  for (const cpu::DotsTable table : {x_in_bfloat16 ? set.dots_of_bf16 : nullptr, set.dots[0]}) {
    if (table && table[format_].fits && table[format_].fits(call)) return table[format_];
  }
  return set.dots[1][format_];
}

cpu::StoredKernel StoredWeight::stored_kernel() const {
  const cpu::Bf16Kernels* tiles = custom_pypto::kernels().tiles;
  return tiles ? tiles->stored[format_] : nullptr;
}

const cpu::DotsKernels* StoredWeight::dots_of_int8() const {
  const cpu::DotsTable table = custom_pypto::kernels().dots_of_int8;
  return table && table[format_].fits && table[format_].fits(shape()) ? table + format_ : nullptr;
}

cpu::Dots StoredWeight::shape() const {
  cpu::Dots call = {};
  call.stride = row_stride_;
  call.depth = static_cast<int>(depth_);
  call.group = static_cast<int>(group_);
  call.groups = static_cast<int>(groups_);
  call.scale_stride = groups_;
  call.has_offsets = has_offsets();
  const cpu::Kernels& set = custom_pypto::kernels();
  call.most_in_turn = set.most_in_turn[format_];
  call.most_by_four = set.most_by_four;
  call.near = set.near;
  return call;
}

int64_t StoredWeight::rows_of_scales(int64_t row) const {
  if (is_bfloat16()) return rows_ - row;
  return facts().blocks ? block_ - row % block_ : 1;
}

int64_t StoredWeight::rows_of_call(int64_t first, int64_t rows) const {
  const int64_t shared = rows_of_scales(first);
  return std::min(rows, shared > 1 ? shared : std::max<int64_t>(kScalesInTurn / groups_, 1));
}

cpu::Dots StoredWeight::operand(int64_t expert, int64_t first, int64_t rows,
                                AlignedVector<float>& scales, bool stored_scales) const {
  cpu::Dots call = shape();
  call.weight = values_ + expert * expert_stride_ + first * row_stride_;
  call.n = static_cast<int>(rows);
  const int64_t row = expert * rows_ + first;
  if (stored_scales) {
    call.stored_scales = scales_from(row);
    return call;
  }
  const bool shared = rows <= rows_of_scales(first);
  if (shared) call.scale_stride = 0;
  const int64_t count = shared ? 1 : rows;
  scales.resize(count * groups_ * (has_offsets() ? 2 : 1) + kReadBehind);
  read_scales(row, count, scales.data());
  call.scales = scales.data();
  if (has_offsets()) call.offsets = scales.data() + count * groups_;
  return call;
}

}  // namespace custom_pypto

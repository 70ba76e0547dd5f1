// Converts tensors to operands of the kernels in cpu/: element types, widening, and query rows
// transposed into panels.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_set.h"

namespace custom_pypto {

// Per-thread buffer pool: the system's zeroing of fresh pages took a tenth of a decode step.
class BufferPool {
 public:
  static BufferPool& of_thread() {
    static thread_local BufferPool pool;
    return pool;
  }

  void* allocate(size_t bytes) {
    const auto same = [bytes](const Block& block) { return block.bytes == bytes; };
    const auto found = std::find_if(blocks_.begin(), blocks_.end(), same);
    if (found == blocks_.end()) return ::operator new(bytes, kLine);
    void* memory = found->memory.release();
    bytes_ -= bytes;
    blocks_.erase(found);
    return memory;
  }

  void deallocate(void* memory, size_t bytes) {
    blocks_.push_back(Block{.memory = std::unique_ptr<void, Delete>(memory), .bytes = bytes});
    bytes_ += bytes;
    while (bytes_ > kMost) {  // evict the oldest first
      bytes_ -= blocks_.front().bytes;
      blocks_.pop_front();
    }
  }

 private:
  static constexpr std::align_val_t kLine{64};
  static constexpr size_t kMost = size_t{16} << 20;
  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory, kLine); }
  };
  struct Block {
    std::unique_ptr<void, Delete> memory;
    size_t bytes;
  };
  std::deque<Block> blocks_;
  size_t bytes_ = 0;
};

// Aligns kernel buffers to cache lines, because an unaligned vector of 64 bytes costs two accesses.
// Leaves them uninitialised.
template <typename T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <typename U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(BufferPool::of_thread().allocate(n * sizeof(T))); }
  void deallocate(T* p, size_t n) { BufferPool::of_thread().deallocate(p, n * sizeof(T)); }
  template <typename U>
  void construct(U* p) {
    ::new (p) U;
  }
  template <typename U, typename... Args>
  void construct(U* p, Args&&... args) {
    ::new (p) U(std::forward<Args>(args)...);
  }
  bool operator==(const AlignedAllocator&) const { return true; }
  bool operator!=(const AlignedAllocator&) const { return false; }
};
template <typename T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

// Calls f(multiplied, stored) with a value of each element type. If there are kernels that multiply
// bfloat16, both are uint16_t; any other half precision is widened to float.
template <typename F>
void dispatch_elements(at::ScalarType dtype, const cpu::Bf16Kernels* bf16, const F& f) {
  if (dtype == at::kFloat) {
    f(float{}, float{});
  } else if (dtype == at::kHalf) {
    f(float{}, c10::Half{});
  } else if (bf16) {
    f(uint16_t{}, uint16_t{});
  } else {
    f(float{}, c10::BFloat16{});
  }
}

template <typename T>
void widen(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

template <typename T>
void narrow(const float* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<T>(from[i]);
}

// Rounds like c10::BFloat16 (to nearest, ties to even, NaN to 0x7FC0), but branch-free, so that the
// compiler vectorises it.
inline void narrow(const float* from, int64_t n, c10::BFloat16* to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    to[i].x = from[i] == from[i] ? nearest : 0x7FC0;
  }
}

// Total rows of all panels, padding included: full panels of 64, then one of 16, 32 or 64.
inline int64_t panel_rows(int64_t rows) {
  const int64_t rest = rows % cpu::kMaxWidth;
  return rows - rest + (rest ? cpu::panel_width(rest) : 0);
}

template <typename E>
int64_t panel_elements(int64_t rows, int64_t dims) {
  const int64_t steps = std::is_same_v<E, float>     ? dims
                        : std::is_same_v<E, uint8_t> ? 1 + dims / 4
                        : std::is_same_v<E, int8_t>  ? dims / 4
                                                     : dims / 2;
  return panel_rows(rows) * steps;
}

// Packs `rows` rows into a panel (cpu/kernels.h), padded with zeros. A row in two parts takes two
// calls.
template <typename T>
void pack_panel(const T* from, int64_t row_stride, int64_t rows, int64_t width, int64_t dims,
                float* panel) {
  for (int64_t r = 0; r < width; ++r) {
    for (int64_t d = 0; d < dims; ++d) {
      panel[d * width + r] = r < rows ? static_cast<float>(from[r * row_stride + d]) : 0.0f;
    }
  }
}

inline void pack_panel(const uint16_t* from, int64_t row_stride, int64_t rows, int64_t width,
                       int64_t dims, uint32_t* panel) {
  kernels().bf16->pack_panel(from, row_stride, rows, width, dims, panel);
}

// A panel of int8 rows as pairs of int16.
inline void pack_pairs(const int8_t* from, int64_t rows, int64_t width, int64_t dims,
                       uint32_t* panel) {
  std::fill_n(panel, dims / 2 * width, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < dims; d += 2) {
      const int16_t pair[] = {from[r * dims + d], from[r * dims + d + 1]};
      std::memcpy(&panel[d / 2 * width + r], pair, 4);
    }
  }
}

// A panel of int8 rows as quads.
inline void pack_quads(const int8_t* from, int64_t rows, int64_t width, int64_t dims,
                       uint32_t* panel) {
  std::fill_n(panel, dims / 4 * width, 0);
  for (int64_t r = 0; r < rows; ++r) {
    const int8_t* row = from + r * dims;
    for (int64_t d = 0; d < dims; d += 4) std::memcpy(&panel[d / 4 * width + r], row + d, 4);
  }
}

// The first values of the sums of rows that meet keys plus 128.
inline void pack_first_sums(const int8_t* from, int64_t rows, int64_t width, int64_t dims,
                            uint32_t* sums) {
  for (int64_t r = 0; r < width; ++r) {
    int32_t sum = 0;
    for (int64_t d = 0; r < rows && d < dims; ++d) sum += from[r * dims + d];
    sums[r] = -128 * sum;
  }
}

// Packs all rows of a token, which are contiguous, into consecutive panels.
template <typename E, typename T>
void pack_panels(const T* from, int64_t rows, int64_t dims, cpu::PanelElement<E>* panels) {
  for (int64_t r = 0; r < rows; r += cpu::kMaxWidth) {
    const int64_t width = cpu::panel_width(std::min<int64_t>(rows - r, cpu::kMaxWidth));
    const int64_t count = std::min(rows - r, width);
    if constexpr (std::is_same_v<E, int16_t>) {
      pack_pairs(from + r * dims, count, width, dims, panels);
    } else if constexpr (std::is_same_v<E, uint8_t>) {
      pack_first_sums(from + r * dims, count, width, dims, panels);
      pack_quads(from + r * dims, count, width, dims, panels + width);
    } else if constexpr (std::is_same_v<E, int8_t>) {
      pack_quads(from + r * dims, count, width, dims, panels);
    } else {
      pack_panel(from + r * dims, dims, count, width, dims, panels);
    }
    panels += panel_elements<E>(width, dims);
  }
}

}  // namespace custom_pypto

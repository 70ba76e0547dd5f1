// Writes rows of a paged cache.
#pragma once

#include <cstdint>
#include <cstring>

#include "sequences.h"

namespace custom_pypto {

// Writes rows of a paged cache by their slots, block * block_size + row.
class CacheSlots : Rows {
 public:
  explicit CacheSlots(const Tensor& cache)
      : Rows(cache),
        data_(static_cast<char*>(cache.mutable_data_ptr())),
        block_size_(cache.size(1)),
        slots_(cache.size(0) * block_size_),
        element_size_(cache.element_size()) {}

  // null if the slot is outside the cache (-1: padding)
  void* row(int64_t slot) const {
    if (slot < 0 || slot >= slots_) return nullptr;
    return data_ +
           (slot / block_size_ * block_stride + slot % block_size_ * stride) * element_size_;
  }

 private:
  char* data_;
  int64_t block_size_, slots_, element_size_;
};

// Calls write(i, row) for each slots[i] within the cache, in order: of two rows for one slot the
// later one stays.
template <typename Write>
void for_each_slot(const Tensor& slots, const Tensor& cache, const Write& write) {
  const Tensor indices = slots.to(at::kLong).contiguous();
  const int64_t* slot = indices.const_data_ptr<int64_t>();
  const CacheSlots rows(cache);
  for (int64_t i = 0; i < indices.numel(); ++i) {
    if (void* row = rows.row(slot[i])) write(i, row);
  }
}

// cache[slots[i]] = rows[i]; slots outside the cache (-1: padding) are not written
inline void write_cache(const Tensor& cache, const Tensor& rows, const Tensor& slots) {
  const Tensor source = rows.contiguous();
  const char* from = static_cast<const char*>(source.const_data_ptr());
  const int64_t bytes = cache.size(3) * cache.element_size();
  for_each_slot(slots, cache,
                [&](int64_t i, void* row) { std::memcpy(row, from + i * bytes, bytes); });
}

}  // namespace custom_pypto

// Collects the cache rows that sparse attention reads into chunks.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "int8_rows.h"
#include "panels.h"
#include "params.h"
#include "sequences.h"

namespace custom_pypto {

template <typename T>
struct LatentCaches {
  explicit LatentCaches(const AttentionParams& p)
      : keys(p.key),
        values(p.value ? *p.value : p.key),
        own_values(p.value && (p.value->const_data_ptr() != p.key.const_data_ptr() ||
                               p.value->strides() != p.key.strides())),
        latent(p.query.size(-1)),
        rope(p.query_rope ? p.query_rope->size(-1) : 0) {
    if (p.key_rope) key_ropes.emplace(*p.key_rope);
    if (p.key.scalar_type() == at::kChar) quantised.emplace(p.key);
  }
  Cache<T> keys, values;
  std::optional<Cache<int8_t>> quantised;  // rows of nope, rope and scales, instead of the others
  std::optional<Cache<T>> key_ropes;
  bool own_values;  // values are not the keys
  int64_t latent, rope;
};

// Tells whether all elements are finite: Inf and NaN have all exponent bits set.
template <typename T>
bool finite(const T* row, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr Bits kExponent = std::is_same_v<T, float>       ? 0x7F800000
                             : std::is_same_v<T, c10::Half> ? 0x7C00
                                                            : 0x7F80;
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, row + i, sizeof(T));
    bad |= (bits & kExponent) == kExponent;
  }
  return !bad;
}

// Double buffering: once the next chunk is full, the kernels process the current one and prefetch
// the rows of the next. E is the compute type, T the storage type.
template <typename E, typename T>
class KeyChunks {
 public:
  static constexpr int kKeys = cpu::kAttendKeys<E>;

  // `bf16`: null unless E is uint16_t
  KeyChunks(const LatentCaches<T>& caches, const cpu::Bf16Kernels* bf16)
      : caches_(caches),
        bf16_(bf16),
        unpacked_(caches.quantised ? kKeys * (caches.latent + caches.rope) : 0),
        buffers_{Buffer(*this), Buffer(*this)} {}
  KeyChunks(const KeyChunks&) = delete;  // it points into itself

  void clear() { chunk_->chunk.n = next_->chunk.n = 0; }
  int count() const { return chunk_->chunk.n; }
  int64_t position(int j) const { return chunk_->position[j]; }  // in the sequence

  // Appends a key to the next chunk, widened if needed; returns whether that chunk is full.
  bool add(const KeyMap::Slot& slot, int64_t position) {
    cpu::Chunk<E>& chunk = next_->chunk;
    const int j = chunk.n++;
    next_->position[j] = position;
    const bool own_values = caches_.own_values;
    const int64_t latent = caches_.latent, rope = caches_.rope;
    if (caches_.quantised) {
      const int8_t* row = caches_.quantised->row(slot);
      next_->packed.keys[j] = reinterpret_cast<const E*>(row);
      // as below; and kernels of float prefetch nothing
      if (count() == 0 || std::is_same_v<E, float>) fetch(row, quantised_row_bytes(latent, rope));
    } else if constexpr (std::is_same_v<E, T>) {
      chunk.keys[j] = caches_.keys.row(slot);
      chunk.values[j] = own_values ? caches_.values.row(slot) : chunk.keys[j];
      if (rope) chunk.ropes[j] = caches_.key_ropes->row(slot);
      if (count() == 0) {  // first chunk: no kernel is running to prefetch it
        fetch(chunk.keys[j], latent);
        if (own_values) fetch(chunk.values[j], latent);
        if (rope) fetch(chunk.ropes[j], rope);
      }
    } else {
      E* to = next_->widened.data() + j * (2 * latent + rope);
      widen(caches_.keys.row(slot), latent, to);
      chunk.keys[j] = chunk.values[j] = to;
      if (own_values) {
        widen(caches_.values.row(slot), latent, to + latent);
        chunk.values[j] = to + latent;
      }
      if (rope) {
        widen(caches_.key_ropes->row(slot), rope, to + 2 * latent);
        chunk.ropes[j] = to + 2 * latent;
      }
    }
    return chunk.n == (count() ? kKeys : kFirstKeys);
  }

  const cpu::Chunk<E>& current() {
    cpu::Chunk<E>& chunk = chunk_->chunk;
    chunk.next = std::is_same_v<E, T> && next_->chunk.n ? &next_->chunk : nullptr;
    if (!caches_.quantised) return chunk;
    const int64_t latent = caches_.latent, rope = caches_.rope;
    for (int j = 0; j < chunk.n; ++j) {
      E* to = unpacked_.data() + j * (latent + rope);
      dequantise(reinterpret_cast<const int8_t*>(chunk_->packed.keys[j]), to);
      chunk.keys[j] = chunk.values[j] = to;
      chunk.ropes[j] = to + latent;
    }
    next_->packed.n = next_->chunk.n;
    if (chunk.next) chunk.next = &next_->packed;
    return chunk;
  }

  // Tells whether all elements of the slot's values are finite.
  bool finite_values(const KeyMap::Slot& slot) {
    const int64_t latent = caches_.latent;
    if (!caches_.quantised) return finite(caches_.values.row(slot), latent);
    dequantise(caches_.quantised->row(slot), unpacked_.data());
    return finite(unpacked_.data(), latent);
  }

  // Makes the next chunk the current one.
  void advance() {
    std::swap(chunk_, next_);
    next_->chunk.n = 0;
  }

 private:
  // The first chunk is short because nothing hides its loads.
  static constexpr int kFirstKeys = kKeys / 4;

  struct Buffer {
    explicit Buffer(KeyChunks& chunks)
        : widened(kKeys * chunks.widened_elements()), position(kKeys) {
      chunk.latent = chunks.caches_.latent;
      chunk.rope = chunks.caches_.rope;
      packed.latent = quantised_row_bytes(chunks.caches_.latent, chunks.caches_.rope) / sizeof(E);
      packed.rope = 0;
    }
    cpu::Chunk<E> chunk;
    cpu::Chunk<E> packed;  // quantised: the same rows as they are in the cache, to prefetch
    AlignedVector<E> widened;
    std::vector<int64_t> position;
  };

  // of a row in Buffer::widened
  int64_t widened_elements() const {
    return std::is_same_v<E, T> || caches_.quantised ? 0 : 2 * caches_.latent + caches_.rope;
  }

  void dequantise(const int8_t* row, E* to) const {
    dequantise_row<E, T>(row, caches_.latent, caches_.rope, bf16_, to);
  }

  // Prefetches a row.
  template <typename Element>
  static void fetch(const Element* row, int64_t dims) {
    constexpr int64_t kLine = 64 / sizeof(Element);
    for (int64_t d = 0; d < dims; d += kLine) __builtin_prefetch(row + d, 0, 2);
  }

  const LatentCaches<T>& caches_;
  const cpu::Bf16Kernels* bf16_;
  AlignedVector<E> unpacked_;  // quantised: rows of the current chunk
  Buffer buffers_[2];
  Buffer *chunk_ = &buffers_[0], *next_ = &buffers_[1];
};

}  // namespace custom_pypto

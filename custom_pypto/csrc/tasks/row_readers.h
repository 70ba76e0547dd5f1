// The formats of the rows that sparse attention reads, each with a row reader. The tasks take a
// reader as template argument, so a further format is a further struct here and one more
// instantiation in attention.cpp. Members of a reader:
//   kReads                     whether the format exists for these element types
//   kInPlace                   kernels read the rows in the cache, nothing is unpacked
//   Reader(params, bf16)       bf16: null unless E is uint16_t
//   latent, rope               dims of a key
//   stored_chunk()             an empty chunk, with the sizes that its rows have in the cache
//   locate(slot, j, stored)    makes the slot's row key j of a stored chunk
//   fetch(stored, j)           prefetches key j
//   unpacked_elements()        of an unpacked key; 0: kInPlace
//   unpack(stored, j, to, chunk)  writes key j to `to`, and makes it key j of a chunk for kernels
//   finite_values(slot, buffer)   whether all values are finite; `buffer` holds an unpacked key
// E is the compute type, T the storage type of the query and of what is not quantized. A stored
// chunk has pointers to E whatever the cache holds: kernels only prefetch its rows, unless
// kInPlace.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

#include "int8_rows.h"
#include "panels.h"
#include "params.h"
#include "sequences.h"

namespace custom_pypto {

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

inline void fetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const char*>(row) + i, 0, 2);
  }
}

template <typename E>
cpu::Chunk<E> empty_chunk(int64_t latent, int64_t rope) {
  cpu::Chunk<E> chunk;
  chunk.n = 0;
  chunk.latent = static_cast<int>(latent);
  chunk.rope = static_cast<int>(rope);
  chunk.next = nullptr;
  return chunk;
}

// Rows of the query's dtype: latent dims as keys, also as values unless there are others, and RoPE
// dims, if any, in a cache of their own.
template <typename E, typename T>
struct ModelRows {
  static constexpr bool kReads = true;
  static constexpr bool kInPlace = std::is_same_v<E, T>;

  ModelRows(const AttentionParams& p, const cpu::Bf16Kernels*)
      : latent(p.sequences.query.size(-1)),
        rope(p.query_rope ? p.query_rope->size(-1) : 0),
        keys(p.sequences.key),
        values(p.value ? *p.value : p.sequences.key),
        own_values(p.value && (p.value->const_data_ptr() != p.sequences.key.const_data_ptr() ||
                               p.value->strides() != p.sequences.key.strides())) {
    if (p.key_rope) key_ropes.emplace(*p.key_rope);
  }

  cpu::Chunk<E> stored_chunk() const { return empty_chunk<E>(latent, rope); }

  void locate(const KeyMap::Slot& slot, int j, cpu::Chunk<E>& stored) const {
    stored.keys[j] = reinterpret_cast<const E*>(keys.row(slot));
    stored.values[j] = own_values ? reinterpret_cast<const E*>(values.row(slot)) : stored.keys[j];
    if (rope) stored.ropes[j] = reinterpret_cast<const E*>(key_ropes->row(slot));
  }

  void fetch(const cpu::Chunk<E>& stored, int j) const {
    fetch_row(stored.keys[j], latent * sizeof(T));
    if (own_values) fetch_row(stored.values[j], latent * sizeof(T));
    if (rope) fetch_row(stored.ropes[j], rope * sizeof(T));
  }

  int64_t unpacked_elements() const { return kInPlace ? 0 : (own_values ? 2 : 1) * latent + rope; }

  void unpack(const cpu::Chunk<E>& stored, int j, E* to, cpu::Chunk<E>& chunk) const {
    const auto widened = [&to](const E* from, int64_t dims) {
      widen(reinterpret_cast<const T*>(from), dims, to);
      to += dims;
      return to - dims;
    };
    chunk.keys[j] = widened(stored.keys[j], latent);
    chunk.values[j] = own_values ? widened(stored.values[j], latent) : chunk.keys[j];
    if (rope) chunk.ropes[j] = widened(stored.ropes[j], rope);
  }

  bool finite_values(const KeyMap::Slot& slot, E*) const {
    return finite(values.row(slot), latent);
  }

  int64_t latent, rope;
  Cache<T> keys, values;
  std::optional<Cache<T>> key_ropes;
  bool own_values;  // values are not the keys
};

// Rows of int8_rows.h. The query has RoPE dims, key_rope is None.
template <typename E, typename T>
struct Int8Rows {
  static constexpr bool kReads = sizeof(T) == 2;
  static constexpr bool kInPlace = false;

  Int8Rows(const AttentionParams& p, const cpu::Bf16Kernels* kernels)
      : latent(p.sequences.query.size(-1)),
        rope(p.query_rope->size(-1)),
        layout{.latent = latent, .rope = rope},
        bf16(kernels),
        rows(p.sequences.key) {}

  cpu::Chunk<E> stored_chunk() const { return empty_chunk<E>(layout.bytes() / sizeof(E), 0); }

  void locate(const KeyMap::Slot& slot, int j, cpu::Chunk<E>& stored) const {
    stored.keys[j] = reinterpret_cast<const E*>(rows.row(slot));
  }

  void fetch(const cpu::Chunk<E>& stored, int j) const {
    fetch_row(stored.keys[j], layout.bytes());
  }

  int64_t unpacked_elements() const { return latent + rope; }

  void unpack(const cpu::Chunk<E>& stored, int j, E* to, cpu::Chunk<E>& chunk) const {
    dequantize_row<E, T>(reinterpret_cast<const int8_t*>(stored.keys[j]), layout, bf16, to);
    chunk.keys[j] = chunk.values[j] = to;
    chunk.ropes[j] = to + latent;
  }

  bool finite_values(const KeyMap::Slot& slot, E* buffer) const {
    dequantize_row<E, T>(rows.row(slot), layout, bf16, buffer);
    return finite(buffer, latent);
  }

  int64_t latent, rope;
  Int8RowLayout<int64_t> layout;
  const cpu::Bf16Kernels* bf16;
  Cache<int8_t> rows;
};

}  // namespace custom_pypto

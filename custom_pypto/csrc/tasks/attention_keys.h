// Collects the cache rows that sparse attention reads into chunks.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "panels.h"
#include "sequences.h"

namespace custom_pypto {

// Double buffering: once the next chunk is full, the kernels process the current one and prefetch
// the rows of the next. E is the compute type, Reader one of row_readers.h.
template <typename E, typename Reader>
class KeyChunks {
 public:
  static constexpr int kKeys = cpu::kAttendKeys<E>;

  explicit KeyChunks(const Reader& reader)
      : reader_(reader),
        unpacked_chunk_(reader.stored_chunk()),
        unpacked_(kKeys * reader.unpacked_elements()),
        buffers_{Buffer(reader), Buffer(reader)} {
    unpacked_chunk_.latent = static_cast<int>(reader.latent);
    unpacked_chunk_.rope = static_cast<int>(reader.rope);
  }
  KeyChunks(const KeyChunks&) = delete;  // it points into itself

  void clear() { chunk_->stored.n = next_->stored.n = 0; }
  int count() const { return chunk_->stored.n; }
  int64_t position(int j) const { return chunk_->position[j]; }  // in the sequence

  // Appends a key to the next chunk; returns whether that chunk is full.
  bool add(const KeyMap::Slot& slot, int64_t position) {
    cpu::Chunk<E>& stored = next_->stored;
    const int j = stored.n++;
    next_->position[j] = position;
    reader_.locate(slot, j, stored);
    // Fetch it here, ahead of use: in the first chunk no kernel runs that would prefetch it, and
    // the kernels of float never prefetch, though unpacking a row would wait for memory.
    if (count() == 0 || (!kKernelsPrefetch && !Reader::kInPlace)) reader_.fetch(stored, j);
    return stored.n == (count() ? kKeys : kFirstKeys);
  }

  const cpu::Chunk<E>& current() {
    cpu::Chunk<E>& stored = chunk_->stored;
    cpu::Chunk<E>& chunk = Reader::kInPlace ? stored : unpacked_chunk_;
    if constexpr (!Reader::kInPlace) {
      chunk.n = stored.n;
      for (int j = 0; j < stored.n; ++j) {
        reader_.unpack(stored, j, unpacked_.data() + j * reader_.unpacked_elements(), chunk);
      }
    }
    chunk.next = kKernelsPrefetch && next_->stored.n ? &next_->stored : nullptr;
    return chunk;
  }

  // Tells whether all elements of the slot's values are finite.
  bool finite_values(const KeyMap::Slot& slot) {
    return reader_.finite_values(slot, unpacked_.data());
  }

  // Makes the next chunk the current one.
  void advance() {
    std::swap(chunk_, next_);
    next_->stored.n = 0;
  }

 private:
  static constexpr bool kKernelsPrefetch = !std::is_same_v<E, float>;
  // The first chunk is short because nothing hides its loads.
  static constexpr int kFirstKeys = kKeys / 4;

  struct Buffer {
    explicit Buffer(const Reader& reader) : stored(reader.stored_chunk()), position(kKeys) {}
    cpu::Chunk<E> stored;  // rows in the cache
    std::vector<int64_t> position;
  };

  const Reader& reader_;
  cpu::Chunk<E> unpacked_chunk_;  // the current chunk, unless kInPlace
  AlignedVector<E> unpacked_;     // its keys
  Buffer buffers_[2];
  Buffer *chunk_ = &buffers_[0], *next_ = &buffers_[1];
};

}  // namespace custom_pypto

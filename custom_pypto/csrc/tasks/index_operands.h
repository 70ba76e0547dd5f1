// Query tokens and keys of an indexer as operands of the kernels in cpu/.
#pragma once

#include <type_traits>
#include <utility>

#include "panels.h"
#include "sequences.h"

namespace custom_pypto {

// E is the compute type, T the storage type. Operands of Indexer (index_tasks.h).
template <typename E, typename T>
class IndexOperands {
 public:
  // weights: float32, those of a token contiguous
  IndexOperands(const Tensor& query, const Tensor& key, const Tensor& weights,
                const cpu::Bf16Kernels* bf16 = nullptr)
      : bf16_(std::is_same_v<E, uint16_t> ? bf16 : nullptr),
        query_(query.contiguous()),
        weights_(weights),
        keys_(key),
        heads_(query.size(-2)),
        dims_(query.size(-1)) {}

  struct Scratch {
    Scratch(const IndexOperands& op, int64_t tokens)
        : tiles(op.bf16_),
          panels(tokens * panel_elements<E>(op.heads_, op.dims_)),
          weights(tokens * panel_rows(op.heads_)),
          converted(kInPlace ? 0 : cpu::kMaxKeys * op.dims_) {}
    TileRegisters tiles;
    AlignedVector<cpu::PanelElement<E>> panels;
    AlignedVector<float> weights;
    AlignedVector<E> converted;
    const E *keys, *ahead;  // ahead: to prefetch, or null
    int64_t stride;
  };

  void pack(int64_t token, int64_t place, Scratch& scratch) const {
    const int64_t rows = panel_rows(heads_);
    pack_panels<E>(static_cast<const T*>(query_.const_data_ptr()) + token * heads_ * dims_, heads_,
                   dims_, scratch.panels.data() + place * panel_elements<E>(heads_, dims_));
    float* w = scratch.weights.data() + place * rows;
    std::copy_n(weights_.const_data_ptr<float>() + token * heads_, heads_, w);
    std::fill(w + heads_, w + rows, 0.0f);
  }

  void read(const KeyMap::Slot& slot, int n, const KeyMap::Slot* next, Scratch& scratch) const {
    const T* keys = keys_.row(slot);
    if constexpr (kInPlace) {
      scratch.keys = keys;
      scratch.stride = keys_.stride;
    } else {
      E* to = scratch.converted.data();
      if constexpr (std::is_same_v<E, float>) {
        for (int j = 0; j < n; ++j) widen(keys + j * keys_.stride, dims_, to + j * dims_);
      } else {
        kernels().int8->shift(keys, keys_.stride, n, dims_, to);
      }
      scratch.keys = to;
      scratch.stride = dims_;
    }
    scratch.ahead = nullptr;
    // not if keys are widened: that takes longer than to read them
    if constexpr (sizeof(E) == sizeof(T)) {
      if (next) scratch.ahead = reinterpret_cast<const E*>(keys_.row(*next));
    }
  }

  void score(int64_t place, int n, Scratch& scratch, float* scores) const {
    const int64_t rows = panel_rows(heads_);
    const cpu::IndexCall<E> call{scratch.panels.data() + place * panel_elements<E>(heads_, dims_),
                                 scratch.weights.data() + place * rows,
                                 static_cast<int>(heads_),
                                 static_cast<int>(rows),
                                 static_cast<int>(dims_),
                                 scratch.keys,
                                 scratch.stride,
                                 n,
                                 place == 0 ? scratch.ahead : nullptr,
                                 keys_.stride,
                                 scores};
    if constexpr (std::is_same_v<E, float>) {
      kernels().index(call);
    } else if constexpr (std::is_same_v<E, uint16_t>) {
      bf16_->index(call);
    } else {
      kernels().int8->index(call);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<E, T>;  // the kernels read keys from the cache

  const cpu::Bf16Kernels* bf16_;
  Tensor query_, weights_;
  Cache<T> keys_;
  int64_t heads_, dims_;
};

}  // namespace custom_pypto

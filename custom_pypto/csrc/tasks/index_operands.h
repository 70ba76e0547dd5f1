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
  IndexOperands(const SequenceParams& p, const Tensor& weights,
                const cpu::Bf16Kernels* halves = nullptr)
      : halves_(kTiled ? halves : nullptr),
        query_(p.query.contiguous()),
        weights_(weights),
        keys_(p.key),
        heads_(p.query.size(-2)),
        dims_(p.query.size(-1)) {}

  struct Scratch {
    Scratch(const IndexOperands& op, int64_t tokens)
        : tiles(op.halves_),
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
        int8_kernels<E>()->convert(keys, keys_.stride, n, dims_, to);
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
    const cpu::IndexCall<E> call{
        .panels = scratch.panels.data() + place * panel_elements<E>(heads_, dims_),
        .weights = scratch.weights.data() + place * rows,
        .heads = static_cast<int>(heads_),
        .rows = static_cast<int>(rows),
        .dims = static_cast<int>(dims_),
        .keys = scratch.keys,
        .key_stride = scratch.stride,
        .n = n,
        .ahead = place == 0 ? scratch.ahead : nullptr,
        .ahead_stride = keys_.stride,
        .scores = scores};
    if constexpr (std::is_same_v<E, float>) {
      kernels().index(call);
    } else if constexpr (std::is_same_v<E, uint16_t>) {
      halves_->index(call);
    } else if constexpr (std::is_same_v<E, int8_t>) {
      halves_->index_int8(call);
    } else {
      int8_kernels<E>()->index(call);
    }
  }

 private:
  static constexpr bool kTiled = std::is_same_v<E, uint16_t> || std::is_same_v<E, int8_t>;
  static constexpr bool kInPlace = std::is_same_v<E, T>;  // the kernels read keys from the cache

  const cpu::Bf16Kernels* halves_;
  Tensor query_, weights_;
  Cache<T> keys_;
  int64_t heads_, dims_;
};

// int8 operands whose scores are multiplied by the scales of their keys, of type S.
template <typename E, typename S>
class ScaledOperands : public IndexOperands<E, int8_t> {
  using Base = IndexOperands<E, int8_t>;

 public:
  ScaledOperands(const SequenceParams& p, const Tensor& weights, const Tensor& key_scale)
      : Base(p, weights, kernels().tiles),
        key_scales_(key_scale.unsqueeze(-1)),
        scales_(key_scales_) {}

  struct Scratch : Base::Scratch {
    using Base::Scratch::Scratch;
    float key_scales[cpu::kMaxKeys];
  };

  void read(const KeyMap::Slot& slot, int n, const KeyMap::Slot* next, Scratch& scratch) const {
    Base::read(slot, n, next, scratch);
    const S* scale = scales_.row(slot);
    for (int j = 0; j < n; ++j) scratch.key_scales[j] = scale[j * scales_.stride];
  }

  void score(int64_t place, int n, Scratch& scratch, float* scores) const {
    Base::score(place, n, scratch, scores);
    for (int j = 0; j < n; ++j) scores[j] *= scratch.key_scales[j];
  }

 private:
  Tensor key_scales_;
  Cache<S> scales_;
};

}  // namespace custom_pypto

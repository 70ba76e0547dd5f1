// Queries and keys, latent and RoPE dims in one row, for the passes of training.
#pragma once

#include <cmath>

#include "two_passes.h"

namespace custom_pypto {

// T is the storage type.
template <typename T>
class HeadRows {
 public:
  HeadRows(const Tensor& query, const Tensor& key, const OptionalTensor& query_rope = kNone,
           const OptionalTensor& key_rope = kNone)
      : heads(query.size(-2)),
        padded(panel_rows(heads)),
        latent(query.size(-1)),
        rope(query_rope ? query_rope->size(-1) : 0),
        width(latent + rope),
        query_(query.contiguous()),
        query_rope_(query_rope ? query_rope->contiguous() : Tensor()),
        key_(key),
        key_rope_(key_rope ? *key_rope : key) {}

  // of a token
  const T* query(const Token& token) const {
    return static_cast<const T*>(query_.const_data_ptr()) + token.row() * heads * latent;
  }
  const T* query_rope(const Token& token) const {
    return static_cast<const T*>(query_rope_.const_data_ptr()) + token.row() * heads * rope;
  }

  const T* key(const KeyMap::Slot& slot) const { return key_.row(slot); }
  const T* key_rope(const KeyMap::Slot& slot) const { return key_rope_.row(slot); }

  // [head][width] of a token
  void load_query(const Token& token, float* to) const {
    for (int64_t h = 0; h < heads; ++h) {
      widen(query(token) + h * latent, latent, to + h * width);
      if (rope) widen(query_rope(token) + h * rope, rope, to + h * width + latent);
    }
  }

  // [width] of a key
  void load_key(const KeyMap::Slot& slot, float* to) const {
    widen(key(slot), latent, to);
    if (rope) widen(key_rope(slot), rope, to + latent);
  }

  const int64_t heads, padded, latent, rope, width;

 private:
  Tensor query_, query_rope_;
  Cache<T> key_, key_rope_;
};

// Of attention, with the statistics of its softmax.
template <typename T>
class AttentionRows : public HeadRows<T> {
 public:
  AttentionRows(const Tensor& query, const Tensor& key, const OptionalTensor& query_rope,
                const OptionalTensor& key_rope, const Tensor& softmax_max,
                const Tensor& softmax_sum)
      : HeadRows<T>(query, key, query_rope, key_rope),
        max_(softmax_max.contiguous()),
        sum_(softmax_sum.contiguous()) {}

  // Of the first `count` heads of a token: maxima times log2(e), and inverses of sums; 0 for
  // padding
  void load_statistics(const Token& token, int64_t count, float* max, float* inverse) const {
    for (int64_t h = 0; h < count; ++h) {
      max[h] = h < this->heads ? maxima(token)[h] * static_cast<float>(M_LOG2E) : 0.0f;
      inverse[h] = h < this->heads ? 1.0f / sums(token)[h] : 0.0f;
    }
  }

  const float* maxima(const Token& token) const { return statistic(max_, token); }
  const float* sums(const Token& token) const { return statistic(sum_, token); }

 private:
  const float* statistic(const Tensor& tensor, const Token& token) const {
    return tensor.const_data_ptr<float>() + token.row() * this->heads;
  }

  Tensor max_, sum_;
};

}  // namespace custom_pypto

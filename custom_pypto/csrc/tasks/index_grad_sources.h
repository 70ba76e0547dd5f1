// Where the gradients of an indexer's scores come from: given ones, or the divergence from the
// attention whose keys the indexer selects.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "two_passes.h"

namespace custom_pypto {

constexpr int64_t kTileKeys = 1024;  // of a token that reads every key it sees, in tiles
// Tokens of a chunk in tiles. Their number does not depend on that of threads, since the tiles of a
// chunk run one after another.
constexpr int64_t kTiledTokens = 64;

// Pairs of a token, or those of one tile of its keys.
struct Scored : Pairs {
  float* d_query;              // [padded head][dims]
  float *weights, *d_weights;  // [padded heads]
  float* d_scores;             // [pair]
  double loss;
};

// Where the gradients of scores come from. A source has
//   tokens(floats)             tokens of a chunk, each of which takes so many floats
//   keys()                     the most keys of a token's tile
//   tiles(visible)             the number of tiles of a token that sees so many keys
//   each(token, visible, tile, f)   calls f(position, column) for the keys of a tile
//   Scratch(source)            buffers of a thread
//   kByPair                    whether the gradient of a score depends on no other score
//   gradients(token, scored, first, end, scores, d_scores, scratch)
//                              of these pairs, all of a tile unless kByPair; returns their loss

// The keys of a token are those that its indices name.
class Selected {
 public:
  explicit Selected(const Tensor& indices) : indices_(indices.contiguous()) {}
  int64_t tokens(int64_t floats) const { return chunk_of(floats); }
  int64_t keys() const { return indices_.size(-1); }
  int64_t tiles(int64_t) const { return 1; }
  template <typename F>
  void each(const Token& token, int64_t visible, int64_t, const F& f) const {
    const int32_t* row = indices_.const_data_ptr<int32_t>() + token.row() * keys();
    for_each_index(row, 0, keys(), visible, f);
  }

 private:
  Tensor indices_;
};

// A gradient for each index.
class Given : public Selected {
 public:
  Given(const Tensor& indices, const Tensor& d_values)
      : Selected(indices), d_values_(d_values.to(at::kFloat).contiguous()) {}
  struct Scratch {
    explicit Scratch(const Given&) {}
  };
  static constexpr bool kByPair = true;
  double gradients(const Token& token, const Scored& scored, int64_t first, int64_t end,
                   const float*, float* d_scores, Scratch&) const {
    const float* row = d_values_.const_data_ptr<float>() + token.row() * keys();
    for (int64_t j = first; j < end; ++j) d_scores[j] = row[scored.columns[j]];
    return 0;
  }

 private:
  Tensor d_values_;
};

// glibc has had another log of double since 2.29, which the wheel for 2.28 may not name
inline double natural_log(double x) {
  return static_cast<double>(std::log(static_cast<long double>(x)));
}

// The summand p log(p / q) of a divergence, given log q.
inline double divergence(float p, double log_q) { return p == 0 ? 0.0 : p * (std::log(p) - log_q); }

// The divergence over the indices: both distributions are of these keys alone.
template <typename Attention>
class SelectedKl : public Selected {
 public:
  explicit SelectedKl(const IndexKlParams& p) : Selected(*p.sparse_indices), attention_(p) {}
  struct Scratch {
    explicit Scratch(const SelectedKl& op) : attention(op.attention_), target(op.keys()) {}
    typename Attention::Scratch attention;
    Floats target;
  };
  static constexpr bool kByPair = false;
  double gradients(const Token& token, const Scored& scored, int64_t, int64_t n,
                   const float* scores, float* d_scores, Scratch& scratch) const {
    float* target = scratch.target.data();
    attention_.sums(token, scored, scratch.attention, target);
    double total = 0, sum = 0, loss = 0;
    for (int64_t j = 0; j < n; ++j) total += target[j];
    if (total == 0) {  // no probability in float32: nothing to learn
      std::fill_n(d_scores, n, 0.0f);
      return 0;
    }
    const float max = *std::max_element(scores, scores + n);
    for (int64_t j = 0; j < n; ++j) sum += d_scores[j] = std::exp(scores[j] - max);
    const double log_sum = natural_log(sum);
    for (int64_t j = 0; j < n; ++j) {
      const auto p = static_cast<float>(target[j] / total);
      loss += divergence(p, scores[j] - max - log_sum);
      d_scores[j] = static_cast<float>(d_scores[j] / sum) - p;
    }
    return loss;
  }

 private:
  const Attention attention_;
};

// The divergence over every key that a token sees, tile by tile.
template <typename Attention>
class VisibleKl {
 public:
  explicit VisibleKl(const IndexKlParams& p)
      : attention_(p),
        max_(p.softmax_max_index->contiguous()),
        sum_(p.softmax_sum_index->contiguous()) {}
  struct Scratch {
    explicit Scratch(const VisibleKl& op) : attention(op.attention_), target(kTileKeys) {}
    typename Attention::Scratch attention;
    Floats target;
  };
  int64_t tokens(int64_t) const { return kTiledTokens; }
  int64_t keys() const { return kTileKeys; }
  int64_t tiles(int64_t visible) const { return (visible + kTileKeys - 1) / kTileKeys; }
  template <typename F>
  void each(const Token&, int64_t visible, int64_t tile, const F& f) const {
    const int64_t end = std::min(visible, (tile + 1) * kTileKeys);
    for (int64_t j = tile * kTileKeys; j < end; ++j) f(j, j);
  }
  static constexpr bool kByPair = false;
  double gradients(const Token& token, const Scored& scored, int64_t, int64_t n,
                   const float* scores, float* d_scores, Scratch& scratch) const {
    float* target = scratch.target.data();
    attention_.sums(token, scored, scratch.attention, target);
    const float max = max_.const_data_ptr<float>()[token.row()];
    const float sum = sum_.const_data_ptr<float>()[token.row()];
    const double log_sum = natural_log(sum);
    double loss = 0;
    for (int64_t j = 0; j < n; ++j) {
      const float p = target[j] / attention_.heads();
      loss += divergence(p, scores[j] - max - log_sum);
      d_scores[j] = std::exp(scores[j] - max) / sum - p;
    }
    return loss;
  }

 private:
  const Attention attention_;
  Tensor max_, sum_;
};

}  // namespace custom_pypto

#include "index_grad.h"

#include <algorithm>
#include <vector>

#include "index_grad_sources.h"

namespace custom_pypto {
namespace {

constexpr int64_t kIndexBlock = 128;  // keys of a product

// T is the storage type.
template <typename T, typename Source>
class IndexBackward {
 public:
  IndexBackward(IndexGradParams& p, const Source& source)
      : p_(p),
        source_(source),
        query_(p.sequences.query.contiguous()),
        weights_(p.weights.to(at::kFloat).contiguous()),
        sequences_(read_sequences(p.sequences)),
        tokens_(tokens_of(sequences_)),
        key_map_(p.sequences),
        owners_(p.sequences.key),
        key_(p.sequences.key),
        heads_(query_.size(-2)),
        padded_(panel_rows(heads_)),
        dims_(query_.size(-1)),
        d_key_(p.d_key, dims_),
        d_weights_(p.d_weights, heads_) {}

  // Returns the loss.
  double run() {
    const int64_t floats = source_.keys() * padded_ + 2 * heads_ * dims_ + padded_;  // of a token
    const int64_t chunk = source_.tokens(floats), count = tokens_.size();
    std::vector<Scored> scored(std::min(chunk, count));
    // One thread allocates and frees, because malloc keeps a pool per thread.
    Floats memory(scored.size() * floats);
    for (size_t i = 0; i < scored.size(); ++i) {
      float* at = memory.data() + i * floats;
      scored[i].products = at;
      scored[i].query = at += source_.keys() * padded_;
      scored[i].d_query = at += heads_ * dims_;
      scored[i].d_weights = at += heads_ * dims_;
    }
    double loss = 0;
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t here = std::min(chunk, count - first);
      int64_t tiles = 0;
      for (int64_t i = 0; i < here; ++i) {
        tiles = std::max(tiles, source_.tiles(visible(tokens_[first + i])));
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        run_tasks(
            here, [&] { return Scratch(*this); },
            [&](Scratch& scratch, int64_t i) {
              const Token& token = tokens_[first + i];
              if (tile == 0) load(token, scored[i]);
              score(token, tile, scratch, scored[i]);
              if (tile == tiles - 1) write(token, scored[i]);
            });
        run_tasks(
            owners_.count, [] { return Owners::Operands(); },
            [&](Owners::Operands& operands, int64_t owner) {
              for (int64_t i = 0; i < here; ++i) add_rows(scored[i], owner, operands);
            });
      }
      for (int64_t i = 0; tiles > 0 && i < here; ++i) loss += scored[i].loss;
    }
    d_key_.finish(p_.d_key);
    d_weights_.finish(p_.d_weights);
    return loss;
  }

 private:
  struct Scratch {
    explicit Scratch(const IndexBackward& op)
        : source(op.source_),
          query(op.padded_ * op.dims_),
          keys(std::is_same_v<T, float> ? 0 : kIndexBlock * op.dims_),
          weights(op.padded_),
          scores(op.source_.keys()),
          d_scores(op.source_.keys()) {}
    typename Source::Scratch source;
    Floats query;  // panels
    Floats keys;   // of a block
    std::vector<const float*> rows;
    Floats weights, scores, d_scores;
  };

  int64_t visible(const Token& token) const {
    return token.sequence->visible(token.i, p_.sequences.sparse_mode);
  }

  void load(const Token& token, Scored& scored) const {
    const T* from = static_cast<const T*>(query_.const_data_ptr()) + token.row() * heads_ * dims_;
    widen(from, heads_ * dims_, scored.query);
    std::fill_n(scored.d_query, heads_ * dims_, 0.0f);
    std::fill_n(scored.d_weights, padded_, 0.0f);
    scored.loss = 0;
  }

  // Scores of the keys of a tile, and their gradients.
  void score(const Token& token, int64_t tile, Scratch& scratch, Scored& scored) const {
    scored.slots.clear();
    scored.columns.clear();
    source_.each(token, visible(token), tile, [&](int64_t position, int64_t column) {
      const KeyMap::Slot slot = key_map_.find(*token.sequence, position);
      if (!slot.exists) return;
      scored.slots.push_back(slot);
      scored.columns.push_back(column);
    });
    owners_.group(scored);
    const int64_t n = scored.slots.size();
    if (n == 0) return;
    pack_panels<float>(scored.query, heads_, dims_, scratch.query.data());
    std::fill_n(scratch.weights.data(), padded_, 0.0f);
    std::copy_n(weights_.const_data_ptr<float>() + token.row() * heads_, heads_,
                scratch.weights.data());
    const int64_t step = Source::kByPair ? kIndexBlock : n;
    for (int64_t first = 0; first < n; first += step) {
      const int64_t end = std::min(first + step, n);
      for (int64_t j = first; j < end; j += kIndexBlock) score_block(scored, j, scratch);
      scored.loss += source_.gradients(token, scored, first, end, scratch.scores.data(),
                                       scratch.d_scores.data(), scratch.source);
      for (int64_t j = first; j < end; j += kIndexBlock) {
        if (!Source::kByPair) load_keys(scored, j, scratch);
        add_block(scored, j, scratch);
      }
    }
  }

  void score_block(Scored& scored, int64_t first, Scratch& scratch) const {
    load_keys(scored, first, scratch);
    float* products = scored.products + first * padded_;
    std::fill_n(products, scratch.rows.size() * padded_, 0.0f);
    multiply_panels(scratch.rows, scratch.query.data(), dims_, padded_, products);
    kernels().index_scores({.products = products,
                            .n = static_cast<int>(scratch.rows.size()),
                            .heads = static_cast<int>(heads_),
                            .padded = static_cast<int>(padded_),
                            .weights = scratch.weights.data(),
                            .scores = scratch.scores.data() + first});
  }

  void add_block(Scored& scored, int64_t first, Scratch& scratch) const {
    float* products = scored.products + first * padded_;
    kernels().index_scores_grad({.products = products,
                                 .n = static_cast<int>(scratch.rows.size()),
                                 .heads = static_cast<int>(padded_),
                                 .weights = scratch.weights.data(),
                                 .d_scores = scratch.d_scores.data() + first,
                                 .d_weights = scored.d_weights});
    multiply_keys(products, padded_, scratch.rows, dims_, rows_to(scored.d_query, heads_, dims_));
  }

  // The keys of a block in float, in place if they are.
  void load_keys(const Scored& scored, int64_t first, Scratch& scratch) const {
    scratch.rows.resize(std::min<int64_t>(kIndexBlock, scored.slots.size() - first));
    for (size_t j = 0; j < scratch.rows.size(); ++j) {
      const T* row = key_.row(scored.slots[first + j]);
      if constexpr (std::is_same_v<T, float>) {
        scratch.rows[j] = row;
      } else {
        float* to = scratch.keys.data() + j * dims_;
        widen(row, dims_, to);
        scratch.rows[j] = to;
      }
    }
  }

  // Adds the token's pairs to the rows of this owner.
  void add_rows(const Scored& scored, int64_t owner, Owners::Operands& operands) const {
    if (scored.begin[owner] == scored.begin[owner + 1]) return;
    const auto rows = rows_of(scored.query, heads_, dims_);
    owners_.add(scored, owner, scored.products, padded_, rows, d_key_, operands);
  }

  // The gradients that end within the token.
  void write(const Token& token, const Scored& scored) const {
    T* to = static_cast<T*>(p_.d_query.mutable_data_ptr()) + token.row() * heads_ * dims_;
    narrow(scored.d_query, heads_ * dims_, to);
    std::copy_n(scored.d_weights, heads_, d_weights_.data + token.row() * heads_);
  }

  IndexGradParams& p_;
  const Source& source_;
  Tensor query_, weights_;
  std::vector<Sequence> sequences_;
  std::vector<Token> tokens_;
  KeyMap key_map_;
  Owners owners_;
  Cache<T> key_;
  int64_t heads_, padded_, dims_;
  Sums d_key_, d_weights_;
};

// Zeros the gradients, then calls f(value of the storage type) unless there is nothing to add.
template <typename F>
void with_zeros(IndexGradParams& p, const F& f) {
  for (const Tensor& gradient : {p.d_query, p.d_key, p.d_weights}) gradient.zero_();
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.d_query.numel() == 0 || p.d_key.numel() == 0) return;
  dispatch_elements(p.d_query.scalar_type(), nullptr, [&](auto, auto stored) {
    if constexpr (!std::is_same_v<decltype(stored), uint16_t>) f(stored);
  });
}

}  // namespace

void index_backward(IndexGradParams& p, const Tensor& sparse_indices, const Tensor& d_values) {
  with_zeros(p, [&](auto stored) {
    const Given source(sparse_indices, d_values);
    IndexBackward<decltype(stored), Given>(p, source).run();
  });
}

void index_kl_backward(IndexKlParams& p) {
  p.loss.zero_();
  with_zeros(p.index, [&](auto stored) {
    const auto run = [&](const auto& source) {
      using Source = std::decay_t<decltype(source)>;
      p.loss.fill_(IndexBackward<decltype(stored), Source>(p.index, source).run());
    };
    if (p.sparse_indices) {
      run(SelectedKl<decltype(stored)>(p));
    } else {
      run(VisibleKl<decltype(stored)>(p));
    }
  });
}

}  // namespace custom_pypto

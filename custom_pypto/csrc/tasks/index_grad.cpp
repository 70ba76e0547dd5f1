#include "index_grad.h"

#include <algorithm>
#include <vector>

#include "index_grad_products.h"
#include "index_grad_sources.h"

namespace custom_pypto {
namespace {

// Products multiplies (index_grad_products.h), Source has the gradients of scores
// (index_grad_sources.h).
template <typename Products, typename Source>
class IndexBackward {
 public:
  IndexBackward(IndexGradParams& p, const Source& source)
      : p_(p),
        source_(source),
        products_(p, source),
        rows_(products_.rows),
        weights_(p.weights.to(at::kFloat).contiguous()),
        sequences_(read_sequences(p.sequences)),
        tokens_(tokens_of(sequences_)),
        key_map_(p.sequences),
        owners_(p.sequences.key),
        d_key_(p.d_key, rows_.width),
        d_weights_(p.d_weights, rows_.heads) {}

  // Returns the loss.
  double run() {
    const int64_t floats = products_.floats();  // of a token
    const int64_t chunk = source_.tokens(floats), count = tokens_.size();
    std::vector<Operands> pairs(std::min(chunk, count));
    // One thread allocates and frees, because malloc keeps a pool per thread.
    Floats memory(pairs.size() * floats);
    for (size_t i = 0; i < pairs.size(); ++i) products_.place(memory.data() + i * floats, pairs[i]);
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
              if (tile == 0) start(token, pairs[i]);
              score(token, tile, scratch, pairs[i]);
              if (tile == tiles - 1) write(token, pairs[i]);
            });
        run_tasks(
            owners_.count, [&] { return typename Products::Adder(products_); },
            [&](typename Products::Adder& adder, int64_t owner) {
              for (int64_t i = 0; i < here; ++i) {
                if (pairs[i].begin[owner] == pairs[i].begin[owner + 1]) continue;
                products_.add_rows(pairs[i], owners_, owner, d_key_, adder);
              }
            });
      }
      for (int64_t i = 0; tiles > 0 && i < here; ++i) loss += pairs[i].loss;
    }
    d_key_.finish(p_.d_key);
    d_weights_.finish(p_.d_weights);
    return loss;
  }

 private:
  using T = typename Products::Stored;
  using Operands = typename Products::Operands;

  struct Scratch {
    explicit Scratch(const IndexBackward& op)
        : products(op.products_), source(op.source_), scores(op.source_.keys()) {}
    typename Products::Scratch products;
    typename Source::Scratch source;
    Floats scores;
  };

  int64_t visible(const Token& token) const {
    return token.sequence->visible(token.i, p_.sequences.sparse_mode);
  }

  void start(const Token& token, Operands& pairs) const {
    products_.load(token, pairs);
    const int64_t heads = rows_.heads;
    std::copy_n(weights_.const_data_ptr<float>() + token.row() * heads, heads, pairs.weights);
    std::fill(pairs.weights + heads, pairs.weights + products_.padded, 0.0f);
    std::fill_n(pairs.d_weights, products_.padded, 0.0f);
    pairs.loss = 0;
  }

  // Scores of the keys of a tile, and their gradients.
  void score(const Token& token, int64_t tile, Scratch& scratch, Operands& pairs) const {
    owners_.template fill<Products::kByOwner>(pairs, [&](const auto& f) {
      source_.each(token, visible(token), tile, [&](int64_t position, int64_t column) {
        const KeyMap::Slot slot = key_map_.find(*token.sequence, position);
        if (slot.exists) f(slot, column);
      });
    });
    const int64_t n = pairs.slots.size();
    if (n == 0) return;
    products_.start(token, pairs, scratch.products);
    const auto gradients = [&](int64_t first, int64_t count) {
      pairs.loss += source_.gradients(token, pairs, first, first + count, scratch.scores.data(),
                                      pairs.d_scores, scratch.source);
    };
    if constexpr (Source::kByPair) {
      products_.multiply_and_add(pairs, scratch.products, gradients);
    } else {
      products_.multiply(pairs, scratch.products,
                         [&](int64_t first, int64_t count, const float* products) {
                           kernels().index_scores({.products = products,
                                                   .n = static_cast<int>(count),
                                                   .heads = static_cast<int>(rows_.heads),
                                                   .padded = static_cast<int>(products_.padded),
                                                   .weights = pairs.weights,
                                                   .scores = scratch.scores.data() + first});
                         });
      gradients(0, n);
      products_.add(pairs, scratch.products);
    }
  }

  // The gradients that end within the token.
  void write(const Token& token, const Operands& pairs) const {
    const int64_t heads = rows_.heads, dims = rows_.width;
    T* to = static_cast<T*>(p_.d_query.mutable_data_ptr()) + token.row() * heads * dims;
    narrow(pairs.d_query, heads * dims, to);
    std::copy_n(pairs.d_weights, heads, d_weights_.data + token.row() * heads);
  }

  IndexGradParams& p_;
  const Source& source_;
  Products products_;
  const HeadRows<T>& rows_;
  Tensor weights_;
  std::vector<Sequence> sequences_;
  std::vector<Token> tokens_;
  KeyMap key_map_;
  Owners owners_;
  Sums d_key_, d_weights_;
};

template <typename P>
struct Of {
  using Products = P;
};

// Zeros d_query, then calls f(Of<the products of the element type>), or if there is nothing to add
// zeros all gradients.
template <typename F>
void with_zeros(IndexGradParams& p, const F& f) {
  p.d_query.zero_();
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.d_query.numel() == 0 || p.d_key.numel() == 0) {
    p.d_key.zero_();
    p.d_weights.zero_();
    return;
  }
  const cpu::Bf16Kernels* bf16 = index_kernels(p.d_query.size(-1));
  dispatch_elements(p.d_query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    if constexpr (std::is_same_v<decltype(multiplied), uint16_t>) {
      f(Of<Bf16IndexProducts>());
    } else {
      f(Of<WidenedIndexProducts<decltype(stored)>>());
    }
  });
}

}  // namespace

void index_backward(IndexGradParams& p, const Tensor& sparse_indices, const Tensor& d_values) {
  with_zeros(p, [&](auto of) {
    const Given source(sparse_indices, d_values);
    IndexBackward<typename decltype(of)::Products, Given>(p, source).run();
  });
}

void index_kl_backward(IndexKlParams& p) {
  p.loss.zero_();
  with_zeros(p.index, [&](auto of) {
    using Products = typename decltype(of)::Products;
    const auto run = [&](const auto& source) {
      using Source = std::decay_t<decltype(source)>;
      p.loss.fill_(IndexBackward<Products, Source>(p.index, source).run());
    };
    if (p.sparse_indices) {
      run(SelectedKl<Attention<typename Products::Logits>>(p));
    } else {
      run(VisibleKl<Attention<typename Products::Logits>>(p));
    }
  });
}

}  // namespace custom_pypto

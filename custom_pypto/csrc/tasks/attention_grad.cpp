#include "attention_grad.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_grad_bf16.h"
#include "attention_grad_products.h"

namespace custom_pypto {
namespace {

// Products multiplies: attention_grad_products.h
template <typename Products>
class Backward {
 public:
  explicit Backward(AttentionGradParams& p)
      : p_(p),
        products_(p),
        rows_(products_.rows),
        indices_(p.attention.sparse_indices.contiguous()),
        sequences_(read_sequences(p.attention.sequences)),
        tokens_(tokens_of(sequences_)),
        key_map_(p.attention.sequences),
        owners_(p.attention.sequences.key),
        gradients_(p, rows_.latent, rows_.rope) {}

  void run() {
    Floats sink_terms(p_.attention.sinks ? tokens_.size() * rows_.heads : 0);
    const int64_t floats = products_.floats();  // of a token
    const int64_t chunk = chunk_of(floats), count = tokens_.size();
    std::vector<Operands> pairs(std::min(chunk, count));
    // One thread allocates and frees, because malloc keeps a pool per thread.
    Floats memory(pairs.size() * floats);
    for (size_t i = 0; i < pairs.size(); ++i) products_.place(memory.data() + i * floats, pairs[i]);
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t here = std::min(chunk, count - first);
      run_tasks(
          here, [&] { return Scratch(products_); },
          [&](Scratch& scratch, int64_t i) {
            float* sink =
                sink_terms.empty() ? nullptr : sink_terms.data() + (first + i) * rows_.heads;
            first_pass(tokens_[first + i], scratch, pairs[i], sink);
          });
      run_tasks(
          owners_.count, [&] { return typename Products::Adder(products_); },
          [&](typename Products::Adder& adder, int64_t owner) {
            for (int64_t i = 0; i < here; ++i) {
              if (pairs[i].begin[owner] == pairs[i].begin[owner + 1]) continue;
              products_.add_rows(pairs[i], owners_, owner, gradients_, adder);
            }
          });
    }
    gradients_.finish(p_);
    if (p_.attention.sinks) write_sinks(sink_terms);
  }

 private:
  using T = typename Products::Stored;
  using Operands = typename Products::Operands;
  using Scratch = typename Products::Scratch;

  // Fills the token's pairs; returns their number.
  int64_t find(const Token& token, Pairs& pairs) const {
    const Sequence& s = *token.sequence;
    const int64_t visible = s.visible(token.i, p_.attention.sequences.sparse_mode);
    const int32_t* row = indices_.template const_data_ptr<int32_t>() + token.row() * rows_.k;
    owners_.template fill<Products::kByOwner>(pairs, [&](const auto& f) {
      for_each_index(row, 0, rows_.k, visible, [&](int64_t position, int64_t column) {
        const KeyMap::Slot slot = key_map_.find(s, position);
        if (slot.exists) f(slot, column);
      });
    });
    return pairs.slots.size();
  }

  void first_pass(const Token& token, Scratch& scratch, Operands& pairs, float* sink) const {
    if (sink) std::fill_n(sink, rows_.heads, 0.0f);
    if (find(token, pairs) == 0) return;
    scratch.start(rows_, token);
    products_.first_pass(token, pairs, scratch);
    write_query(token, scratch.d_query.data());
    if (!sink) return;
    const float *max = rows_.maxima(token), *sum = rows_.sums(token);
    const float* logits = p_.attention.sinks->template const_data_ptr<float>();
    for (int64_t h = 0; h < rows_.heads; ++h) {
      sink[h] = std::exp(logits[h] - max[h]) / sum[h] * scratch.delta[h];
    }
  }

  void write_query(const Token& token, const float* from) const {
    const int64_t row = token.row() * rows_.heads, latent = rows_.latent, rope = rows_.rope;
    T* d_query = static_cast<T*>(p_.d_query.mutable_data_ptr()) + row * latent;
    T* d_rope = rope ? static_cast<T*>(p_.d_query_rope.mutable_data_ptr()) + row * rope : nullptr;
    for (int64_t h = 0; h < rows_.heads; ++h, from += rows_.width) {
      narrow(from, latent, d_query + h * latent);
      if (rope) narrow(from + latent, rope, d_rope + h * rope);
    }
  }

  void write_sinks(const Floats& terms) const {
    float* to = p_.d_sinks.template mutable_data_ptr<float>();
    for (int64_t h = 0; h < rows_.heads; ++h) {
      double sum = 0;
      for (size_t t = 0; t < tokens_.size(); ++t) sum -= terms[t * rows_.heads + h];
      to[h] = static_cast<float>(sum);
    }
  }

  AttentionGradParams& p_;
  Products products_;
  const AttentionGradRows<T>& rows_;
  Tensor indices_;
  std::vector<Sequence> sequences_;
  std::vector<Token> tokens_;
  KeyMap key_map_;
  Owners owners_;
  KeyGradients gradients_;
};

}  // namespace

void attend_backward(AttentionGradParams& p) {
  for (const Tensor& gradient : {p.d_query, p.d_key, p.d_value, p.d_query_rope, p.d_key_rope}) {
    gradient.zero_();
  }
  p.d_sinks.zero_();
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.d_query.numel() == 0 || p.d_key.numel() == 0) return;
  const int64_t rope = p.attention.query_rope ? p.attention.query_rope->size(-1) : 0;
  const cpu::Bf16Kernels* bf16 = attention_grad_kernels(p.d_query.size(-1), rope);
  dispatch_elements(p.d_query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    if constexpr (std::is_same_v<decltype(multiplied), uint16_t>) {
      Backward<Bf16Products>(p).run();
    } else {
      Backward<WidenedProducts<decltype(stored)>>(p).run();
    }
  });
}

}  // namespace custom_pypto

#include "expanded.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "panels.h"
#include "run_tasks.h"
#include "sequences.h"

namespace custom_pypto {
namespace {

constexpr int64_t kKeys = 256;   // of a block
constexpr int64_t kTokens = 32;  // of a block, whose scores of a block of keys stay in the cache
// a power of two as distance would put the lines of a tile into few sets of the cache
constexpr int64_t kStride = kKeys + 32;

int64_t tiles(int64_t n) { return (n + 31) / 32 * 32; }

const uint16_t* bits(const Tensor& tensor) {
  return static_cast<const uint16_t*>(tensor.const_data_ptr());
}

class Expanded {
 public:
  explicit Expanded(const ExpandedParams& p)
      : p_(p),
        kernels_(kernels().tiles ? *kernels().tiles : *kernels().bf16),
        latent_(p.latent.contiguous()),
        weight_(p.weight.contiguous()),
        q_nope_(p.q_nope.contiguous()),
        q_rope_(p.q_rope ? p.q_rope->contiguous() : Tensor()),
        k_rope_(p.k_rope ? p.k_rope->contiguous() : Tensor()),
        batch_(q_nope_.size(0)),
        tokens_(q_nope_.size(1)),
        heads_(q_nope_.size(2)),
        nope_(q_nope_.size(3)),
        rope_(p.q_rope ? q_rope_.size(3) : 0),
        value_(weight_.size(1) - nope_),
        rank_(latent_.size(2)),
        keys_(latent_.size(1)),
        blocks_((keys_ + kKeys - 1) / kKeys),
        width_(tiles(nope_ + rope_)),
        columns_(tiles(nope_) + tiles(value_)),
        named_(batch_ * tokens_ * words()),
        last_(batch_ * tokens_) {}

  bool run() {
    if (!name()) return false;
    run_tasks(
        batch_ * heads_, [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t task) {
          const int64_t b = task / heads_, h = task % heads_;
          expand(b, h, scratch);
          for (int64_t first = 0; first < tokens_; first += kTokens) {
            attend(b, h, first, std::min(kTokens, tokens_ - first), scratch);
          }
        });
    return true;
  }

 private:
  struct Scratch {
    explicit Scratch(const Expanded& op)
        : registers(&op.kernels_),
          weight(op.columns_ * op.rank_ / 2),
          keys(op.blocks_ * op.key_block()),
          values(op.blocks_ * op.value_block()),
          both(kKeys * op.columns_),
          rows(kKeys * std::max({op.rank_, op.width_, op.columns_})),
          query(kTokens * op.width_),
          scores(kTokens * kStride),
          p(kTokens * kStride),
          sums(kTokens * tiles(op.value_)) {}
    TileRegisters registers;
    AlignedVector<uint32_t> weight;        // of the head, packed
    AlignedVector<uint32_t> keys, values;  // of all blocks, packed
    AlignedVector<float> both;             // keys and values of a block
    AlignedVector<uint16_t> rows, query;
    AlignedVector<float> scores;
    AlignedVector<uint16_t> p;
    AlignedVector<float> sums;
    float max[kTokens], total[kTokens];
  };

  int64_t words() const { return blocks_ * kKeys / 16; }  // of a token's bits
  int64_t key_panel() const { return width_ / 2 * 16; }
  int64_t key_block() const { return kKeys / 16 * key_panel(); }
  static constexpr int64_t kValuePanel = (kKeys / 2 + 1) * 16;
  int64_t value_block() const { return tiles(value_) / 16 * kValuePanel; }

  // Bits of the keys that tokens name. Returns whether each names its keys once.
  bool name() {
    const int64_t count = p_.indices.size(2);
    const Tensor indices = p_.indices.contiguous(), ends = p_.ends.contiguous();
    std::atomic<bool> once{true};
    run_tasks(
        batch_ * tokens_, [] { return 0; },
        [&](int, int64_t token) {
          uint16_t* named = named_.data() + token * words();
          std::fill_n(named, words(), 0);
          const int64_t end = std::clamp<int64_t>(ends.const_data_ptr<int64_t>()[token], 0, keys_);
          const int32_t* row = indices.const_data_ptr<int32_t>() + token * count;
          bool twice = false;
          int64_t last = -kKeys;
          for_each_index(row, 0, count, end, [&](int64_t key, int64_t) {
            last = std::max(last, key);
            const uint16_t bit = 1 << key % 16;
            twice |= named[key / 16] & bit;
            named[key / 16] |= bit;
          });
          last_[token] = last / kKeys;
          if (twice) once = false;
        });
    return once;
  }

  static cpu::PairProduct product(const uint16_t* a, int64_t a_stride, int64_t n, const uint32_t* b,
                                  int64_t b_stride, int64_t depth, int64_t width) {
    return {.a = a,
            .a_stride = a_stride,
            .n = static_cast<int>(n),
            .b = b,
            .b_stride = b_stride,
            .depth = static_cast<int>(depth),
            .width = static_cast<int>(width)};
  }

  // Panels of 16 rows, of `dims` each; zeros up to a multiple of 32 rows.
  void pack_rows(const uint16_t* rows, int64_t n, int64_t dims, uint32_t* to) const {
    for (int64_t r = 0; r < tiles(n); r += 16, to += dims / 2 * 16) {
      const int64_t here = std::clamp<int64_t>(n - r, 0, 16);
      kernels_.pack_panel(rows + std::min(r, n) * dims, dims, static_cast<int>(here), 16,
                          static_cast<int>(dims), to);
    }
  }

  // Keys and values of a head, rounded to bfloat16 and packed.
  void expand(int64_t b, int64_t h, Scratch& scratch) const {
    const int64_t panel = rank_ / 2 * 16, of_nope = tiles(nope_);
    const uint16_t* rows = bits(weight_) + h * (nope_ + value_) * rank_;
    pack_rows(rows, nope_, rank_, scratch.weight.data());
    pack_rows(rows + nope_ * rank_, value_, rank_, scratch.weight.data() + of_nope / 16 * panel);
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t first = block * kKeys, n = std::min(kKeys, keys_ - first);
      const uint16_t* latent = bits(latent_) + (b * keys_ + first) * rank_;
      if (n % 16) {  // kernels read rows up to a multiple of 16
        std::copy_n(latent, n * rank_, scratch.rows.data());
        latent = scratch.rows.data();
      }
      kernels_.multiply(product(latent, rank_, n, scratch.weight.data(), panel, rank_, columns_),
                        scratch.both.data(), columns_, /*first=*/true);
      pack_keys(b, block, n, scratch);
      pack_values(block, n, scratch);
    }
  }

  void pack_keys(int64_t b, int64_t block, int64_t n, Scratch& scratch) const {
    uint16_t* rows = scratch.rows.data();
    for (int64_t j = 0; j < n; ++j) {
      uint16_t* to = rows + j * width_;
      kernels_.narrow(scratch.both.data() + j * columns_, static_cast<int>(tiles(nope_)), to);
      if (rope_) {
        std::copy_n(bits(k_rope_) + (b * keys_ + block * kKeys + j) * rope_, rope_, to + nope_);
      }
      std::fill(to + nope_ + rope_, to + width_, 0);
    }
    pack_rows(rows, n, width_, scratch.keys.data() + block * key_block());
  }

  void pack_values(int64_t block, int64_t n, Scratch& scratch) const {
    const int64_t columns = tiles(value_);
    const uint16_t* rows[kKeys];
    for (int64_t j = 0; j < n; ++j) {
      uint16_t* to = scratch.rows.data() + j * columns;
      kernels_.narrow(scratch.both.data() + j * columns_ + tiles(nope_), static_cast<int>(columns),
                      to);
      rows[j] = to;
    }
    kernels_.pack_row_pairs(rows, static_cast<int>(n), static_cast<int>(tiles(n)),
                            static_cast<int>(columns), kValuePanel,
                            scratch.values.data() + block * value_block(), nullptr);
  }

  void attend(int64_t b, int64_t h, int64_t first, int64_t n, Scratch& scratch) const {
    const int64_t columns = tiles(value_);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = (b * tokens_ + first + i) * heads_ + h;
      uint16_t* to = scratch.query.data() + i * width_;
      std::copy_n(bits(q_nope_) + row * nope_, nope_, to);
      if (rope_) std::copy_n(bits(q_rope_) + row * rope_, rope_, to + nope_);
      std::fill(to + nope_ + rope_, to + width_, 0);
    }
    const int64_t token = b * tokens_ + first;
    const int64_t last = *std::max_element(&last_[token], &last_[token] + n);
    for (int64_t block = 0; block <= last; ++block) {
      const int64_t keys = tiles(std::min(kKeys, keys_ - block * kKeys));
      kernels_.multiply(
          product(scratch.query.data(), width_, n, scratch.keys.data() + block * key_block(),
                  key_panel(), width_, keys),
          scratch.scores.data(), kStride, /*first=*/true);
      kernels_.softmax_rows({.scores = scratch.scores.data(),
                             .stride = kStride,
                             .n = static_cast<int>(n),
                             .keys = static_cast<int>(keys),
                             .named = &named_[token * words() + block * kKeys / 16],
                             .named_stride = words(),
                             .scale = static_cast<float>(p_.scale * M_LOG2E),
                             .first = block == 0,
                             .max = scratch.max,
                             .total = scratch.total,
                             .p = scratch.p.data(),
                             .p_stride = kStride,
                             .sums = scratch.sums.data(),
                             .dims = static_cast<int>(columns)});
      kernels_.multiply(
          product(scratch.p.data(), kStride, n, scratch.values.data() + block * value_block(),
                  kValuePanel, keys, columns),
          scratch.sums.data(), columns, /*first=*/block == 0);
    }
    for (int64_t i = 0; i < n; ++i) {
      auto* to = p_.out.mutable_data_ptr<c10::BFloat16>() + ((token + i) * heads_ + h) * value_;
      // or it names no key
      const float factor = last >= 0 && scratch.total[i] != 0 ? 1 / scratch.total[i] : 0;
      float* sums = scratch.sums.data() + i * columns;
      for (int64_t d = 0; d < value_; ++d) sums[d] = factor == 0 ? 0 : sums[d] * factor;
      kernels_.narrow(sums, static_cast<int>(columns), scratch.rows.data());
      std::copy_n(scratch.rows.data(), value_, &to->x);
    }
  }

  const ExpandedParams& p_;
  const cpu::Bf16Kernels& kernels_;
  Tensor latent_, weight_, q_nope_, q_rope_, k_rope_;
  int64_t batch_, tokens_, heads_, nope_, rope_, value_, rank_, keys_, blocks_;
  int64_t width_;    // of a key, a multiple of 32
  int64_t columns_;  // of what a latent expands to: each of key and value a multiple of 32
  std::vector<uint16_t> named_;  // bits of the keys of a token
  std::vector<int64_t> last_;    // block of keys that a token names, -1 for none
};

}  // namespace

bool expanded_attention(const ExpandedParams& p) { return Expanded(p).run(); }

}  // namespace custom_pypto

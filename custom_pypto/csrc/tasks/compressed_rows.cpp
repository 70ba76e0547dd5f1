#include "compressed_rows.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "rows.h"

namespace custom_pypto {
namespace {

template <typename T>
class Groups {
 public:
  explicit Groups(const GroupParams& p)
      : p_(p),
        rate_(p.bias.size(0)),
        wide_(p.bias.size(1)),
        width_(p.sums.size(2)),
        overlap_(wide_ / width_ - 1) {}

  void run() const {
    const int64_t groups = p_.complete.size(1);
    run_tasks(
        p_.complete.numel(), [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t task) { pool(task / groups, task % groups, scratch); },
        {.most = threads_for(p_.values.nbytes())});
  }

 private:
  struct Token {
    const T* row;
    int64_t of_group, half;  // its place in a group, and which half of an overlapping row counts
  };
  struct Scratch {
    explicit Scratch(const Groups& groups)
        : most(groups.width_), sum(groups.width_), gates(groups.width_), values(groups.width_) {}
    AlignedVector<float> most, sum, gates, values;
    std::vector<Token> tokens;
  };

  void pool(int64_t sequence, int64_t index, Scratch& scratch) const {
    const int64_t start = p_.start.const_data_ptr<int32_t>()[sequence];
    const int64_t length = p_.lengths.const_data_ptr<int32_t>()[sequence];
    const int64_t at = sequence * p_.complete.size(1) + index;
    float* out = p_.sums.mutable_data_ptr<float>() + at * width_;
    bool& complete = p_.complete.mutable_data_ptr<bool>()[at];
    std::fill_n(out, width_, 0.0f);
    const int64_t group = (start < 0 ? 0 : start) / rate_ + index;
    complete = (group + 1) * rate_ <= length;
    if (!complete) return;

    scratch.tokens.clear();
    for (int64_t half = 0; half <= overlap_; ++half) {
      for (int64_t i = 0; i < rate_; ++i) {
        const int64_t token = (group - overlap_ + half) * rate_ + i;
        if (const T* row = token < 0 ? nullptr : row_of(sequence, token, start, length)) {
          scratch.tokens.push_back({row, i, half});
        }
      }
    }
    // of a block outside of the state nothing is known
    if (!scratch.tokens.empty()) softmax(scratch, out);
  }

  // where a token is, or null
  const T* row_of(int64_t sequence, int64_t token, int64_t start, int64_t length) const {
    const int64_t ring = p_.state.size(1), all = 2 * wide_, tokens = p_.values.size(1);
    if (token < start) {
      const int64_t block = p_.blocks.const_data_ptr<int32_t>()[sequence];
      if (block < 0 || block >= p_.state.size(0)) return nullptr;
      return p_.state.const_data_ptr<T>() + (block * ring + token % ring) * all;
    }
    const int64_t column = tokens - (length - token);
    if (column < 0 || column >= tokens) return nullptr;
    return p_.values.const_data_ptr<T>() + (sequence * tokens + column) * all;
  }

  // out = sum_i softmax_i(gates_i + bias_i) * values_i, in the order of i
  void softmax(Scratch& scratch, float* out) const {
    float *most = scratch.most.data(), *sum = scratch.sum.data(), *gates = scratch.gates.data();
    const auto gates_of = [&](const Token& token) {
      widen(token.row + wide_ + token.half * width_, width_, gates);
      const float* bias = p_.bias.const_data_ptr<float>() + token.of_group * wide_;
      for (int64_t d = 0; d < width_; ++d) gates[d] += bias[token.half * width_ + d];
    };
    std::fill_n(most, width_, -INFINITY);
    for (const Token& token : scratch.tokens) {
      gates_of(token);
      for (int64_t d = 0; d < width_; ++d) most[d] = gates[d] > most[d] ? gates[d] : most[d];
    }
    std::fill_n(sum, width_, 0.0f);
    for (const Token& token : scratch.tokens) {
      gates_of(token);
      widen(token.row + token.half * width_, width_, scratch.values.data());
      for (int64_t d = 0; d < width_; ++d) {
        const float weight = std::exp(gates[d] - most[d]);
        sum[d] += weight;
        out[d] += weight * scratch.values[d];
      }
    }
    for (int64_t d = 0; d < width_; ++d) out[d] /= sum[d];
  }

  const GroupParams& p_;
  const int64_t rate_, wide_, width_, overlap_;
};

}  // namespace

void pool_groups(const GroupParams& p) {
  with_type(p.state.scalar_type(), [&](auto type) { Groups<decltype(type)>(p).run(); });
}

void find_slots(const SlotParams& p) {
  const int64_t blocks = p.table.size(1), n = p.rows.size(1);
  const auto* table = p.table.const_data_ptr<int32_t>();
  const auto* rows = p.rows.const_data_ptr<int64_t>();
  const auto* valid = p.valid.const_data_ptr<bool>();
  auto* slots = p.slots.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < p.rows.numel(); ++i) {
    const int64_t column = rows[i] < 0 ? blocks : rows[i] / p.block;
    const bool fits = valid[i] && column < blocks;
    slots[i] = fits ? table[i / n * blocks + column] * p.block + rows[i] % p.block : 0;
  }
}

void find_rows(const WindowParams& p) {
  const int64_t width = p.out.size(2), k = width - p.window;
  const auto* positions = p.positions.const_data_ptr<int64_t>();
  const auto* valid = p.valid.const_data_ptr<bool>();
  const int32_t* indices = p.indices ? p.indices->const_data_ptr<int32_t>() : nullptr;
  auto* out = p.out.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < p.positions.numel(); ++i, out += width) {
    for (int64_t j = 0; j < p.window; ++j) {
      const bool seen = valid[i] && positions[i] >= j;
      out[j] = seen ? static_cast<int32_t>((positions[i] - j) % p.ring) : -2;
    }
    // a position may be any number
    const int64_t tokens = std::clamp<int64_t>(positions[i], -1, INT64_MAX - 1) + 1;
    const int64_t rows = tokens / p.rate;
    for (int64_t j = 0; j < k; ++j) {
      const int64_t row = indices ? indices[i * k + j] : j;
      const bool seen = row >= 0 && row < rows;
      out[p.window + j] = seen ? static_cast<int32_t>(row + p.ring) : -1;
    }
  }
}

}  // namespace custom_pypto

#include "sequences.h"

#include <utility>

namespace custom_pypto {
namespace {

// (start, length) of each sequence: TND starts follow from the prefix sums, others are 0
std::vector<std::pair<int64_t, int64_t>> read_spans(const OptionalTensor& lengths, bool prefix_sums,
                                                    int64_t batch, int64_t capacity) {
  std::vector<std::pair<int64_t, int64_t>> spans(batch, {0, capacity});
  if (!lengths) return spans;
  const Tensor values = lengths->contiguous();
  const int32_t* value = values.const_data_ptr<int32_t>();
  int64_t start = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (prefix_sums) {
      const int64_t end = std::clamp<int64_t>(value[b], start, capacity);
      spans[b] = {start, end - start};
      start = end;
    } else {
      spans[b].second = std::clamp<int64_t>(value[b], 0, capacity);
    }
  }
  return spans;
}

}  // namespace

std::vector<Sequence> read_sequences(const SequenceParams& p) {
  const bool packed = p.query_layout == Layout::kTnd;
  const int64_t batch = packed ? p.actual_seq_lengths_query->size(0) : p.query.size(0);
  const int64_t tokens = p.query.size(packed ? 0 : 1);
  const int64_t capacity = p.key_layout == Layout::kPaged ? p.block_table->size(1) * p.key.size(1)
                                                          : p.key.size(packed ? 0 : 1);
  const auto queries = read_spans(p.actual_seq_lengths_query, packed, batch, tokens);
  const auto keys =
      read_spans(p.actual_seq_lengths_key, p.key_layout == Layout::kTnd, batch, capacity);
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first_token = packed ? queries[b].first : b * tokens;
    sequences.push_back({b, first_token, queries[b].second, keys[b].second, keys[b].first});
  }
  return sequences;
}

KeyMap::KeyMap(const SequenceParams& p)
    : layout_(p.key_layout),
      blocks_(layout_ == Layout::kTnd ? 1 : p.key.size(0)),
      // at least 1: positions are divided by it, although a cache without keys is never looked up
      block_size_(std::max<int64_t>(1, p.key.size(layout_ == Layout::kTnd ? 0 : 1))) {
  if ((block_size_ & (block_size_ - 1)) == 0) shift_ = __builtin_ctzll(block_size_);
  if (!p.block_table) return;
  table_ = p.block_table->contiguous();
  blocks_of_ = table_.const_data_ptr<int32_t>();
  pages_ = table_.size(1);
}

}  // namespace custom_pypto

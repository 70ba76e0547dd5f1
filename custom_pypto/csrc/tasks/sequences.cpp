#include "sequences.h"

namespace custom_pypto {
namespace {

struct Span {
  int64_t start;   // row; 0 unless rows are packed
  int64_t tokens;  // tokens / ratio rows
};

// `ratio` tokens share a row of a tensor with `capacity` rows: for a sequence or, packed, for all
// sequences.
std::vector<Span> read_spans(const OptionalTensor& lengths, bool packed, int64_t batch,
                             int64_t capacity, int64_t ratio = 1) {
  std::vector<Span> spans(batch, Span{.start = 0, .tokens = capacity * ratio});
  if (!lengths) return spans;
  const Tensor values = lengths->contiguous();
  const int32_t* value = values.const_data_ptr<int32_t>();
  const auto fitting = [&](int64_t tokens, int64_t rows) {
    return std::clamp<int64_t>(tokens, 0, rows * ratio + ratio - 1);
  };
  int64_t before = 0, row = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (packed) {
      spans[b] = Span{.start = row, .tokens = fitting(value[b] - before, capacity - row)};
      before += spans[b].tokens;
      row += spans[b].tokens / ratio;
    } else {
      spans[b].tokens = fitting(value[b], capacity);
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
  const auto keys = read_spans(p.actual_seq_lengths_key, p.key_layout == Layout::kTnd, batch,
                               capacity, p.cmp_ratio);
  std::vector<Sequence> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    sequences.push_back(Sequence{.index = b,
                                 .first_token = packed ? queries[b].start : b * tokens,
                                 .len_query = queries[b].tokens,
                                 .len_key = keys[b].tokens,
                                 .first_key = keys[b].start,
                                 .keys = keys[b].tokens / p.cmp_ratio,
                                 .cmp_ratio = p.cmp_ratio});
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

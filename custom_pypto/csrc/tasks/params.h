// The checked arguments that several ops pass to the tasks, under the names of the schemas, and
// values derived from them. Tensors are references: no struct may outlive the call.
#pragma once

#include <cstdint>
#include <string_view>

#include "tensor.h"

namespace custom_pypto {

enum class Layout { kBsnd, kTnd, kPaged };

// Query tokens and keys of a batch of sequences.
struct SequenceParams {
  const Tensor &query, &key;
  const OptionalTensor& actual_seq_lengths_query = kNone;
  const OptionalTensor& actual_seq_lengths_key = kNone;
  const OptionalTensor& block_table = kNone;
  std::string_view layout_query = "BSND", layout_key = "PA_BSND";
  int64_t sparse_mode = 3;
  int64_t cmp_ratio = 1;  // tokens per key: key lengths count tokens
  // set by check_sequences
  Layout query_layout{}, key_layout{};
};

struct IndexerParams {
  SequenceParams sequences;
  const Tensor& weights;
  int64_t sparse_count;
  bool return_value = false;
  Tensor out = {};     // set by the contract
  Tensor values = {};  // float32, without elements unless return_value
};

struct AttentionParams {
  SequenceParams sequences;
  const OptionalTensor& value = kNone;
  const Tensor& sparse_indices;
  double scale_value;
  const OptionalTensor& query_rope = kNone;
  const OptionalTensor& key_rope = kNone;
  const OptionalTensor& sinks = kNone;
  int64_t sparse_block_size = 1;
  bool return_softmax_lse = false;
  Tensor out = {};                            // set by the contract
  Tensor softmax_max = {}, softmax_sum = {};  // without elements unless return_softmax_lse
};

struct AttentionGradParams {
  AttentionParams attention;
  const Tensor& d_out;
  const Tensor &softmax_max, &softmax_sum;  // of the forward
  // set by the contract; those of absent tensors have no elements
  Tensor d_query = {}, d_key = {}, d_value = {}, d_query_rope = {}, d_key_rope = {}, d_sinks = {};
};

struct IndexGradParams {
  SequenceParams sequences;
  const Tensor& weights;
  Tensor d_query = {}, d_key = {}, d_weights = {};  // set by the contract
};

// The divergence of an indexer from the attention that it selects for.
struct IndexKlParams {
  IndexGradParams index;
  const Tensor &query, &key;  // of the attention
  const OptionalTensor& query_rope = kNone;
  const OptionalTensor& key_rope = kNone;
  const Tensor &softmax_max, &softmax_sum;  // of the attention
  double scale_value;
  const OptionalTensor& sparse_indices = kNone;  // without: every key that a token sees
  // without sparse_indices: statistics of the scores of the indexer
  const OptionalTensor& softmax_max_index = kNone;
  const OptionalTensor& softmax_sum_index = kNone;
  Tensor loss = {};  // set by the contract
};

}  // namespace custom_pypto

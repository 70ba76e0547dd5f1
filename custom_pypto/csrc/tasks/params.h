// Parameters that an op's contract passes to its kernels: the schema's arguments, under the same
// names, and values derived from them. Arguments are references: no struct may outlive the call.
#pragma once

#include <optional>

#include "../ops/contract.h"

namespace custom_pypto {

enum class Layout { kBsnd, kTnd, kPaged };

// The names of an op and of its key arguments.
struct KeyNames {
  const char* op;
  const char* layout;   // layout_key or layout_kv
  const char* lengths;  // actual_seq_lengths_key or actual_seq_lengths_kv
};

// Query tokens and keys of a batch of sequences.
struct SequenceParams {
  const Tensor &query, &key;
  const OptionalTensor &actual_seq_lengths_query, &actual_seq_lengths_key, &block_table;
  c10::string_view layout_query = "BSND", layout_key = "PA_BSND";
  int64_t sparse_mode = 3;
  int64_t cmp_ratio = 1;  // tokens per key: key lengths count tokens
  // set by check_sequences
  Layout query_layout{}, key_layout{};
  Tensor out = {};  // set by the contract
};

// Checks sparse mode, layouts, ranks of query and key, one key head, block size, lengths and block
// table; sets the layouts.
void check_sequences(const KeyNames& names, SequenceParams& p);

struct IndexerParams : SequenceParams {
  const Tensor& weights;
  int64_t sparse_count;
};

// Checks what the indexers have in common, all but dtypes and dims, and allocates the output.
void check_indexer(const KeyNames& names, IndexerParams& p);

struct QuantIndexerParams : IndexerParams {
  const Tensor &query_dequant_scale, &key_dequant_scale;
  int64_t query_quant_mode, key_quant_mode;
};

struct AttentionParams : SequenceParams {
  const OptionalTensor& value;
  const Tensor& sparse_indices;
  double scale_value;
  const OptionalTensor &query_rope, &key_rope, &sinks;
  int64_t sparse_block_size = 1;
  bool return_softmax_lse = false;
  Tensor softmax_max = {}, softmax_sum = {};  // set by the contract if return_softmax_lse
};

// An int8 cache, whose arguments beside those of `attention` have one legal value or determine the
// row. `attention.query` is [nope | rope].
struct QuantisedAttentionParams {
  AttentionParams attention;
  int64_t key_quant_mode, value_quant_mode;
  const OptionalTensor &key_dequant_scale, &value_dequant_scale;
  int64_t attention_mode, quant_scale_repo_mode, tile_size, rope_head_dim;
};

struct FusedParams {
  const Tensor &x, &w_dq, &w_uq_qr, &w_uk, &w_dkv_kr, &gamma_cq, &gamma_ckv, &sin, &cos;
  const Tensor &cache_index, &kv_cache, &kr_cache, &block_table, &act_seqs;
  const Tensor &w_idx_qb, &w_idx_k, &w_idx_proj, &in_gamma_k, &in_beta_k, &index_k_cache;
  std::optional<double> softmax_scale;
  double eps;
  int64_t sparse_count;
  Tensor out = {};  // set by the contract
};

// Checks what every sparse attention has in common: sequences, indices, scale.
void check_attention(const KeyNames& names, AttentionParams& p);

// Computes p.out, which the contract has allocated, on the CPU. An int8 key has rows of
// int8_rows.h; query_rope then stands without key_rope.
void attend(const AttentionParams& p);

// Check the contract, compute on the CPU, and store the result in p.out.
void lightning_indexer(IndexerParams& p);
void sparse_flash_attention(AttentionParams& p);

}  // namespace custom_pypto

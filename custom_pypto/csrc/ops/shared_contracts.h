// Checks that several ops share.
#pragma once

#include <initializer_list>

#include "../tasks/params.h"
#include "contract.h"

namespace custom_pypto {

// The names of an op and of its arguments on sequences.
struct KeyNames {
  const char* op;
  const char* layout;   // layout_key or layout_kv
  const char* lengths;  // actual_seq_lengths_key or actual_seq_lengths_kv
  const char* query_layout = "layout_query";
  const char* query_lengths = "actual_seq_lengths_query";
  const char* query = "query";
  const char* key = "key";
};

// Logits are scaled in float32, as exponents of 2. A scale that is 0 or infinite in float32 turns
// masked logits into NaN; so does a subnormal scale under torch.set_flush_denormal(True).
constexpr char kScales[] = "from 1e-38 to 2e38 (finite and positive in float32)";
inline bool is_scale(double scale) { return scale >= 1e-38 && scale <= 2e38; }

void check_scale(const char* op, double scale_value);
void check_sparse_count(const char* op, int64_t sparse_count);

// Checks sparse mode, layouts, ranks of query and key, one key head, block size, lengths, block
// table and cmp_ratio; sets the layouts.
void check_sequences(const KeyNames& names, SequenceParams& p);

// Checks sequences, key and weights of an indexer, all but dtypes and dims.
void check_index(const KeyNames& names, SequenceParams& p, const Tensor& weights);

// Checks the same and sparse_count, and allocates the output.
void check_indexer(const KeyNames& names, IndexerParams& p);

// Checks dtypes and dims of an indexer over rows in the dtype of the query.
void check_unquantized_index(const KeyNames& names, const SequenceParams& p, const Tensor& weights);

// Checks the indices of a sparse attention, after its sequences.
void check_sparse_indices(const KeyNames& names, const SequenceParams& p, const Tensor& indices);

// Checks what every sparse attention has in common: sequences, indices, scale.
void check_attention(const KeyNames& names, AttentionParams& p);

// Checks the same, and the tensors of attention over rows in the dtype of the query.
void check_unquantized_attention(const KeyNames& names, AttentionParams& p);

// Checks the tensors of attention over rows in the dtype of the query, after its sequences.
void check_unquantized_rows(const KeyNames& names, const SequenceParams& p,
                            const OptionalTensor& value, const OptionalTensor& query_rope,
                            const OptionalTensor& key_rope, const OptionalTensor& sinks);

// Checks statistics of the softmax of attention, [B, N2, S1, N1] or [N2, T1, N1].
void check_statistics(const KeyNames& names, const char* name, const Tensor& tensor,
                      const Tensor& query);

// Whether autograd records a call of `op` with these arguments. Rejects arguments with tangents of
// forward-mode differentiation, which the op would drop.
bool wants_gradient(const char* op, std::initializer_list<OptionalTensor> arguments);

// Raises the error of a backward through a paged cache that requires no gradient.
[[noreturn]] void reject_cut_cache(const char* op);

// Checks rows x [.., D] of an indexer, and the matrix that rotates them.
void check_index_rows(const char* op, const Tensor& x, const OptionalTensor& hadamard);

}  // namespace custom_pypto

// MLA prolog, indexer prolog, cache writes, lightning indexer and sparse attention in one op.
// docs/npu_sparse_attention_pto.md
#include <ATen/ops/einsum.h>
#include <ATen/ops/matmul.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <cmath>

#include "../tasks/cache_slots.h"
#include "../tasks/row_functions.h"
#include "npu_lightning_indexer_pto.h"
#include "npu_sparse_flash_attention_pto.h"
#include "prolog.h"
#include "shared_contracts.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_sparse_attention_pto";
constexpr double kLayerNormEps = 1e-6;  // of the index key; `eps` is for the two RMSNorms

struct FusedParams {
  const Tensor &x, &w_dq, &w_uq_qr, &w_uk, &w_dkv_kr, &gamma_cq, &gamma_ckv, &sin, &cos;
  const Tensor &cache_index, &kv_cache, &kr_cache, &block_table, &act_seqs;
  const Tensor &w_idx_qb, &w_idx_k, &w_idx_proj, &in_gamma_k, &in_beta_k, &index_k_cache;
  std::optional<double> softmax_scale;
  double eps;
  int64_t sparse_count;
  Tensor out = {};  // set by the contract
};

// Checks the rank and dtype of each argument, then sizes, once every letter is known.
void check_shapes(const FusedParams& p) {
  Dim B("B"), S1("S1"), H("H"), Q("Q"), N1("N1", Dim::kPositive), P("P");
  Dim L("L", Dim::kMultipleOf16), R("R", Dim::kMultipleOf16), D("D", Dim::kMultipleOf16);
  Dim index_heads("index heads", Dim::kPositive), N2("1", "N2: one key head", 1);
  Dim blocks("blocks"), block_size("block_size", Dim::kBlockSize), pages("blocks per sequence");
  Dim query_dims("N1 * (P + R)", "N1 * (P + R) of w_uk and kr_cache");
  Dim key_dims("L + R", "L + R of w_uk and kr_cache");
  Dim index_dims("index heads * D", "index heads of w_idx_proj * D of w_idx_k");

  ShapeTable table(kOp);
#define CHECK_SHAPE(argument, ...) table.row(#argument, p.argument, {__VA_ARGS__}).device_of(p.x)
#define CHECK_SHAPE_AND_DTYPE(...) CHECK_SHAPE(__VA_ARGS__).dtype(p.x.scalar_type(), "dtype of x")
  CHECK_SHAPE(x, B, S1, H).dtype(kFloating);
  CHECK_SHAPE_AND_DTYPE(w_dq, H, Q);
  CHECK_SHAPE_AND_DTYPE(w_uq_qr, Q, query_dims);
  CHECK_SHAPE_AND_DTYPE(w_uk, N1, P, L);
  CHECK_SHAPE_AND_DTYPE(w_dkv_kr, H, key_dims);
  CHECK_SHAPE_AND_DTYPE(gamma_cq, Q);
  CHECK_SHAPE_AND_DTYPE(gamma_ckv, L);
  CHECK_SHAPE_AND_DTYPE(w_idx_qb, Q, index_dims);
  CHECK_SHAPE_AND_DTYPE(w_idx_k, H, D);
  CHECK_SHAPE_AND_DTYPE(w_idx_proj, H, index_heads);
  CHECK_SHAPE_AND_DTYPE(in_gamma_k, D);
  CHECK_SHAPE_AND_DTYPE(in_beta_k, D);
  CHECK_SHAPE_AND_DTYPE(kv_cache, blocks, block_size, N2, L).dense_rows();
  CHECK_SHAPE_AND_DTYPE(kr_cache, blocks, block_size, N2, R).dense_rows();
  CHECK_SHAPE_AND_DTYPE(index_k_cache, blocks, block_size, N2, D).dense_rows();
  CHECK_SHAPE(sin, B, S1, R).dtype_or_float32(p.x.scalar_type(), "dtype of x");
  CHECK_SHAPE(cos, B, S1, R).dtype_or_float32(p.x.scalar_type(), "dtype of x");
  CHECK_SHAPE(cache_index, B, S1).dtype(kSlots, "flat slots of the caches");
  CHECK_SHAPE(block_table, B, pages).dtype(at::kInt, "block ids");
  CHECK_SHAPE(act_seqs, B).dtype(at::kInt, "keys of each sequence");
#undef CHECK_SHAPE_AND_DTYPE
#undef CHECK_SHAPE
  CHECK_ARGUMENT(R.size <= D.size, kOp, "kr_cache.size(3)",
                 c10::str("at most ", D.size, " (the indexer rotates the first R of its D dims)"),
                 R.size);
  query_dims.size = N1.size * (P.size + R.size);
  key_dims.size = L.size + R.size;
  index_dims.size = index_heads.size * D.size;
  table.check_sizes();
}

// Every rule is checked here, before the caches are touched.
void contract(FusedParams& p) {
  check_sparse_count(kOp, p.sparse_count);
  CHECK_ARGUMENT(!p.softmax_scale || is_scale(*p.softmax_scale), kOp, "softmax_scale",
                 c10::str("None, or ", kScales), *p.softmax_scale);
  CHECK_ARGUMENT(std::isfinite(p.eps) && p.eps >= 0, kOp, "eps", "finite and at least 0", p.eps);
  check_shapes(p);
  p.out = empty({p.x.sym_size(0), p.x.sym_size(1), p.w_uk.sym_size(0), p.w_uk.sym_size(2)},
                p.x.options());
}

Tensor rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
  const Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel() != 0) norm_rows(x, gamma, eps, out);
  return out;
}

void compute(FusedParams& p) {
  const int64_t N1 = p.w_uk.size(0), P = p.w_uk.size(1), L = p.w_uk.size(2);
  const int64_t R = p.kr_cache.size(3), D = p.w_idx_k.size(1), index_heads = p.w_idx_proj.size(1);
  const Tensor sin = angles(p.sin), cos = angles(p.cos);
  const Tensor cq = rms_norm(at::matmul(p.x, p.w_dq), p.gamma_cq, p.eps);
  Tensor query = at::matmul(cq, p.w_uq_qr).unflatten(-1, {N1, P + R});
  const OptionalTensor query_rope = query.narrow(-1, P, R).contiguous(), key_rope = p.kr_cache;
  query = at::einsum("bshp,hpl->bshl", {query.narrow(-1, 0, P), p.w_uk});
  rotate_in_place(*query_rope, sin, cos, /*neighbours=*/true);
  const Tensor key = at::matmul(p.x, p.w_dkv_kr);
  const Tensor key_latent = rms_norm(key.narrow(-1, 0, L), p.gamma_ckv, p.eps);
  const Tensor key_ropes = key.narrow(-1, L, R);
  rotate_in_place(key_ropes.unsqueeze(2), sin, cos, /*neighbours=*/true);
  const Tensor index_query = at::matmul(cq, p.w_idx_qb).unflatten(-1, {index_heads, D});
  rotate_in_place(index_query, sin, cos, /*neighbours=*/false);
  const Tensor index_keys = index_key({.x = p.x,
                                       .w = p.w_idx_k,
                                       .gamma = p.in_gamma_k,
                                       .beta = p.in_beta_k,
                                       .sin = sin,
                                       .cos = cos,
                                       .eps = kLayerNormEps});
  const Tensor weights = index_weights(p.x, p.w_idx_proj, D);
  // last, since other arguments may share memory with the caches
  write_cache(p.kv_cache, key_latent, p.cache_index);
  write_cache(p.kr_cache, key_ropes, p.cache_index);
  write_cache(p.index_k_cache, index_keys, p.cache_index);
  const OptionalTensor lengths = p.act_seqs, blocks = p.block_table;
  IndexerParams indexer{.sequences = {.query = index_query,
                                      .key = p.index_k_cache,
                                      .actual_seq_lengths_key = lengths,
                                      .block_table = blocks},
                        .weights = weights,
                        .sparse_count = p.sparse_count};
  lightning_indexer(indexer);
  AttentionParams attention{.sequences = {.query = query,
                                          .key = p.kv_cache,
                                          .actual_seq_lengths_key = lengths,
                                          .block_table = blocks},
                            .sparse_indices = indexer.out,
                            .scale_value = p.softmax_scale.value_or(scale_of(P + R)),
                            .query_rope = query_rope,
                            .key_rope = key_rope};
  sparse_flash_attention(attention);
  p.out = attention.out;
}

}  // namespace

template <bool computes>
Tensor npu_sparse_attention_pto(const Tensor& x, const Tensor& w_dq, const Tensor& w_uq_qr,
                                const Tensor& w_uk, const Tensor& w_dkv_kr, const Tensor& gamma_cq,
                                const Tensor& gamma_ckv, const Tensor& sin, const Tensor& cos,
                                const Tensor& cache_index, const Tensor& kv_cache,
                                const Tensor& kr_cache, const Tensor& block_table,
                                const Tensor& act_seqs, const Tensor& w_idx_qb,
                                const Tensor& w_idx_k, const Tensor& w_idx_proj,
                                const Tensor& in_gamma_k, const Tensor& in_beta_k,
                                const Tensor& index_k_cache, std::optional<double> softmax_scale,
                                double eps, int64_t sparse_count) {
  FusedParams p{.x = x,
                .w_dq = w_dq,
                .w_uq_qr = w_uq_qr,
                .w_uk = w_uk,
                .w_dkv_kr = w_dkv_kr,
                .gamma_cq = gamma_cq,
                .gamma_ckv = gamma_ckv,
                .sin = sin,
                .cos = cos,
                .cache_index = cache_index,
                .kv_cache = kv_cache,
                .kr_cache = kr_cache,
                .block_table = block_table,
                .act_seqs = act_seqs,
                .w_idx_qb = w_idx_qb,
                .w_idx_k = w_idx_k,
                .w_idx_proj = w_idx_proj,
                .in_gamma_k = in_gamma_k,
                .in_beta_k = in_beta_k,
                .index_k_cache = index_k_cache,
                .softmax_scale = softmax_scale,
                .eps = eps,
                .sparse_count = sparse_count};
  contract(p);
  if (computes && p.out.numel() != 0) compute(p);
  return p.out;
}

REGISTER_OP(
    npu_sparse_attention_pto,
    "(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk, Tensor w_dkv_kr, Tensor gamma_cq, "
    "Tensor gamma_ckv, Tensor sin, Tensor cos, Tensor cache_index, Tensor(a!) kv_cache, "
    "Tensor(b!) kr_cache, Tensor block_table, Tensor act_seqs, Tensor w_idx_qb, "
    "Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k, Tensor in_beta_k, "
    "Tensor(c!) index_k_cache, *, float? softmax_scale=None, float eps=1e-6, "
    "int sparse_count=2048) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl(kOp, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto

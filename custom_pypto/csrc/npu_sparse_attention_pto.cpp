// MLA prolog, indexer prolog, cache writes, lightning indexer and sparse attention in one op.
// docs/npu_sparse_attention_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <cmath>
#include <cstring>

#include "ops_common.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_sparse_attention_pto";
constexpr double kLayerNormEps = 1e-6;  // of the index key; `eps` is for the two RMSNorms

// Every rule is checked here, before the caches are touched.
Tensor npu_sparse_attention_pto_contract(
    const Tensor& x, const Tensor& w_dq, const Tensor& w_uq_qr, const Tensor& w_uk,
    const Tensor& w_dkv_kr, const Tensor& gamma_cq, const Tensor& gamma_ckv, const Tensor& sin,
    const Tensor& cos, const Tensor& cache_index, const Tensor& kv_cache, const Tensor& kr_cache,
    const Tensor& block_table, const Tensor& act_seqs, const Tensor& w_idx_qb,
    const Tensor& w_idx_k, const Tensor& w_idx_proj, const Tensor& in_gamma_k,
    const Tensor& in_beta_k, const Tensor& index_k_cache, std::optional<double> softmax_scale,
    double eps, int64_t sparse_count) {
  check_sparse_count(kOp, sparse_count);
  CHECK_ARGUMENT(!softmax_scale || is_scale(*softmax_scale), kOp, "softmax_scale",
                 c10::str("None, or ", kScales), *softmax_scale);
  CHECK_ARGUMENT(std::isfinite(eps) && eps >= 0, kOp, "eps", "finite and not negative", eps);

  check_rank(kOp, "x", x, 3, "[B, S1, H]");
  check_floating(kOp, "x", x);
  const struct {
    const char* name;
    const Tensor& tensor;
    int64_t rank;
    const char* shape;
  } operands[] = {
      {"w_dq", w_dq, 2, "[H, Q]"},
      {"w_uq_qr", w_uq_qr, 2, "[Q, N1 * (P + R)]"},
      {"w_uk", w_uk, 3, "[N1, P, L]"},
      {"w_dkv_kr", w_dkv_kr, 2, "[H, L + R]"},
      {"gamma_cq", gamma_cq, 1, "[Q]"},
      {"gamma_ckv", gamma_ckv, 1, "[L]"},
      {"kv_cache", kv_cache, 4, "[blocks, block_size, 1, L]"},
      {"kr_cache", kr_cache, 4, "[blocks, block_size, 1, R]"},
      {"w_idx_qb", w_idx_qb, 2, "[Q, index heads * D]"},
      {"w_idx_k", w_idx_k, 2, "[H, D]"},
      {"w_idx_proj", w_idx_proj, 2, "[H, index heads]"},
      {"in_gamma_k", in_gamma_k, 1, "[D]"},
      {"in_beta_k", in_beta_k, 1, "[D]"},
      {"index_k_cache", index_k_cache, 4, "[blocks, block_size, 1, D]"},
  };
  for (const auto& operand : operands) {
    check_rank(kOp, operand.name, operand.tensor, operand.rank, operand.shape);
    check_dtype(kOp, operand.name, operand.tensor, x.scalar_type(), "dtype of x");
    check_device(kOp, operand.name, operand.tensor, x);
  }

  const auto H = x.sym_size(2), Q = w_dq.sym_size(1);
  const auto N1 = w_uk.sym_size(0), P = w_uk.sym_size(1), L = w_uk.sym_size(2);
  const auto R = kr_cache.sym_size(3), D = w_idx_k.sym_size(1), heads = w_idx_proj.sym_size(1);
  check_size(kOp, "w_dq", w_dq, 0, H, "H of x");
  check_size(kOp, "w_uq_qr", w_uq_qr, 0, Q, "Q of w_dq");
  check_size(kOp, "w_uq_qr", w_uq_qr, 1, N1 * (P + R), "N1 * (P + R) of w_uk and kr_cache");
  check_size(kOp, "w_dkv_kr", w_dkv_kr, 0, H, "H of x");
  check_size(kOp, "w_dkv_kr", w_dkv_kr, 1, L + R, "L + R of w_uk and kr_cache");
  check_size(kOp, "gamma_cq", gamma_cq, 0, Q, "Q of w_dq");
  check_size(kOp, "gamma_ckv", gamma_ckv, 0, L, "L of w_uk");
  check_size(kOp, "w_idx_qb", w_idx_qb, 0, Q, "Q of w_dq");
  check_size(kOp, "w_idx_qb", w_idx_qb, 1, heads * D, "index heads of w_idx_proj * D of w_idx_k");
  check_size(kOp, "w_idx_k", w_idx_k, 0, H, "H of x");
  check_size(kOp, "w_idx_proj", w_idx_proj, 0, H, "H of x");
  check_size(kOp, "in_gamma_k", in_gamma_k, 0, D, "D of w_idx_k");
  check_size(kOp, "in_beta_k", in_beta_k, 0, D, "D of w_idx_k");
  check_multiple_of_16(kOp, "w_uk", w_uk, 2);
  check_multiple_of_16(kOp, "kr_cache", kr_cache, 3);
  check_multiple_of_16(kOp, "w_idx_k", w_idx_k, 1);
  TORCH_CHECK(R <= D, kOp, ": kr_cache.size(3) must be at most ", D,
              " (the indexer rotates the first R of its D dims), got ", R);
  CHECK_ARGUMENT(N1 > 0, kOp, "w_uk.size(0)", "at least 1 (N1)", N1);
  CHECK_ARGUMENT(heads > 0, kOp, "w_idx_proj.size(1)", "at least 1 (index heads)", heads);

  for (const auto& [name, table] : {std::pair<const char*, const Tensor&>{"sin", sin},
                                    std::pair<const char*, const Tensor&>{"cos", cos}}) {
    check_rank(kOp, name, table, 3, "[B, S1, R]");
    check_size(kOp, name, table, 0, x.sym_size(0), "B of x");
    check_size(kOp, name, table, 1, x.sym_size(1), "S1 of x");
    check_size(kOp, name, table, 2, R, "R of kr_cache");
    check_dtype_or_float32(kOp, name, table, x.scalar_type(), "dtype of x");
    check_device(kOp, name, table, x);
  }

  check_rank(kOp, "cache_index", cache_index, 2, "[B, S1]");
  const auto index_dtype = cache_index.scalar_type();
  CHECK_ARGUMENT(index_dtype == at::kInt || index_dtype == at::kLong, kOp, "cache_index.dtype",
                 "int32 or int64 (flat slots of the caches)", dtype_name(index_dtype));
  check_size(kOp, "cache_index", cache_index, 0, x.sym_size(0), "B of x");
  check_size(kOp, "cache_index", cache_index, 1, x.sym_size(1), "S1 of x");
  check_device(kOp, "cache_index", cache_index, x);

  const auto block_size = kv_cache.sym_size(1);
  TORCH_CHECK(block_size > 0 && block_size <= 1024 && block_size % 16 == 0, kOp,
              ": kv_cache.size(1) must be a multiple of 16 up to 1024 (block_size), got ",
              block_size);
  check_size(kOp, "kv_cache", kv_cache, 3, L, "L of w_uk");
  check_size(kOp, "index_k_cache", index_k_cache, 3, D, "D of w_idx_k");
  for (const auto& [name, cache] :
       {std::pair<const char*, const Tensor&>{"kv_cache", kv_cache},
        std::pair<const char*, const Tensor&>{"kr_cache", kr_cache},
        std::pair<const char*, const Tensor&>{"index_k_cache", index_k_cache}}) {
    check_size(kOp, name, cache, 0, kv_cache.sym_size(0), "blocks of kv_cache");
    check_size(kOp, name, cache, 1, block_size, "block_size of kv_cache");
    check_size(kOp, name, cache, 2, 1, "N2: one key head");
    check_dense_rows(kOp, name, cache);
  }
  check_rank(kOp, "block_table", block_table, 2, "[B, blocks of a sequence]");
  check_size(kOp, "block_table", block_table, 0, x.sym_size(0), "B of x");
  check_dtype(kOp, "block_table", block_table, at::kInt, "block ids");
  check_device(kOp, "block_table", block_table, x);
  check_rank(kOp, "act_seqs", act_seqs, 1, "[B]");
  check_size(kOp, "act_seqs", act_seqs, 0, x.sym_size(0), "B of x");
  check_dtype(kOp, "act_seqs", act_seqs, at::kInt, "keys of each sequence");
  check_device(kOp, "act_seqs", act_seqs, x);

  return at::empty_symint({x.sym_size(0), x.sym_size(1), N1, L}, x.options());
}

Tensor rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
  const Tensor x32 = x.to(at::kFloat);
  const Tensor scale = at::rsqrt(x32.square().mean(-1, /*keepdim=*/true) + eps);
  return (x32 * scale).to(x.scalar_type()) * gamma;
}

// (first, second) members of each pair, rotated; sin and cos [B, S1, R] repeat their angles twice
Tensor rotate(const Tensor& first, const Tensor& second, const Tensor& sin, const Tensor& cos) {
  const int64_t half = sin.size(-1) / 2;
  const Tensor s = sin.narrow(-1, 0, half).to(at::kFloat).unsqueeze(2);
  const Tensor c = cos.narrow(-1, 0, half).to(at::kFloat).unsqueeze(2);
  const Tensor a = first.to(at::kFloat), b = second.to(at::kFloat);
  return at::cat({a * c - b * s, b * c + a * s}, -1).to(first.scalar_type());
}

// MLA: pairs (x0, x1), (x2, x3), ...; the first members come out first
Tensor rope_interleaved(const Tensor& x, const Tensor& sin, const Tensor& cos) {
  return rotate(x.slice(-1, 0, std::nullopt, 2), x.slice(-1, 1, std::nullopt, 2), sin, cos);
}

// indexer of DeepSeek-V3.2: pairs (x_i, x_{i + R/2}) of the first R dims
Tensor rope_half_split(const Tensor& x, const Tensor& sin, const Tensor& cos) {
  const int64_t half = sin.size(-1) / 2;
  const Tensor rotated = rotate(x.narrow(-1, 0, half), x.narrow(-1, half, half), sin, cos);
  return at::cat({rotated, x.narrow(-1, 2 * half, x.size(-1) - 2 * half)}, -1);
}

// cache[slot] = row; a slot outside the cache (-1: padding) is not written
void write_cache(const Tensor& cache, const Tensor& rows, const Tensor& cache_index) {
  const Tensor slots = cache_index.to(at::kLong).contiguous(), source = rows.contiguous();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t block_size = cache.size(1), bytes = cache.size(3) * cache.element_size();
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  const char* from = static_cast<const char*>(source.const_data_ptr());
  const Rows strides(cache);
  for (int64_t i = 0; i < slots.numel(); ++i) {
    if (slot[i] < 0 || slot[i] >= cache.size(0) * block_size) continue;
    const KeyMap::Slot where{slot[i] / block_size, slot[i] % block_size, 1, true};
    std::memcpy(to + strides.offset(where) * cache.element_size(), from + i * bytes, bytes);
  }
}

Tensor npu_sparse_attention_pto_cpu(
    const Tensor& x, const Tensor& w_dq, const Tensor& w_uq_qr, const Tensor& w_uk,
    const Tensor& w_dkv_kr, const Tensor& gamma_cq, const Tensor& gamma_ckv, const Tensor& sin,
    const Tensor& cos, const Tensor& cache_index, const Tensor& kv_cache, const Tensor& kr_cache,
    const Tensor& block_table, const Tensor& act_seqs, const Tensor& w_idx_qb,
    const Tensor& w_idx_k, const Tensor& w_idx_proj, const Tensor& in_gamma_k,
    const Tensor& in_beta_k, const Tensor& index_k_cache, std::optional<double> softmax_scale,
    double eps, int64_t sparse_count) {
  const Tensor out = npu_sparse_attention_pto_contract(
      x, w_dq, w_uq_qr, w_uk, w_dkv_kr, gamma_cq, gamma_ckv, sin, cos, cache_index, kv_cache,
      kr_cache, block_table, act_seqs, w_idx_qb, w_idx_k, w_idx_proj, in_gamma_k, in_beta_k,
      index_k_cache, softmax_scale, eps, sparse_count);
  if (out.numel() == 0) return out;
  const int64_t heads = w_uk.size(0), nope = w_uk.size(1), latent = w_uk.size(2);
  const int64_t rope = kr_cache.size(3);
  const int64_t index_heads = w_idx_proj.size(1), index_dim = w_idx_k.size(1);

  const Tensor cq = rms_norm(at::matmul(x, w_dq), gamma_cq, eps);
  const Tensor q = at::matmul(cq, w_uq_qr).unflatten(-1, {heads, nope + rope});
  const Tensor q_latent = at::einsum("bshp,hpl->bshl", {q.narrow(-1, 0, nope), w_uk});
  const Tensor q_rope = rope_interleaved(q.narrow(-1, nope, rope), sin, cos);
  const Tensor kv = at::matmul(x, w_dkv_kr);
  write_cache(kv_cache, rms_norm(kv.narrow(-1, 0, latent), gamma_ckv, eps), cache_index);
  write_cache(kr_cache, rope_interleaved(kv.narrow(-1, latent, rope).unsqueeze(2), sin, cos),
              cache_index);

  // both queries come from the normed latent; the index key has a LayerNorm, in float32, before
  // RoPE
  const Tensor q_index =
      rope_half_split(at::matmul(cq, w_idx_qb).unflatten(-1, {index_heads, index_dim}), sin, cos);
  const Tensor k_index =
      at::layer_norm(at::matmul(x, w_idx_k).to(at::kFloat), {index_dim}, in_gamma_k.to(at::kFloat),
                     in_beta_k.to(at::kFloat), kLayerNormEps)
          .to(x.scalar_type());
  write_cache(index_k_cache, rope_half_split(k_index.unsqueeze(2), sin, cos), cache_index);
  const Tensor weights = at::matmul(x.to(at::kFloat), w_idx_proj.to(at::kFloat)) *
                         (1.0 / std::sqrt(static_cast<double>(index_heads * index_dim)));

  const Tensor indices =
      npu_lightning_indexer_pto_cpu(q_index, index_k_cache, weights, std::nullopt, act_seqs,
                                    block_table, "BSND", "PA_BSND", sparse_count, 3);
  const double scale = softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(nope + rope)));
  return npu_sparse_flash_attention_pto_cpu(q_latent, kv_cache, std::nullopt, indices, scale,
                                            block_table, std::nullopt, act_seqs, q_rope, kr_cache,
                                            1, "BSND", "PA_BSND", 3);
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl("npu_sparse_attention_pto", &npu_sparse_attention_pto_cpu);
}

TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl("npu_sparse_attention_pto", &npu_sparse_attention_pto_contract);
}

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("npu_sparse_attention_pto", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto

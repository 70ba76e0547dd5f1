// Layer ops of the streams of hyper-connections.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/streams.h"
#include "contract.h"

namespace custom_pypto {

namespace {

// N of streams
c10::SymInt count_of(const char* op, const Tensor& streams) {
  Argument(op, "streams", streams).rank(4, "[B, S, N, D]").dtype(kFloating);
  return streams.sym_size(2);
}

// The weights of a hyper-connection of `width` numbers of a token and so many scales.
StreamWeights stream_weights(const char* op, const Tensor& streams, const Tensor& weight,
                             const Tensor& base, const Tensor& scale, const c10::SymInt& width,
                             const char* width_is, int64_t scales, double eps, double norm_eps) {
  Argument(op, "weight", weight)
      .rank(2, "[W, N D]")
      .size(0, width, width_is)
      .size(1, streams.sym_size(2) * streams.sym_size(3), "N D of streams")
      .dtype(at::kFloat)
      .device_of(streams);
  Argument(op, "base", base)
      .rank(1, "[W]")
      .size(0, width, width_is)
      .dtype(at::kFloat)
      .device_of(streams);
  Argument(op, "scale", scale)
      .rank(1, "[scales]")
      .size(0, scales, scales == 1 ? "of pre" : "of pre, post and comb")
      .dtype(at::kFloat)
      .device_of(streams);
  return {.weight = weight.contiguous(),
          .base = base.contiguous(),
          .scale = scale.contiguous(),
          .eps = static_cast<float>(eps),
          .norm_eps = static_cast<float>(norm_eps)};
}

}  // namespace

template <bool computes>
std::tuple<Tensor, Tensor, Tensor> hyper_connection(const Tensor& streams, const Tensor& weight,
                                                    const Tensor& base, const Tensor& scale,
                                                    int64_t iterations, double eps,
                                                    double norm_eps) {
  constexpr char kOp[] = "hyper_connection";
  const c10::SymInt count = count_of(kOp, streams);
  const StreamWeights weights =
      stream_weights(kOp, streams, weight, base, scale, (2 + count) * count, "(2 + N) N of streams",
                     3, eps, norm_eps);
  // a caller's number must not keep a thread for hours
  CHECK_ARGUMENT(iterations >= 0 && iterations <= 1000, kOp, "iterations", "from 0 to 1000",
                 iterations);
  const c10::SymInt batch = streams.sym_size(0), tokens = streams.sym_size(1);
  const Tensor post = empty({batch, tokens, count}, base.options());
  const Tensor comb = empty({batch, tokens, count, count}, base.options());
  const Tensor collapsed = empty({batch, tokens, streams.sym_size(3)}, streams.options());
  if (computes && post.numel() != 0) {
    connect_streams({.streams = streams,
                     .weights = weights,
                     .iterations = iterations,
                     .post = post,
                     .comb = comb,
                     .collapsed = collapsed});
  }
  return {post, comb, collapsed};
}

template <bool computes>
Tensor collapse_streams(const Tensor& streams, const Tensor& weight, const Tensor& base,
                        const Tensor& scale, double eps, double norm_eps) {
  constexpr char kOp[] = "collapse_streams";
  const c10::SymInt count = count_of(kOp, streams);
  const StreamWeights weights =
      stream_weights(kOp, streams, weight, base, scale, count, "N of streams", 1, eps, norm_eps);
  const Tensor out =
      empty({streams.sym_size(0), streams.sym_size(1), streams.sym_size(3)}, streams.options());
  if (computes && out.numel() != 0) custom_pypto::collapse_streams(streams, weights, out);
  return out;
}

template <bool computes>
Tensor mix_streams(const Tensor& streams, const Tensor& x, const Tensor& post, const Tensor& comb) {
  constexpr char kOp[] = "mix_streams";
  const c10::SymInt count = count_of(kOp, streams);
  Argument(kOp, "x", x)
      .rank(3, "[B, S, D]")
      .sizes(streams, 2, "as streams")
      .size(2, streams.sym_size(3), "D of streams")
      .dtype(streams.scalar_type(), "dtype of streams")
      .device_of(streams);
  Argument(kOp, "post", post)
      .rank(3, "[B, S, N]")
      .sizes(streams, 3, "as streams")
      .dtype(at::kFloat)
      .device_of(streams);
  Argument(kOp, "comb", comb)
      .rank(4, "[B, S, N, N]")
      .sizes(streams, 3, "as streams")
      .size(3, count, "N of streams")
      .dtype(at::kFloat)
      .device_of(streams);
  const Tensor out = empty(streams.sym_sizes(), streams.options());
  if (computes && out.numel() != 0) {
    custom_pypto::mix_streams(streams, x, post.contiguous(), comb.contiguous(), out);
  }
  return out;
}

REGISTER_OP(hyper_connection,
            "(Tensor streams, Tensor weight, Tensor base, Tensor scale, int iterations, float eps, "
            "float norm_eps) -> (Tensor post, Tensor comb, Tensor collapsed)")

REGISTER_OP(collapse_streams,
            "(Tensor streams, Tensor weight, Tensor base, Tensor scale, float eps, float norm_eps)"
            " -> Tensor")

REGISTER_OP(mix_streams, "(Tensor streams, Tensor x, Tensor post, Tensor comb) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* op : {"hyper_connection", "collapse_streams", "mix_streams"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto

// Functions of streams and of the rows of rings, for the patched models, an op each in place of a
// dozen of torch's; CPU only, no gradient.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/row_functions.h"
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
  const c10::SymInt batch = streams.sym_size(0), tokens = streams.sym_size(1);
  const Tensor post = at::empty_symint({batch, tokens, count}, base.options());
  const Tensor comb = at::empty_symint({batch, tokens, count, count}, base.options());
  const Tensor collapsed =
      at::empty_symint({batch, tokens, streams.sym_size(3)}, streams.options());
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
  const Tensor out = at::empty_symint(
      {streams.sym_size(0), streams.sym_size(1), streams.sym_size(3)}, streams.options());
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
  const Tensor out = at::empty_symint(streams.sym_sizes(), streams.options());
  if (computes && out.numel() != 0) {
    custom_pypto::mix_streams(streams, x, post.contiguous(), comb.contiguous(), out);
  }
  return out;
}

// D of a row: with overlap, values, gates and bias are twice as wide.
template <bool computes>
std::tuple<Tensor, Tensor> pool_groups(const Tensor& state, const Tensor& blocks,
                                       const Tensor& values, const Tensor& bias,
                                       const Tensor& start, const Tensor& lengths, int64_t width) {
  constexpr char kOp[] = "pool_groups";
  Argument(kOp, "state", state)
      .rank(4, "[blocks, ring, 1, W]")
      .size(2, 1, "one head")
      .dtype(kFloating);
  Argument(kOp, "values", values)
      .rank(3, "[B, S, W]")
      .size(2, state.sym_size(3), "W of state")
      .dtype(state.scalar_type(), "dtype of state")
      .device_of(state);
  Argument(kOp, "blocks", blocks)
      .rank(1, "[B]")
      .sizes(values, 1, "as values")
      .dtype(at::kInt)
      .device_of(state);
  Argument(kOp, "bias", bias).rank(2, "[r, W / 2]").dtype(at::kFloat).device_of(state);
  CHECK_ARGUMENT(bias.sym_size(0) > 0 && state.sym_size(1) > 0, kOp, "state and bias",
                 "of at least one row", state.sym_sizes(), " and ", bias.sym_sizes());
  CHECK_ARGUMENT(bias.sym_size(1) * 2 == state.sym_size(3) &&
                     (bias.sym_size(1) == width || bias.sym_size(1) == 2 * width),
                 kOp, "bias.size(1)", "half of W, and width or twice that", bias.sym_size(1));
  for (const auto& [name, tensor] : {std::pair("start", &start), std::pair("lengths", &lengths)}) {
    Argument(kOp, name, *tensor)
        .rank(1, "[B]")
        .sizes(values, 1, "as values")
        .dtype(at::kInt)
        .device_of(state);
  }
  const c10::SymInt batch = values.sym_size(0), rate = bias.sym_size(0);
  const c10::SymInt count = (values.sym_size(1) + rate - 1) / rate;
  const Tensor sums = at::empty_symint({batch, count, width}, bias.options());
  const Tensor complete = at::empty_symint({batch, count}, bias.options().dtype(at::kBool));
  if (computes && complete.numel() != 0) {
    custom_pypto::pool_groups({.state = state.contiguous(),
                               .blocks = blocks.contiguous(),
                               .values = values.contiguous(),
                               .bias = bias.contiguous(),
                               .start = start.contiguous(),
                               .lengths = lengths.contiguous(),
                               .sums = sums,
                               .complete = complete});
  }
  return {sums, complete};
}

template <bool computes>
Tensor cache_slots(const Tensor& table, const Tensor& rows, const Tensor& valid, int64_t block) {
  constexpr char kOp[] = "cache_slots";
  Argument(kOp, "rows", rows).rank(2, "[B, n]").dtype(at::kLong);
  Argument(kOp, "valid", valid).rank(2, "[B, n]").sizes(rows, 2, "as rows").dtype(at::kBool);
  Argument(kOp, "table", table)
      .rank(2, "[B, blocks]")
      .sizes(rows, 1, "as rows")
      .dtype(at::kInt)
      .device_of(rows);
  CHECK_ARGUMENT(block >= 1, kOp, "block", "at least 1", block);
  const Tensor slots = at::empty_symint({rows.sym_numel()}, rows.options());
  if (computes && slots.numel() != 0) {
    find_slots({.table = table.contiguous(),
                .rows = rows.contiguous(),
                .valid = valid.contiguous(),
                .block = block,
                .slots = slots});
  }
  return slots;
}

template <bool computes>
Tensor window_rows(const Tensor& positions, const Tensor& valid, const OptionalTensor& indices,
                   int64_t window, int64_t ring, int64_t rate, c10::SymInt count) {
  constexpr char kOp[] = "window_rows";
  Argument(kOp, "positions", positions).rank(2, "[B, S]").dtype(at::kLong);
  Argument(kOp, "valid", valid)
      .rank(2, "[B, S]")
      .sizes(positions, 2, "as positions")
      .dtype(at::kBool)
      .device_of(positions);
  CHECK_ARGUMENT(window >= 0 && ring >= 1 && rate >= 1 && count >= 0, kOp, "window and count",
                 "at least 0, ring and rate at least 1", window, ", ", count, ", ", ring, " and ",
                 rate);
  if (indices) {
    Argument(kOp, "indices", *indices)
        .rank(3, "[B, S, count]")
        .sizes(positions, 2, "as positions")
        .size(2, count, "count")
        .dtype(at::kInt)
        .device_of(positions);
  }
  const Tensor out =
      at::empty_symint({positions.sym_size(0), positions.sym_size(1), window + count},
                       positions.options().dtype(at::kInt));
  if (computes && out.numel() != 0) {
    const OptionalTensor rows = indices ? OptionalTensor(indices->contiguous()) : std::nullopt;
    find_rows({.positions = positions.contiguous(),
               .valid = valid.contiguous(),
               .indices = rows,
               .window = window,
               .ring = ring,
               .rate = rate,
               .out = out});
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

REGISTER_OP(pool_groups,
            "(Tensor state, Tensor blocks, Tensor values, Tensor bias, Tensor start, "
            "Tensor lengths, int width) -> (Tensor sums, Tensor complete)")

REGISTER_OP(cache_slots, "(Tensor table, Tensor rows, Tensor valid, int block) -> Tensor")

REGISTER_OP(window_rows,
            "(Tensor positions, Tensor valid, Tensor? indices, int window, int ring, int rate, "
            "SymInt count) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* op : {"hyper_connection", "collapse_streams", "mix_streams", "pool_groups",
                         "cache_slots", "window_rows"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto

// Layer ops of the compressed rows of groups of tokens, and of which rows tokens write and read.
#include "../tasks/compressed_rows.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "contract.h"

namespace custom_pypto {

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
  CHECK_ARGUMENT(width >= 1, kOp, "width", "at least 1", width);
  CHECK_ARGUMENT(bias.sym_size(1) * 2 == state.sym_size(3) &&
                     (bias.sym_size(1) == width || bias.sym_size(1) - width == width),
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
  const Tensor sums = empty({batch, count, width}, bias.options());
  const Tensor complete = empty({batch, count}, bias.options().dtype(at::kBool));
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
  Argument(kOp, "valid", valid)
      .rank(2, "[B, n]")
      .sizes(rows, 2, "as rows")
      .dtype(at::kBool)
      .device_of(rows);
  Argument(kOp, "table", table)
      .rank(2, "[B, blocks]")
      .sizes(rows, 1, "as rows")
      .dtype(at::kInt)
      .device_of(rows);
  // so that block ids times this fit
  CHECK_ARGUMENT(block >= 1 && block <= INT32_MAX, kOp, "block", "from 1 to 2^31 - 1", block);
  const Tensor slots = empty({rows.sym_numel()}, rows.options());
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
  CHECK_ARGUMENT(window >= 0 && count >= 0 && ring >= 1 && rate >= 1, kOp, "window and count",
                 "at least 0, ring and rate at least 1", window, ", ", count, ", ", ring, " and ",
                 rate);
  // rows are int32
  CHECK_ARGUMENT(window <= INT32_MAX && count <= INT32_MAX && ring <= INT32_MAX, kOp,
                 "window, count and ring", "at most 2^31 - 1", window, ", ", count, " and ", ring);
  if (indices) {
    Argument(kOp, "indices", *indices)
        .rank(3, "[B, S, count]")
        .sizes(positions, 2, "as positions")
        .size(2, count, "count")
        .dtype(at::kInt)
        .device_of(positions);
  }
  const Tensor out = empty({positions.sym_size(0), positions.sym_size(1), window + count},
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

REGISTER_OP(pool_groups,
            "(Tensor state, Tensor blocks, Tensor values, Tensor bias, Tensor start, "
            "Tensor lengths, int width) -> (Tensor sums, Tensor complete)")

REGISTER_OP(cache_slots, "(Tensor table, Tensor rows, Tensor valid, int block) -> Tensor")

REGISTER_OP(window_rows,
            "(Tensor positions, Tensor valid, Tensor? indices, int window, int ring, int rate, "
            "SymInt count) -> Tensor")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* op : {"pool_groups", "cache_slots", "window_rows"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto

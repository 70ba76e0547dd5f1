// The compressed rows of groups of tokens, and which rows tokens write and read.
#pragma once

#include "tensor.h"

namespace custom_pypto {

struct GroupParams {
  const Tensor& state;    // [blocks, ring, 1, W], contiguous: token t of a sequence in row t % ring
  const Tensor& blocks;   // [B] int32, contiguous: of each sequence; it may be any number
  const Tensor& values;   // [B, S, W] in the dtype of state: new tokens, padding first
  const Tensor& bias;     // [r, W / 2] float32, contiguous
  const Tensor& start;    // [B] int32, contiguous: tokens before the new ones
  const Tensor& lengths;  // [B] int32, contiguous: with them
  Tensor sums;            // [B, n, D] float32, contiguous: D = W / 2, with overlap W / 4
  Tensor complete;        // [B, n] bool, contiguous
};

// The rows of the groups of r tokens that the new tokens complete, as in
// custom_pypto/rows/compressed.py; 0 for those that they leave incomplete, or whose tokens are all
// in a block outside of the state.
void pool_groups(const GroupParams& p);

struct SlotParams {
  const Tensor& table;  // [B, blocks] int32, contiguous: of each sequence
  const Tensor& rows;   // [B, n] int64, contiguous: of the sequence
  const Tensor& valid;  // [B, n] bool, contiguous
  int64_t block;        // rows of a block
  Tensor slots;         // [B, n] int64, contiguous
};

// The place of each row in the blocks of its sequence; 0 for those that are not valid or do not
// fit.
void find_slots(const SlotParams& p);

struct WindowParams {
  const Tensor& positions;        // [B, S] int64, contiguous
  const Tensor& valid;            // [B, S] bool, contiguous
  const OptionalTensor& indices;  // [B, S, K] int32, contiguous: rows; or null: the first K
  int64_t window, ring;           // tokens before and with each one; rows of the ring
  int64_t rate;                   // tokens of a row behind the ring
  Tensor out;                     // [B, S, window + K] int32, contiguous
};

// The rows that each token sees: of its window in the ring, -2 for none, which attention skips;
// then behind the ring, -1 for none.
void find_rows(const WindowParams& p);

}  // namespace custom_pypto

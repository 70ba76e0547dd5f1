// Prefetches while the tile registers of AMX multiply.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kStep = 32;  // elements of a row that one dot of tiles takes

// Prefetches the rows of the next chunk, the same number of lines in each step: one line of 16
// rows, then the next line.
class Ahead {
 public:
  Ahead(const Chunk<uint16_t>* next, int steps) : next_(next), rows_(next ? next->n : 0) {
    if (next) dims_ = next->latent + next->rope;
    lines_ = ((rows_ + 15) / 16 * 16 * (dims_ / kStep) + steps - 1) / steps;
  }

  INLINE void step() {
    for (int i = 0; i < lines_ && group_ < rows_; ++i) {
      const int row = group_ + row_;
      if (row < rows_) {
        __builtin_prefetch(dim_ < next_->latent ? next_->keys[row] + dim_
                                                : next_->ropes[row] + dim_ - next_->latent,
                           0, 2);
      }
      if (++row_ < 16) continue;
      row_ = 0;
      if ((dim_ += kStep) < dims_) continue;
      dim_ = 0;
      group_ += 16;
    }
  }

 private:
  const Chunk<uint16_t>* next_;
  int rows_, lines_, dims_ = 0;
  int group_ = 0, row_ = 0, dim_ = 0;
};

}  // namespace
}  // namespace custom_pypto::cpu

// Shared code of the ops' CPU kernels: the inner loops for this CPU, and threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#endif

#include "../cpu/kernels.h"

namespace custom_pypto {

// The inner loops for this CPU, selected once; CUSTOM_PYPTO_CPU_ISA selects another set.
const cpu::Kernels& kernels();

// The bfloat16 kernels for a shape, tiles or vectors; null: its elements are widened.
inline const cpu::Bf16Kernels* index_kernels(int64_t dims) {
  if (kernels().tiles && cpu::fills_tiles(dims)) return kernels().tiles;
  return kernels().widens_index ? nullptr : kernels().bf16;
}
inline const cpu::Bf16Kernels* attention_kernels(int64_t latent, int64_t rope) {
  return kernels().tiles && cpu::fills_tiles(latent, rope) ? kernels().tiles : kernels().bf16;
}

// Holds a thread's tile registers while kernels use them. Torch's own kernels change them, so none
// may run meanwhile.
class TileRegisters {
 public:
  explicit TileRegisters(const cpu::Bf16Kernels* kernels) {
    if (!kernels || !kernels->enter) return;
    kernels->enter();
    leave_ = kernels->leave;
  }
  ~TileRegisters() {
    if (leave_) leave_();
  }
  TileRegisters(const TileRegisters&) = delete;

 private:
  void (*leave_)() = nullptr;
};

// Runs task(scratch, i) for every i < count. Free threads take the next task: a static split would
// wait for the slowest core. make_scratch() creates the scratch buffers of one thread.
template <typename MakeScratch, typename Task>
void run_tasks(int64_t count, const MakeScratch& make_scratch, const Task& task) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  const auto work = [&] {
    auto scratch = make_scratch();
    for (int64_t i = next++; i < count; i = next++) task(scratch, i);
  };
#if defined(__SANITIZE_THREAD__)
  // libgomp is not built with ThreadSanitizer, which would miss libgomp's barriers
  std::vector<std::thread> team;
  for (int64_t t = 0; t < threads; ++t) team.emplace_back(work);
  for (std::thread& thread : team) thread.join();
#else
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(); });
#endif
}

}  // namespace custom_pypto

// The threads of the CPU kernels.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#endif

namespace custom_pypto {

// Reading so many takes a thread longer than it costs to share the work with another one.
constexpr int64_t kBytesOfThread = 1 << 17;

// The threads for work that reads so many bytes. Each waits for the others at the end: on a busy
// machine, for a core.
inline int64_t threads_for(int64_t bytes) {
  return std::clamp<int64_t>(bytes / kBytesOfThread, 1, at::get_num_threads());
}

// Runs task(scratch, i) for every i < count. Free threads take the next task: a static split would
// wait for the slowest core. make_scratch() creates the scratch buffers of one thread.
template <typename MakeScratch, typename Task>
void run_tasks(int64_t count, const MakeScratch& make_scratch, const Task& task,
               int64_t most_threads = at::get_num_threads()) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min(count, most_threads);
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

// The threads of the CPU kernels.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "crowd.h"
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

// The most threads of a call, and whether it has them on a crowded machine, too.
struct Team {
  int64_t most = at::get_num_threads();
  bool always = false;
};

// Runs task(scratch, i) for every i < count. Free threads take the next task: a static split would
// wait for the slowest core. make_scratch() creates the scratch buffers of one thread.
template <typename MakeScratch, typename Task>
void run_tasks(int64_t count, const MakeScratch& make_scratch, const Task& task, Team team = {}) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min(count, team.most);
  const auto work = [&] {
    auto scratch = make_scratch();
    for (int64_t i = next++; i < count; i = next++) task(scratch, i);
  };
#if defined(__SANITIZE_THREAD__)
  // libgomp is not built with ThreadSanitizer, which would miss libgomp's barriers
  std::vector<std::thread> workers;
  for (int64_t t = 0; t < threads; ++t) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
#else
  if (threads <= 1 || at::in_parallel_region()) return work();
  const Crowd::Time begin = Crowd::now();
  if (!team.always && crowd().crowded(begin)) return work();
  Crowd::Time idle = begin;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    work();
    if (at::get_thread_num() == 0) idle = Crowd::now();
  });
  crowd().report(begin, idle, Crowd::now(), threads);
#endif
}

}  // namespace custom_pypto

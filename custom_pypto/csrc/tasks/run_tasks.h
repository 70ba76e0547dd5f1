// The threads of the CPU kernels.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "crowd.h"
#if defined(__SANITIZE_THREAD__)
#include <thread>
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

// Consecutive tasks, which often read consecutive memory.
struct alignas(64) TaskRange {
  std::atomic<int64_t> next;
  int64_t end;
};

// Runs task(scratch, i) for every i < count. A thread takes the tasks of its own range, so that the
// CPU reads ahead of it, and then those that others have not begun: a static split would wait for
// the slowest core. make_scratch() creates the scratch buffers of one thread.
template <typename MakeScratch, typename Task>
void run_tasks(int64_t count, const MakeScratch& make_scratch, const Task& task, Team team = {}) {
  const int64_t threads = std::clamp<int64_t>(count, 1, team.most);
  std::vector<TaskRange> ranges(threads);
  for (int64_t t = 0; t < threads; ++t) {
    ranges[t].next = t * count / threads;
    ranges[t].end = (t + 1) * count / threads;
  }
  const auto work = [&](int64_t own) {
    auto scratch = make_scratch();
    for (int64_t t = own; t < own + threads; ++t) {
      TaskRange& range = ranges[t % threads];
      // not by increments alone, for which threads that end together would wait
      while (range.next.load(std::memory_order_relaxed) < range.end) {
        if (const int64_t i = range.next++; i < range.end) task(scratch, i);
      }
    }
  };
#if defined(__SANITIZE_THREAD__)
  // libgomp is not built with ThreadSanitizer, which would miss libgomp's barriers
  std::vector<std::thread> workers;
  for (int64_t t = 0; t < threads; ++t) workers.emplace_back(work, t);
  for (std::thread& worker : workers) worker.join();
#else
  if (threads <= 1 || at::in_parallel_region()) return work(0);
  const Crowd::Time begin = Crowd::now();
  if (!team.always && crowd().crowded(begin)) return work(0);
  Crowd::Time idle = begin;
  at::parallel_for(0, threads, 1, [&](int64_t own, int64_t) {
    work(own);
    if (at::get_thread_num() == 0) idle = Crowd::now();
  });
  crowd().report(begin, idle, Crowd::now(), threads);
#endif
}

}  // namespace custom_pypto

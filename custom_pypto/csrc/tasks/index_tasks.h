// How an indexer splits its work into tasks of tokens and keys; what it keeps of each token's
// scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "params.h"
#include "run_tasks.h"
#include "sequences.h"
#include "topk.h"

namespace custom_pypto {

// Operands turns the tokens and keys of a task into scores. It has Scratch(operands, tokens), a
// thread's buffers, and
//   pack(token, place, scratch)        stores a query token at one of the places 0 to tokens - 1
//   read(slot, n, next, scratch)       takes the n keys from `slot` on; the kMaxKeys keys from
//                                      `next` on will likely follow, null: unknown
//   score(place, n, scratch, scores)   the scores of the first n of these keys
template <typename Operands>
class IndexTasks {
 public:
  IndexTasks(const SequenceParams& p, const Operands& operands)
      : operands_(operands), sequences_(read_sequences(p)), key_map_(p), mode_(p.sparse_mode) {
    int64_t longest = 1;
    for (const Sequence& s : sequences_) longest = std::max(longest, s.len_query);
    group_ = std::min(longest, kTokensOfTask);
  }

 protected:
  // Query tokens [first, first + count) of one sequence against the keys [begin, end).
  struct Task {
    int64_t sequence, first, count;
    int64_t begin, end;
  };

  static constexpr int64_t kTokensOfTask = 8;  // maximum; they share the keys they read

  int64_t row(const Task& task, int64_t i) const {
    return sequences_[task.sequence].first_token + task.first + i;
  }

  // Calls f(first token, tokens, keys that the last one sees, sequence) for groups of tokens.
  template <typename F>
  void each_group(const F& f) const {
    for (const Sequence& s : sequences_) {
      for (int64_t i = 0; i < s.len_query; i += group_) {
        const int64_t count = std::min(group_, s.len_query - i);
        f(i, count, s.visible(i + count - 1, mode_), s);
      }
    }
  }

  // Calls f(i, scores, n, first key) for the keys of each token i of the task, in their order.
  template <typename F>
  void score(const Task& task, typename Operands::Scratch& scratch, const F& f) const {
    const Sequence& s = sequences_[task.sequence];
    for (int64_t i = 0; i < task.count; ++i) operands_.pack(row(task, i), i, scratch);
    float scores[cpu::kMaxKeys];
    for (int64_t j = task.begin; j < task.end;) {
      const KeyMap::Slot slot = key_map_.find(s, j);
      const int n = std::min({slot.run, task.end - j, int64_t{cpu::kMaxKeys}});
      if (slot.exists) {
        KeyMap::Slot next;
        operands_.read(slot, n, find_page(s, j + n, task.end, next), scratch);
        for (int64_t i = 0; i < task.count; ++i) {
          const int64_t seen = std::min<int64_t>(n, s.visible(task.first + i, mode_) - j);
          if (seen <= 0) continue;
          operands_.score(i, seen, scratch, scores);
          f(i, scores, seen, j);
        }
      }
      j += n;
    }
  }

  const Operands& operands_;
  std::vector<Sequence> sequences_;
  KeyMap key_map_;
  int64_t mode_;
  int64_t group_;  // tokens per task

 private:
  // `slot`, if kMaxKeys keys from it on are part of the task
  const KeyMap::Slot* find_page(const Sequence& s, int64_t position, int64_t end,
                                KeyMap::Slot& slot) const {
    if (position + cpu::kMaxKeys > end) return nullptr;
    slot = key_map_.find(s, position);
    return slot.exists && slot.run >= cpu::kMaxKeys ? &slot : nullptr;
  }
};

// Finds the best keys of each token.
template <typename Operands>
class Indexer : IndexTasks<Operands> {
  using Base = IndexTasks<Operands>;
  using Task = typename Base::Task;
  using Base::group_;

 public:
  Indexer(const IndexerParams& p, const Operands& operands)
      : Base(p.sequences, operands),
        k_(p.sparse_count),
        out_(p.out.mutable_data_ptr<int32_t>()),
        values_(p.return_value ? p.values.mutable_data_ptr<float>() : nullptr) {
    std::fill_n(out_, p.out.numel(), -1);
    if (values_) p.values.fill_(-INFINITY);
  }

  void run() {
    const std::vector<Task> tasks = plan();
    std::vector<TopK> parts;  // if keys are split: one per task and token
    for (size_t t = 0; split_ && t < tasks.size() * group_; ++t) parts.emplace_back(k_);
    run_tasks(
        tasks.size(), [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t t) {
          const Task& task = tasks[t];
          TopK* best = split_ ? &parts[t * group_] : scratch.best.data();
          for (int64_t i = 0; i < task.count; ++i) best[i].clear();
          this->score(task, scratch.operands,
                      [&](int64_t i, const float* scores, int n, int64_t j) {
                        best[i].push(scores, n, j);
                      });
          for (int64_t i = 0; i < task.count; ++i) {
            split_ ? best[i].shrink() : write(task, i, best[i]);
          }
        });
    if (!split_) return;
    // tasks of the same tokens are consecutive, in key order
    std::vector<size_t> starts;
    for (size_t t = 0; t < tasks.size(); ++t) {
      if (tasks[t].begin == 0) starts.push_back(t);
    }
    starts.push_back(tasks.size());
    run_tasks((starts.size() - 1) * group_, [&] { return TopK(k_); },
              [&](TopK& all, int64_t i) {
                const Task& task = tasks[starts[i / group_]];
                const int64_t token = i % group_;
                if (token >= task.count) return;
                all.clear();
                for (size_t t = starts[i / group_]; t < starts[i / group_ + 1]; ++t) {
                  all.push(parts[t * group_ + token]);
                }
                write(task, token, all);
              });
  }

 private:
  struct Scratch {
    explicit Scratch(const Indexer& indexer) : operands(indexer.operands_, indexer.group_) {
      for (int64_t i = 0; !indexer.split_ && i < indexer.group_; ++i) best.emplace_back(indexer.k_);
    }
    typename Operands::Scratch operands;
    std::vector<TopK> best;
  };

  void write(const Task& task, int64_t i, TopK& best) const {
    const int64_t at = this->row(task, i) * k_;
    best.write(out_ + at, values_ ? values_ + at : nullptr);
  }

  // Groups tokens, which then share their keys. If there are too few groups for the threads, splits
  // their keys. Scores do not depend on the split, so neither does the result.
  std::vector<Task> plan() {
    int64_t groups = 0;
    this->each_group([&](auto...) { ++groups; });
    const int64_t threads = at::get_num_threads();
    const int64_t wanted = threads == 1 ? 1 : 8 * threads;
    split_ = groups < wanted;
    std::vector<Task> tasks;
    this->each_group([&](int64_t first, int64_t count, int64_t visible, const Sequence& s) {
      int64_t step = std::max<int64_t>(visible, 1);
      if (split_) {
        const int64_t pieces = (wanted + groups - 1) / groups;
        step = std::max<int64_t>(1024, ((visible + pieces - 1) / pieces + 127) / 128 * 128);
      }
      for (int64_t begin = 0; begin < visible; begin += step) {
        tasks.push_back(Task{.sequence = s.index,
                             .first = first,
                             .count = count,
                             .begin = begin,
                             .end = std::min(begin + step, visible)});
      }
    });
    return tasks;
  }

  int64_t k_;
  int32_t* out_;
  float* values_;
  bool split_ = false;
};

// The statistics of the softmax of each token's scores over every key that it sees: maximum, and
// sum of the exponentials of the distances to it; -inf and 0 without a key. Keys are not split:
// sums would depend on it.
template <typename Operands>
class IndexStatistics : IndexTasks<Operands> {
  using Base = IndexTasks<Operands>;
  using Task = typename Base::Task;

 public:
  IndexStatistics(const SequenceParams& p, const Operands& operands, const Tensor& max,
                  const Tensor& sum)
      : Base(p, operands),
        max_(max.mutable_data_ptr<float>()),
        sum_(sum.mutable_data_ptr<float>()) {
    max.fill_(-INFINITY);
    sum.zero_();
  }

  void run() {
    std::vector<Task> tasks;
    this->each_group([&](int64_t first, int64_t count, int64_t visible, const Sequence& s) {
      tasks.push_back(
          Task{.sequence = s.index, .first = first, .count = count, .begin = 0, .end = visible});
    });
    using Scratch = typename Operands::Scratch;
    run_tasks(
        tasks.size(), [&] { return Scratch(this->operands_, this->group_); },
        [&](Scratch& scratch, int64_t t) {
          double sums[Base::kTokensOfTask] = {};
          this->score(tasks[t], scratch, [&](int64_t i, const float* scores, int n, int64_t) {
            float& max = max_[this->row(tasks[t], i)];
            const float most = std::max(max, *std::max_element(scores, scores + n));
            if (most > max) sums[i] *= std::exp(max - most);
            max = most;
            for (int j = 0; j < n; ++j) sums[i] += scores[j] == max ? 1 : std::exp(scores[j] - max);
          });
          for (int64_t i = 0; i < tasks[t].count; ++i) {
            sum_[this->row(tasks[t], i)] = static_cast<float>(sums[i]);
          }
        });
  }

 private:
  float *max_, *sum_;
};

}  // namespace custom_pypto

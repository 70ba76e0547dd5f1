// How an indexer splits its work into tasks of tokens and keys, and finds the best keys of each
// token.
#pragma once

#include <algorithm>
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
class Indexer {
 public:
  Indexer(const IndexerParams& p, const Operands& operands)
      : operands_(operands),
        sequences_(read_sequences(p.sequences)),
        key_map_(p.sequences),
        k_(p.sparse_count),
        mode_(p.sequences.sparse_mode),
        out_(p.out.mutable_data_ptr<int32_t>()) {
    std::fill_n(out_, p.out.numel(), -1);
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
          score(task, scratch, best);
          for (int64_t i = 0; i < task.count; ++i) {
            split_ ? best[i].shrink() : best[i].write(out_row(task, i));
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
                all.write(out_row(task, token));
              });
  }

 private:
  // Query tokens [first, first + count) of one sequence against the keys [begin, end).
  struct Task {
    int64_t sequence, first, count;
    int64_t begin, end;
  };

  static constexpr int64_t kTokensOfTask = 8;  // maximum; they share the keys they read

  struct Scratch {
    explicit Scratch(const Indexer& indexer) : operands(indexer.operands_, indexer.group_) {
      for (int64_t i = 0; !indexer.split_ && i < indexer.group_; ++i) best.emplace_back(indexer.k_);
    }
    typename Operands::Scratch operands;
    std::vector<TopK> best;
  };

  int32_t* out_row(const Task& task, int64_t i) const {
    const int64_t token = sequences_[task.sequence].first_token + task.first + i;
    return out_ + token * k_;
  }

  // Groups tokens, which then share their keys. If there are too few groups for the threads, splits
  // their keys. Scores do not depend on the split, so neither does the result.
  std::vector<Task> plan() {
    int64_t longest = 1, groups = 0;
    for (const Sequence& s : sequences_) longest = std::max(longest, s.len_query);
    group_ = std::min(longest, kTokensOfTask);
    for (const Sequence& s : sequences_) groups += (s.len_query + group_ - 1) / group_;
    const int64_t threads = at::get_num_threads();
    const int64_t wanted = threads == 1 ? 1 : 8 * threads;
    split_ = groups < wanted;
    std::vector<Task> tasks;
    for (const Sequence& s : sequences_) {
      for (int64_t i = 0; i < s.len_query; i += group_) {
        const int64_t count = std::min(group_, s.len_query - i);
        const int64_t visible = s.visible(i + count - 1, mode_);
        int64_t step = std::max<int64_t>(visible, 1);
        if (split_) {
          const int64_t pieces = (wanted + groups - 1) / groups;
          step = std::max<int64_t>(1024, ((visible + pieces - 1) / pieces + 127) / 128 * 128);
        }
        for (int64_t begin = 0; begin < visible; begin += step) {
          tasks.push_back(Task{.sequence = s.index,
                               .first = i,
                               .count = count,
                               .begin = begin,
                               .end = std::min(begin + step, visible)});
        }
      }
    }
    return tasks;
  }

  void score(const Task& task, Scratch& scratch, TopK* best) const {
    const Sequence& s = sequences_[task.sequence];
    for (int64_t i = 0; i < task.count; ++i) {
      operands_.pack(s.first_token + task.first + i, i, scratch.operands);
    }
    float scores[cpu::kMaxKeys];
    for (int64_t j = task.begin; j < task.end;) {
      const KeyMap::Slot slot = key_map_.find(s, j);
      const int n = std::min({slot.run, task.end - j, int64_t{cpu::kMaxKeys}});
      if (slot.exists) {
        KeyMap::Slot next;
        operands_.read(slot, n, find_page(s, j + n, task.end, next), scratch.operands);
        for (int64_t i = 0; i < task.count; ++i) {
          const int64_t seen = std::min<int64_t>(n, s.visible(task.first + i, mode_) - j);
          if (seen <= 0) continue;
          operands_.score(i, seen, scratch.operands, scores);
          best[i].push(scores, seen, j);
        }
      }
      j += n;
    }
  }

  // `slot`, if kMaxKeys keys from it on are part of the task
  const KeyMap::Slot* find_page(const Sequence& s, int64_t position, int64_t end,
                                KeyMap::Slot& slot) const {
    if (position + cpu::kMaxKeys > end) return nullptr;
    slot = key_map_.find(s, position);
    return slot.exists && slot.run >= cpu::kMaxKeys ? &slot : nullptr;
  }

  const Operands& operands_;
  std::vector<Sequence> sequences_;
  KeyMap key_map_;
  int64_t k_, mode_;
  int32_t* out_;
  bool split_ = false;
  int64_t group_ = 1;  // tokens per task
};

}  // namespace custom_pypto

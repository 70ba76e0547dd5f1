// What the ops share: checks whose messages name op and argument, layouts, and where a sequence's
// tokens and keys are. Checks run on symbolic sizes, so that Meta and CPU run the same ones.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string_view>
#if defined(__SANITIZE_THREAD__)
#include <thread>
#endif
#include <vector>

#include "cpu/kernels.h"

namespace custom_pypto {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// "op: argument must be expected, got actual"
#define CHECK_ARGUMENT(condition, op, argument, expected, ...) \
  TORCH_CHECK(condition, op, ": ", argument, " must be ", expected, ", got ", __VA_ARGS__)

std::string_view dtype_name(at::ScalarType dtype);  // as Python prints it: float32

// None arrives as a tensor that is not defined; check_rank, the first check of a tensor, includes
// it.
void check_given(const char* op, const char* name, const Tensor& tensor);
void check_rank(const char* op, const char* name, const Tensor& tensor, int64_t rank,
                const char* shape);
void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                const c10::SymInt& expected, const char* why);
void check_multiple_of_16(const char* op, const char* name, const Tensor& tensor, int64_t dim);
void check_floating(const char* op, const char* name, const Tensor& tensor);
void check_dtype(const char* op, const char* name, const Tensor& tensor, at::ScalarType expected,
                 const char* why);
void check_dtype_or_float32(const char* op, const char* name, const Tensor& tensor,
                            at::ScalarType expected, const char* why);
void check_device(const char* op, const char* name, const Tensor& tensor, const Tensor& query);
void check_dense_rows(const char* op, const char* name, const Tensor& tensor);
void check_sparse_count(const char* op, int64_t sparse_count);
void check_sparse_mode(const char* op, int64_t sparse_mode);
// Logits are scaled in float32, as exponents of 2. A scale that is 0 or infinite there makes NaN of
// what is masked; so does one that is subnormal under torch.set_flush_denormal(True).
constexpr char kScales[] = "from 1e-38 to 2e38 (finite and positive in float32)";
inline bool is_scale(double scale) { return scale >= 1e-38 && scale <= 2e38; }

enum class Layout { kBsnd, kTnd, kPaged };

// What an op calls its key arguments.
struct KeyNames {
  const char* op;
  const char* layout;   // layout_key or layout_kv
  const char* lengths;  // actual_seq_lengths_key or actual_seq_lengths_kv
};

struct Layouts {
  Layout query, key;
  int64_t query_dims() const { return query == Layout::kTnd ? 3 : 4; }
  int64_t key_dims() const { return key == Layout::kTnd ? 3 : 4; }
};

// Checks the layouts, the ranks of query and key, one key head, the block size, lengths and the
// block table.
Layouts check_layouts(const KeyNames& names, c10::string_view layout_query,
                      c10::string_view layout_key, const Tensor& query, const Tensor& key,
                      const OptionalTensor& lengths_query, const OptionalTensor& lengths_key,
                      const OptionalTensor& block_table);

// ---- values: read on the host by the CPU kernels, and none of them trusted ---------------------
// Lengths are clamped to what the tensors hold, prefix sums to a non-decreasing series, and a
// position whose block id is outside the cache does not exist.

struct Sequence {
  int64_t index;
  int64_t first_token;  // its first query token, among the tokens of all sequences
  int64_t len_query, len_key;
  int64_t first_key;  // where its keys start in a TND tensor

  // query token i sees the keys [0, visible)
  int64_t visible(int64_t i, int64_t sparse_mode) const {
    if (sparse_mode == 0) return len_key;
    return std::clamp<int64_t>(len_key - len_query + i + 1, 0, len_key);
  }
};

std::vector<Sequence> read_sequences(const Layouts& layouts, const Tensor& query, const Tensor& key,
                                     const OptionalTensor& lengths_query,
                                     const OptionalTensor& lengths_key,
                                     const OptionalTensor& block_table);

// Where the keys of a sequence are stored. Every layout is seen as paged: BSND keys as one block a
// sequence, TND keys as one block for all.
class KeyMap {
 public:
  KeyMap(const Layouts& layouts, const Tensor& key, const OptionalTensor& block_table);

  struct Slot {
    int64_t block, row;
    int64_t run;  // positions from this one on in the same block
    bool exists;
  };
  Slot find(const Sequence& sequence, int64_t position) const {
    const int64_t p = sequence.first_key + position;
    const int64_t page = shift_ >= 0 ? p >> shift_ : p / block_size_, row = p - page * block_size_;
    int64_t block = layout_ == Layout::kBsnd ? sequence.index : 0;
    if (layout_ == Layout::kPaged) block = blocks_of_[sequence.index * pages_ + page];
    return {block, row, block_size_ - row, block >= 0 && block < blocks_};
  }

 private:
  Layout layout_;
  int64_t blocks_, block_size_;
  int shift_ = -1;  // of a block size that is a power of 2: found for every key, a division counts
  Tensor table_;
  const int32_t* blocks_of_ = nullptr;
  int64_t pages_ = 0;  // of a sequence
};

// The rows of a cache, whatever its strides; offsets are in elements.
struct Rows {
  explicit Rows(const Tensor& cache)
      : block_stride(cache.dim() == 4 ? cache.stride(0) : 0), stride(cache.stride(-3)) {}
  int64_t offset(const KeyMap::Slot& slot) const {
    return slot.block * block_stride + slot.row * stride;
  }
  int64_t block_stride, stride;
};

// The inner loops for this CPU, chosen once; CUSTOM_PYPTO_CPU_ISA names another set.
const cpu::Kernels& kernels();

// Runs task(scratch, i) for every i < count. A thread takes the next task when it is free: a static
// split would wait for the slowest core. scratch() makes what one thread needs.
template <typename MakeScratch, typename Task>
void run_tasks(int64_t count, const MakeScratch& make_scratch, const Task& task) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  const auto work = [&] {
    auto scratch = make_scratch();
    for (int64_t i = next++; i < count; i = next++) task(scratch, i);
  };
#if defined(__SANITIZE_THREAD__)
  // libgomp is not built with ThreadSanitizer, which would miss that its threads wait for each
  // other
  std::vector<std::thread> team;
  for (int64_t t = 0; t < threads; ++t) team.emplace_back(work);
  for (std::thread& thread : team) thread.join();
#else
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(); });
#endif
}

// ---- what the fused op composes -----------------------------------------------------------------

Tensor npu_lightning_indexer_pto_cpu(const Tensor& query, const Tensor& key, const Tensor& weights,
                                     const OptionalTensor& actual_seq_lengths_query,
                                     const OptionalTensor& actual_seq_lengths_key,
                                     const OptionalTensor& block_table,
                                     c10::string_view layout_query, c10::string_view layout_key,
                                     int64_t sparse_count, int64_t sparse_mode);

Tensor npu_sparse_flash_attention_pto_cpu(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, int64_t sparse_block_size,
    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode);

}  // namespace custom_pypto

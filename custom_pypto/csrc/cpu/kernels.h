// The inner loops of the CPU backend, one set per instruction set. No torch header is included here
// or in the .cpp files of this folder: code that both they and the rest of the library instantiate
// could be merged by the linker, and wide instructions would reach machines that lack them.
//
// All loops share one shape: query rows (heads) sit in vector lanes, keys are broadcast. A panel is
// up to 64 rows, transposed to [dims][width], so that a key is read where the cache holds it,
// unpacked. E is what is multiplied: float, or uint16_t for the bits of bfloat16 (products of pairs
// of dims, so that a panel is [dims / 2][width] of uint32_t). Sums are float.
#pragma once

#include <cstdint>
#include <type_traits>

namespace custom_pypto::cpu {

constexpr int kMaxWidth = 64;
constexpr int kMaxKeys = 128;  // keys of one call

template <typename E>
using PanelElement = std::conditional_t<std::is_same_v<E, float>, float, uint32_t>;

// scores[j] = sum over panels and rows of weights[row] * relu(panel[row] . keys[j]), j < n <=
// kMaxKeys. panels: rows / 64 panels of width 64, then one of width 16, 32 or 64 for the rest
// (panel_width).
template <typename E>
struct IndexCall {
  const PanelElement<E>* panels;
  const float* weights;  // [rows]
  int heads;             // rows that count; the others, zeros, only fill their panel
  int rows;              // multiple of 16
  int dims;              // multiple of 16
  const E* keys;
  int64_t key_stride;
  int n;
  const E* ahead;  // as many keys that are likely to be read next: fetched meanwhile; or null
  float* scores;
};

// One chunk of keys for which several panels ask.
template <typename E>
struct Chunk {
  int n;  // <= Kernels::attend_keys
  int latent, rope;
  const E* keys[kMaxKeys];
  const E* ropes[kMaxKeys];
  const E* values[kMaxKeys];
  uint32_t* packed;   // bfloat16 only: values as pairs of keys, [latent / 16][n / 2][16]
  const Chunk* next;  // whose rows are fetched into the level-2 cache meanwhile; or null
};

// Online softmax of one panel. counts[j][row] says how often a row has selected key j; null: once.
template <typename E>
struct AttendPanel {
  const PanelElement<E>* query;  // [latent + rope][width], scaled by nothing
  int width;                     // 16, 32 or 64
  float scale;                   // of the logits, times log2(e): exponentials are powers of two
  const float* counts;           // [n][width] or null
  bool first;                    // max, sum and out hold nothing yet
  bool fetches;                  // the next chunk: one panel does it for all
  float* max;                    // [width]
  float* sum;                    // [width]
  float* out;                    // [latent][width], not yet divided by sum
  float* scores;                 // scratch [kMaxKeys][width]
};

// What bfloat16 is multiplied with as it is.
struct Bf16Kernels {
  // panel[pair][row] from rows[row][dim]: `count` rows, and zeros up to the panel's width
  void (*pack_panel)(const uint16_t* rows, int64_t stride, int count, int width, int dims,
                     uint32_t* panel);
  void (*index)(const IndexCall<uint16_t>&);
  void (*pack_values)(const Chunk<uint16_t>&);
  void (*attend)(const Chunk<uint16_t>&, const AttendPanel<uint16_t>&);
  // rows[row][dim] = factors[row] * sums[dim][row], for the first `count` rows of a panel
  void (*finish)(const float* sums, int width, int count, int dims, const float* factors,
                 uint16_t* rows, int64_t stride);
};

struct Kernels {
  const char* name;
  void (*index)(const IndexCall<float>&);
  void (*attend)(const Chunk<float>&, const AttendPanel<float>&);
  // Ranks and positions (first, first + 1, ...) of those of n scores whose rank is above `above`,
  // in their order; returns how many. Up to kLineElements more are written behind them.
  int (*filter)(const float* scores, int n, uint32_t above, int32_t first, uint32_t* ranks,
                int32_t* positions);
  // Of n ranks and their positions, moves to the front those above `above` and the first `equal` of
  // those that equal it; returns how many. Up to kLineElements behind them change too.
  int (*keep)(uint32_t* ranks, int32_t* positions, int n, uint32_t above, int equal);
  const Bf16Kernels* bf16;  // null without a dot product of it: operands are widened to float
};

constexpr int kLineElements = 16;

// keys of one attend call: as many as keep the scores of a panel in half the level-1 cache
template <typename E>
constexpr int kAttendKeys = std::is_same_v<E, float> ? 64 : 128;

constexpr int panel_width(int rows) { return rows > 32 ? 64 : rows > 16 ? 32 : 16; }

extern const Kernels kGeneric;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

}  // namespace custom_pypto::cpu

// The inner loops of the CPU backend, one set per instruction set. Files of this folder include no
// torch header: the linker could merge a template instantiated here with the same one in the rest
// of the library, and wide instructions would reach machines that lack them.
//
// The loops of attention and of the indexer share one shape: query rows (heads) sit in vector
// lanes, keys are broadcast. A panel is up to 64 rows, transposed to [dims][width], so that keys
// are read from the cache in place, unpacked. E is the compute type: float, or uint16_t for the
// bits of bfloat16 (multiplied in pairs of dims, so that a panel is [dims / 2][width] of uint32_t).
// Sums are float.
//
// The indexer multiplies int8 exactly. As float: products of up to kMostInt8Dims dims add up to at
// most 2^24. Or with uint8_t as E, which is a key plus 128: a panel is [1 + dims / 4][width] of
// uint32_t, in which quads of dims follow the first values of the sums, -128 times the sum of a
// row. Or with int8_t, in tiles: a panel is the quads alone. Or with int16_t: a panel is [dims / 2]
// [width] pairs of dims.
#pragma once

#include <cstdint>
#include <type_traits>

#include "weight_kernels.h"

#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)  // g++ 10
#define CUSTOM_PYPTO_AVX512_BF16
#if __has_include(<amxbf16intrin.h>)  // g++ 11: its assembler knows AMX
#define CUSTOM_PYPTO_AMX
#endif
#endif

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
  int heads;             // rows in use; the rows after them are zero padding
  int rows;              // multiple of 16
  int dims;              // multiple of 16
  const E* keys;
  int64_t key_stride;
  int n;
  const E* ahead;  // n keys to prefetch, likely to be read next; or null
  int64_t ahead_stride;
  float* scores;
};

// One chunk of keys, shared by several panels.
template <typename E>
struct Chunk {
  int n;  // <= kAttendKeys<E>
  int latent, rope;
  const E* keys[kMaxKeys];
  const E* ropes[kMaxKeys];
  const E* values[kMaxKeys];
  // Chunk to prefetch into the level-2 cache, or null. Its rows may be shorter than these: packed
  // ones, which are unpacked before their own call.
  const Chunk* next;
};

// Online softmax of one panel. counts[j][row] is how often a row has selected key j; null: once.
template <typename E>
struct AttendPanel {
  const PanelElement<E>* query;  // [latent + rope][width], unscaled
  int width;                     // 16, 32 or 64
  float scale;                   // logit scale times log2(e): exponentials are powers of two
  const float* counts;           // [n][width] or null
  bool first;                    // max, sum and out hold nothing yet
  float* max;                    // [width]
  float* sum;                    // [width]
  float* out;                    // sums of 16 dims of all rows after another, not divided by sum
};

// What attend overwrites.
struct AttendScratch {
  float* scores;     // [rows of all panels][kMaxKeys]
  uint32_t* packed;  // bfloat16 only: values as pairs of keys, [latent / 16][kMaxKeys / 2 + 1][16]
  uint16_t* staged;  // AMX only: copies of keys, [kStagedKeys][latent + rope]
};

// out[i] += sum over k < depth of a[i][k * a_step] * b[k], for i < n. Rows of `out` may be equal:
// they are added to one after the other, in the order of i. The bits of a row depend on its own
// operands alone.
struct Product {
  const float* const* a;  // [n]
  int64_t a_step;
  int n;
  const float* const* b;  // [depth], rows of `width`
  int depth;
  int width;  // multiple of 16
  float* const* out;
};

// scores becomes p = exp2(scores * scale - max) / sum; delta += the sum over keys of p * dots.
struct Probabilities {
  float* scores;         // [n][heads]
  const float* dots;     // [n][heads]
  int n;                 // keys
  int heads;             // multiple of 16
  float scale;           // logit scale times log2(e)
  const float* max;      // [heads], times log2(e)
  const float* inverse;  // [heads]: 1 / sum
  float* delta;          // [heads]
};

// out[j] = the sum over heads of exp2(scores[j] * scale - max) / sum.
struct HeadSums {
  const float* scores;   // [n][heads]
  int n;                 // keys
  int heads;             // multiple of 16
  float scale;           // logit scale times log2(e)
  const float* max;      // [heads], times log2(e)
  const float* inverse;  // [heads]: 1 / sum
  float* out;            // [n]
};

// Other work, in steps that `multiply` calls between dots of tiles, which multiply at the same
// time. Vectors call none.
struct Beside {
  void (*step)(void* work) = nullptr;
  void* work = nullptr;
};

// a[i] . b for i < n, of bfloat16. A kernel may read and write rows up to a multiple of 16.
struct PairProduct {
  const uint16_t* a;  // [n][depth]
  int64_t a_stride;
  int n;
  const uint32_t* b;  // [width / 16][depth / 2][16]: 16 columns of pairs of rows after another
  int64_t b_stride;   // between 16 columns and the next
  int depth;          // multiple of 32 for tiles, of 2 for vectors
  int width;          // multiple of 16
  // Chunk whose rows `multiply` prefetches into the level-2 cache while tiles multiply, or null.
  const Chunk<uint16_t>* next = nullptr;
  Beside beside = {};  // of `multiply`
};

// Gradients of logits, d = scale * p * (dots - delta), rounded to bfloat16 as p.
struct LogitGradients {
  const float *p, *dots;  // [n][padded]
  int n;                  // keys
  int heads, padded;      // padded: multiple of 16
  float scale;            // of the logits
  const float* delta;     // [padded]
  uint16_t* by_key;       // [n][2 * padded]: d, then p
  uint16_t* by_head;      // d as [padded][n], zeros up to a multiple of 32 keys
  int64_t stride;         // of by_head
};

// Online softmax of rows of scores, [n][keys], with the sums of earlier keys.
struct SoftmaxRows {
  const float* scores;
  int64_t stride;         // from row to row
  int n, keys;            // keys: multiple of 32
  const uint16_t* named;  // [n][keys / 16]: bit j of word k for key 16 k + j, whether a row has it
  int64_t named_stride;
  float scale;   // of the logits, times log2(e)
  bool first;    // max, total and sums hold nothing yet
  float* max;    // [n], times log2(e)
  float* total;  // [n]
  uint16_t* p;   // [n][keys]: bfloat16
  int64_t p_stride;
  float* sums;  // [n][dims], rescaled to the new maximum
  int dims;     // multiple of 16
};

// Rows of a stored weight times packed rows of x, in bfloat16: out[i][w] for i < m.
struct StoredProduct {
  Dots weight;  // all but x, m and out; n rows
  // [depth / 2][16] pairs of values of 16 rows of x, zeros behind the last; of up to kFewRows rows
  // in the order of Bf16Kernels::arrange_few
  const uint32_t* panels;
  int64_t panel_stride;     // between panels
  const float* group_sums;  // [panel][group][16], of the values of x, if the weight has offsets
  int m;                    // rows of x
  int width;                // those of all panels
  float* sums;              // [n][width], overwritten
  uint16_t* const* out;     // [m]
};

using StoredKernel = void (*)(const StoredProduct&);

// Of so many rows of x products with values of e2m1 read Dots::stored_scales.
constexpr int kFewRows = 32;

// Of 16 heads of an indexer: which products are not zero or below, a bit each, and d_weights += the
// sum over keys of d_scores * relu(products).
struct ReluMasks {
  const float* products;  // [n][16]
  int64_t stride;         // of products
  int n;                  // keys
  int heads;              // in use
  const float* d_scores;  // [n]
  float* d_weights;       // [16]
  uint16_t* masks;        // [n]
};

// The gradients of these products, d_scores * weights where they have a bit, else 0, rounded to
// bfloat16.
struct MaskedGradients {
  const uint16_t* masks;  // [heads / 16][n]
  int64_t mask_stride;    // between 16 heads and the next
  int n;                  // keys
  int heads;              // multiple of 16
  const float* weights;   // [heads]
  const float* d_scores;  // [n]
  uint16_t* to;           // by key: [n][heads]; by head: [heads][n], zeros up to a multiple of 32
  int64_t stride;         // of `to`
};

// Of an indexer: scores[j] = sum over heads of weights * relu(products[j]).
struct IndexScores {
  const float* products;  // [n][padded]
  int n;                  // keys
  int heads, padded;      // padded: multiple of 16
  const float* weights;   // [padded]
  float* scores;          // [n]
};

// Its derivative: d_weights += the sum over keys of d_scores * relu(products); products become
// their gradients, 0 where they are not positive, else d_scores * weights.
struct IndexScoresGrad {
  float* products;        // [n][heads]
  int n;                  // keys
  int heads;              // multiple of 16
  const float* weights;   // [heads]
  const float* d_scores;  // [n]
  float* d_weights;       // [heads]
};

// Kernels that multiply bfloat16 without widening it.
struct Bf16Kernels {
  // panel[pair][row] from rows[row][dim]: `count` rows, padded with zeros to the panel's width
  void (*pack_panel)(const uint16_t* rows, int64_t stride, int count, int width, int dims,
                     uint32_t* panel);
  void (*index)(const IndexCall<uint16_t>&);
  void (*index_int8)(const IndexCall<int8_t>&) = nullptr;  // of keys where they are; tiles only
  void (*attend)(const Chunk<uint16_t>&, const AttendPanel<uint16_t>* panels, int count,
                 const AttendScratch&);
  // to += factors[row] * from, for the sums of 16 dims of a panel
  void (*add_sums)(const float* from, int width, const float* factors, float* to);
  // rows[row][dim] = factors[row] * sums[row, dim], for the first `count` rows of a panel
  void (*finish)(const float* sums, int width, int count, int dims, const float* factors,
                 uint16_t* rows, int64_t stride);
  // to[i] = scale * from[i], i < n, a multiple of 16
  void (*dequantize)(const int8_t* from, float scale, int n, uint16_t* to);
  // pairs of rows as operand b of a product: n rows, zeros up to `padded`; stride: its b_stride.
  // Also copies the rows side by side, unless `copies` is null.
  void (*pack_row_pairs)(const uint16_t* const* rows, int n, int padded, int dims, int64_t stride,
                         uint32_t* to, uint16_t* copies);
  // out[i] = a[i] . b, or += unless `first`; rows of `out` are `stride` apart
  void (*multiply)(const PairProduct&, float* out, int64_t stride, bool first);
  // out[i] += a[i] . b, as in Product
  void (*multiply_to_rows)(const PairProduct&, float* const* out);
  void (*logit_gradients)(const LogitGradients&);
  void (*softmax_rows)(const SoftmaxRows&);
  void (*relu_masks)(const ReluMasks&);
  void (*gradients_by_key)(const MaskedGradients&);
  void (*gradients_by_head)(const MaskedGradients&);
  // to[i] = from[i], i < n, a multiple of 32
  void (*narrow)(const float* from, int n, uint16_t* to);
  // row w of a weight, [depth], by its format
  void (*const* widen)(const Dots&, int w, uint16_t* to);
  // of each format, null: its values are widened first
  const StoredKernel* stored = nullptr;
  void (*arrange_few)(WeightFormat, int group, uint32_t* panel, int depth) = nullptr;
  // to[group][row] = the sums of the values of the rows of a panel, [depth / 2][16]
  void (*sum_groups)(const uint32_t* panel, int depth, int group, float* to) = nullptr;
  // around the calls of index, attend and multiply of one thread; null: nothing to do
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
};

// Kernels that multiply int8 as integers.
template <typename E>
struct Int8Kernels {
  // to[j][d] = keys[j][d] as E, for n keys
  void (*convert)(const int8_t* keys, int64_t stride, int n, int dims, E* to);
  void (*index)(const IndexCall<E>&);
};

// The type to which a float is rounded before it is multiplied.
enum class Rounding { kBfloat16, kFloat16 };

using DotsTable = const DotsKernels*;  // of each format

struct Kernels {
  const char* name;
  void (*index)(const IndexCall<float>&);
  void (*attend)(const Chunk<float>&, const AttendPanel<float>* panels, int count,
                 const AttendScratch&);
  void (*multiply)(const Product&);
  float (*dot)(const float* a, const float* b, int64_t n);  // a . b
  void (*probabilities)(const Probabilities&);
  void (*head_sums)(const HeadSums&);
  void (*index_scores)(const IndexScores&);
  void (*index_scores_grad)(const IndexScoresGrad&);
  // to[i] = scale * from[i], rounded, i < n, a multiple of 16
  void (*dequantize)(const int8_t* from, float scale, int n, Rounding rounding, float* to);
  // Writes ranks and positions (first, first + 1, ...) of the scores whose rank exceeds `above`, in
  // order; returns their number. Overwrites up to kLineElements elements behind them.
  int (*filter)(const float* scores, int n, uint32_t above, int32_t first, uint32_t* ranks,
                int32_t* positions);
  // number of ranks above `above`
  int (*count)(const uint32_t* ranks, int n, uint32_t above);
  // Moves ranks above `above`, and the first `equal` ranks equal to it, to the front, with their
  // positions; returns their number. Overwrites up to kLineElements elements behind them.
  int (*keep)(uint32_t* ranks, int32_t* positions, int n, uint32_t above, int equal);
  const WeightKernels* weights;  // of each format
  // Ways of each format, best first; the last of them fits any shape. Rows of x in bfloat16 have
  // one more, before these, and those that are rounded to int8 their own.
  DotsTable dots_of_bf16 = nullptr, dots_of_int8 = nullptr;
  DotsTable dots[2];
  int most_in_turn[kWeightFormats] = {}, most_by_four = 0, near = 2048;  // of `Dots`
  // out[i][l] = the sum over d of x[i][d], float, * rows[d][l], in bfloat16; of m rows of x
  void (*add_rows)(const uint16_t* rows, int64_t stride, const void* const* x, int m, int depth,
                   int width, float* const* out);
  const Bf16Kernels* bf16 = nullptr;   // null: bfloat16 is widened to float
  const Bf16Kernels* tiles = nullptr;  // for shapes that fill tiles; null: the CPU has none
  bool widens = false;                 // the indexer and gradients widen bfloat16 all the same
  // at most one; null: int8 is widened to float
  const Int8Kernels<uint8_t>* int8_as_uint8 = nullptr;
  const Int8Kernels<int16_t>* int8_as_int16 = nullptr;
  const Int8Products* int8_products = nullptr;
  const Int16Kernels* int16 = nullptr;  // of a policy that rounds x
  WeightPolicy ways = {};               // of products with stored weights
};

constexpr int kLineElements = 16, kStagedKeys = 32, kMostInt8Dims = 1024;

// keys per attend call: the most whose scores for a panel fit in half the level-1 cache
template <typename E>
constexpr int kAttendKeys = std::is_same_v<E, float> ? 64 : 128;

// Shapes that fill tiles; any other is multiplied by vectors.
constexpr int kMostTiledIndexDims = 256;
constexpr bool fills_tiles(int64_t index_dims) {
  return index_dims % 32 == 0 && index_dims <= kMostTiledIndexDims;
}
constexpr bool fills_int8_tiles(int64_t index_dims) {
  return index_dims % 64 == 0 && index_dims <= kMostTiledIndexDims;
}
constexpr bool fills_tiles(int64_t latent, int64_t rope) {
  return latent % 64 == 0 && rope % 32 == 0;
}

constexpr int panel_width(int rows) { return rows > 32 ? 64 : rows > 16 ? 32 : 16; }

extern const Kernels kGeneric;
// A build for development leaves out what its CPU cannot run (setup.py); these are null then.
#define OPTIONAL extern __attribute__((weak)) const
#if defined(__x86_64__)
OPTIONAL Kernels kAvx2;
OPTIONAL Kernels kAvx512;
OPTIONAL Int8Kernels<int16_t> kAvx2Int8;
OPTIONAL Int8Kernels<uint8_t> kAvx512Vnni;
OPTIONAL Int16Kernels kAvx2Int16, kAvx512VnniInt16;
OPTIONAL Int8Products kAvx512VnniInt8Products;
OPTIONAL DotsTable kAvx512VnniDots, kAvx512VnniInt8Dots, kAvx2Int8Dots;
#endif
#if defined(__aarch64__)
extern const DotsTable kDotprodDots, kDotprodInt8Dots;
#endif
#if defined(CUSTOM_PYPTO_AVX512_BF16)
OPTIONAL Bf16Kernels kAvx512Bf16;
OPTIONAL DotsTable kAvx512Bf16Dots, kIntelBf16Dots, kAvx512Bf16Int8Dots;
#endif
#if defined(CUSTOM_PYPTO_AMX)
OPTIONAL Bf16Kernels kAmx, kAmxEmulated;
OPTIONAL Int8Products kAmxInt8Products, kAmxEmulatedInt8Products;
#endif

}  // namespace custom_pypto::cpu

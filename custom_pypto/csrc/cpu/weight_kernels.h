// The kernels of weights as they are stored, and on their way there.
#pragma once

#include <cstdint>

namespace custom_pypto::cpu {

// How the values of a weight are stored: bfloat16, int8, e4m3, and two values per byte, the first
// in the low bits, unsigned integers or e2m1.
enum WeightFormat { kBfloat16Weight, kInt8Weight, kFp8Weight, kInt4Weight, kFp4Weight };
constexpr int kWeightFormats = 5;
constexpr int kWeightUnit = 32;     // depth is a multiple of it
constexpr int kFp4Group = 32;       // values of e2m1 with one scale
constexpr int kPreparedUnit = 512;  // values of x that are prepared together

// out[i][w] = the sum over d of x[i][d] * (scale * value[w][d] + offset), of rows w of a weight.
// Consecutive values of a row share scale and offset, in int8 and bfloat16 all. The value of e4m3
// counts 2^-8 times, that of e2m1 twice.
struct Dots {
  const uint8_t* weight;
  int64_t stride;        // bytes of a row
  int n;                 // rows of the weight
  int depth, group;      // multiples of kWeightUnit; the last group may be shorter
  int groups;            // of a row
  const float* scales;   // [n][groups]
  int64_t scale_stride;  // between rows: groups, or 0 where they share their scales
  bool has_offsets;      // else they are 0
  const float* offsets;  // [n][groups]
  // in place of scales and offsets, for kernels that read those of 4 bits as they are stored
  const uint8_t* stored_scales;
  const void* const* x;  // [m], prepared
  int m;
  float* const* out;  // [m]
  // One row of x meets rows of up to so many values of the weight in turn, which are one stream;
  // else several at once, for which it is read once. The bits are the same.
  int most_in_turn;
  // Several are four rows of up to so many values, where a format has eight of longer ones.
  int most_by_four;
  int near;  // bytes that each of several streams is read ahead
  bool in_turn() const { return depth <= most_in_turn; }
};

// out[i][w] += the sum over pairs of x[i] . value[w], times the scales of both, plus the sum of
// x[i] times the offset of w, for consecutive values that share scales and offset.
struct Int16Product {
  const int32_t* panels;  // [n_panels][pairs][panel_width], of two values as int16 each
  int n_panels, pairs;
  const float* scales;   // [n_panels * panel_width]
  const float* offsets;  // [n_panels * panel_width], or null: 0
  const int16_t* x;      // [m], rounded
  int64_t x_stride;
  const float *x_scales, *x_sums;  // [m] of them, one of x_parts each
  int64_t x_parts;
  int m;
  float* out;
  int64_t out_stride;
};

constexpr int kMostInt16Values = 256;  // that share a scale of x

struct Int16Kernels {
  int panel_width;
  void (*multiply)(const Int16Product&);
};

// bytes of a prepared row of x
constexpr int64_t prepared_bytes(int64_t depth) {
  return (depth * 4 + depth / kWeightUnit * 8 + 63) / 64 * 64;  // each row starts at a cache line
}

// A way to multiply a weight as it is stored; all null: none for its format.
struct DotsKernels {
  bool (*fits)(const Dots&) = nullptr;  // whether it takes this depth and these groups
  // Writes values first, .., first + n - 1 of a row of x, at x[0], into the prepared row `to`; n is
  // kPreparedUnit, or what is left of the row.
  void (*prepare)(const Dots&, const float* x, int first, int n, void* to) = nullptr;
  void (*dots)(const Dots&) = nullptr;
  bool stored_scales = false;  // whether `dots` reads Dots::stored_scales
};

struct WeightKernels {
  // row w of the weight, [depth]
  void (*widen)(const Dots&, int w, float* to);
  // those of 4 bits as `Dots` takes them, offsets behind the scales; null for the others
  void (*read_scales)(const void* from, int64_t count, float* scales);
  // to[d / 2][w - first] = the values d, d + 1 of row w as int16, of `rows` rows, zeros up to
  // `width`; null for formats that are no small integers
  void (*pack_int16)(const Dots&, int first, int rows, int d, int count, int width, int32_t* to);
  // to = x[i] / scale, rounded, i < n, a multiple of kWeightUnit; the sum is that of scale * to
  void (*round_int16)(const float* x, int n, int16_t* to, float* scale, float* sum);
  // to[i] = from[i] * scales[i / block] of n published values, of e4m3 with NaN for the bytes 0x7F
  // and 0xFF; null for formats that checkpoints do not have with scales
  void (*dequantize)(const uint8_t* from, const float* scales, int64_t n, int64_t block, float* to);
  // a row of n values and its scales as they are stored; n and groups are multiples of kWeightUnit,
  // but for bfloat16; null for formats to which nobody rounds
  void (*round)(const float* from, int64_t n, int64_t group, void* to, void* scales);
};

// Rows of x in bfloat16 that are rounded to int8 as a panel of Int8Product.
struct Int8Rows {
  const uint16_t* x;
  int64_t stride;
  int count, depth;  // up to 16 / quads rows
  int part;          // values with a scale
  int quads;
  bool nibbles;  // of each part, values for the low bits of bytes come first
};

// out[i][w] = x[i] . weight[w], of such rows of x.
struct Int8Product {
  Dots weight;             // up to kMostInt8Depth values; its x and out are not used
  const uint32_t* panels;  // [depth / 4 / quads][16 / quads][quads] of 4 values of 16 rows of x
  int64_t panel_stride;    // between panels
  int quads;               // 1; of 8 and 4 rows of x, where one scale is that of a row, 2 and 4
  int parts;               // of a row of x, with a scale each
  const float* x_scales;   // [panel][part][16]
  const int32_t* x_sums;   // the same of the sums of their values
  int m;                   // rows of x
  int width;               // those of all panels
  int32_t* sums;           // [n up to a multiple of kRowsOfSums][width], overwritten
  uint16_t* const* out;    // [m]
};

constexpr int kRowsOfSums = 48;
constexpr int kMostInt8Depth = 1 << 17;  // whose sums fit in an integer

// Products of rows of x rounded to int8.
struct Int8Products {
  // values: [16][depth], overwritten
  void (*round_panel)(const Int8Rows&, int8_t* values, uint32_t* panel, float* scales,
                      int32_t* sums);
  int unit;                                              // of which the depth is a multiple
  int most_quads;                                        // of a panel
  void (*multiply[kWeightFormats])(const Int8Product&);  // null: none
};

// The ways of rows of x for one matrix, by their number (docs/weight_only_linear.md, "CPU kernel").
struct WeightWays {
  int64_t most_stored = 16;  // up to so many, kernels multiply the weight as it is stored
  int64_t most_packed = 0;   // up to so many, x in bfloat16 is packed for kernels that multiply it
  bool rounds = false;       // more meet a weight of int8 or 4 bits as int16, where kernels can
  bool in_bfloat16 = false;  // else torch.mm multiplies in bfloat16, not in float32
};

// The same by the dtype of x, in bfloat16 also by the format.
struct WeightPolicy {
  WeightWays float32, float16, bfloat16[kWeightFormats];
};

}  // namespace custom_pypto::cpu

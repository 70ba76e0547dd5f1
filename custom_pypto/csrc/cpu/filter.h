// Converts the indexer's scores to ranks and selects the ranks above a limit.
#pragma once

#include <cstring>

#include "kernels.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

#if VECTOR_BYTES == 64
// g++ 12 assumes 32 bits with zeros above the mask, but may spill only 16 bits: the upper half of
// the reload is then stack garbage (seen at -O1 -fsanitize=thread). kmovw zero-extends.
INLINE unsigned bits_of(__mmask16 mask) {
  unsigned bits;
  asm("kmovw %1, %0" : "=r"(bits) : "k"(mask));
  return bits;
}

INLINE int append(const IntVec& rank, uint32_t above, int32_t first, uint32_t* ranks,
                  int32_t* positions) {
  const __mmask16 kept = _mm512_cmpgt_epu32_mask((__m512i)rank, _mm512_set1_epi32(above));
  const __m512i position = (__m512i)(lane_index() + first);
  // no branch, because it would often be mispredicted; compress in registers, because a compressing
  // store to memory is slow on some CPUs
  _mm512_storeu_si512(ranks, _mm512_maskz_compress_epi32(kept, (__m512i)rank));
  _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(kept, position));
  return __builtin_popcount(bits_of(kept));
}

int keep(uint32_t* ranks, int32_t* positions, int n, uint32_t above, int equal) {
  const __m512i limit = _mm512_set1_epi32(above);
  int count = 0;
  for (int j = 0; j < n; j += 16) {
    const __m512i rank = _mm512_loadu_si512(ranks + j),
                  position = _mm512_loadu_si512(positions + j);
    const __mmask16 valid = n - j < 16 ? (1u << (n - j)) - 1 : 0xFFFF;
    unsigned ties = bits_of(_mm512_mask_cmpeq_epu32_mask(valid, rank, limit));
    int more = __builtin_popcount(ties);
    for (; more > equal; --more) ties &= ~(0x80000000u >> __builtin_clz(ties));
    equal -= more;
    const __mmask16 kept = _mm512_mask_cmpgt_epu32_mask(valid, rank, limit) | ties;
    _mm512_storeu_si512(ranks + count, _mm512_maskz_compress_epi32(kept, rank));
    _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(kept, position));
    count += __builtin_popcount(bits_of(kept));
  }
  return count;
}
#else
INLINE int append(const IntVec& rank, uint32_t above, int32_t first, uint32_t* ranks,
                  int32_t* positions) {
  const IntVec lowest = lane_index() * 0 + INT32_MIN;  // sign flip: maps unsigned to signed order
  const IntVec kept = (rank ^ lowest) > (lowest ^ static_cast<int32_t>(above));
  int32_t any = 0;
  UNROLL for (int i = 0; i < kLanes; ++i) any |= kept[i];
  if (!any) return 0;
  int count = 0;
  UNROLL for (int i = 0; i < kLanes; ++i) {
    ranks[count] = rank[i];
    positions[count] = first + i;
    count -= kept[i];
  }
  return count;
}

int keep(uint32_t* ranks, int32_t* positions, int n, uint32_t above, int equal) {
  int count = 0;
  for (int j = 0; j < n; ++j) {  // no branch: it would often be mispredicted
    const int tie = ranks[j] == above;
    const int kept = (ranks[j] > above) | (tie & (equal > 0));
    equal -= tie;
    ranks[count] = ranks[j];
    positions[count] = positions[j];
    count += kept;
  }
  return count;
}
#endif

int count(const uint32_t* ranks, int n, uint32_t above) {
  const IntVec lowest = lane_index() * 0 + INT32_MIN;  // sign flip: maps unsigned to signed order
  const IntVec limit = lowest ^ static_cast<int32_t>(above);
  IntVec lanes = {};
  int j = 0, total = 0;
  for (; j + kLanes <= n; j += kLanes) {
    IntVec rank;
    std::memcpy(&rank, ranks + j, sizeof rank);
    lanes -= (rank ^ lowest) > limit;
  }
  for (; j < n; ++j) total += ranks[j] > above;
  UNROLL for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
}

INLINE uint32_t rank_of(float score) {
  if (score != score) return 0xFFFFFFFFu;
  score += 0.0f;  // -0 becomes +0
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

// usually no score exceeds the k-th best so far
int filter(const float* scores, int n, uint32_t above, int32_t first, uint32_t* ranks,
           int32_t* positions) {
  int count = 0, j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const Vec score = load(scores + j) + 0.0f;  // -0 becomes +0
    const IntVec bits = (IntVec)score;
    const IntVec rank = score == score ? bits ^ (bits >> 31 | INT32_MIN) : lane_index() * 0 - 1;
    count += append(rank, above, first + j, ranks + count, positions + count);
  }
  for (; j < n; ++j) {
    ranks[count] = rank_of(scores[j]);
    positions[count] = first + j;
    count += ranks[count] > above;
  }
  return count;
}

}  // namespace
}  // namespace custom_pypto::cpu

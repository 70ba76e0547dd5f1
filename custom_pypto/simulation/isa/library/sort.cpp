// Sorting: pairs of a float and its index, 8 bytes each, the largest first. The ISA does not say
// in which order equal values come; here the earlier one is first.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core.h"

namespace isa {

namespace {

struct Pair {
  uint32_t value, index;
};

// floats in the order of their bits: negative NaN first, positive NaN last
int64_t rank(uint32_t bits) {
  return bits & 0x80000000 ? -static_cast<int64_t>(bits & 0x7fffffff) - 1 : bits;
}

bool before(const Pair& a, const Pair& b) { return rank(a.value) > rank(b.value); }

std::vector<Pair> pairs(const char* from, int64_t count) {
  std::vector<Pair> list(count);
  std::memcpy(list.data(), from, count * sizeof(Pair));
  return list;
}

std::vector<Pair> merged(const std::vector<std::vector<Pair>>& lists) {
  std::vector<Pair> all;
  for (const auto& list : lists) {
    require(std::is_sorted(list.begin(), list.end(), before), "a list to merge is not sorted");
    size_t middle = all.size();
    all.insert(all.end(), list.begin(), list.end());
    std::inplace_merge(all.begin(), all.begin() + middle, all.end(), before);
  }
  return all;
}

}  // namespace

void sort32(const Tile& dst, const Tile& src, const Tile& index, const Tile* tmp) {
  instruction = "TSORT32";
  constexpr int BLOCK = 32;
  constexpr uint32_t NEGATIVE_NAN = 0xffc00000;
  int cols = src.valid_cols, whole = round_up(cols, BLOCK);
  require(cols % BLOCK == 0 || tmp, "columns that are no multiple of 32 need tmp");
  if (src.valid_rows <= 0 || cols <= 0) return;
  const char* values = operand(src, dst.valid_rows, cols, "src");
  const char* numbers = operand(index, index.valid_rows, whole, "index");
  char* to = operand(dst, dst.valid_rows, 2 * whole, "dst");
  if (tmp && cols % BLOCK) {
    // the row, or only the last block of a long row, is copied into tmp and padded
    int64_t bytes = (whole <= 32 * 255 ? whole : BLOCK) * 4;
    poison(region(*tmp, bytes, "tmp"), bytes);
  }
  for (int row = 0; row < dst.valid_rows; ++row) {
    std::vector<Pair> list(whole);
    for (int col = 0; col < whole; ++col) {
      int number_row = index.valid_rows == 1 ? 0 : row;
      std::memcpy(&list[col].index, numbers + offset(index, number_row, col) * 4, 4);
      list[col].value = NEGATIVE_NAN;
      if (col < cols) std::memcpy(&list[col].value, values + offset(src, row, col) * 4, 4);
    }
    for (int col = 0; col < whole; col += BLOCK)
      std::stable_sort(list.begin() + col, list.begin() + col + BLOCK, before);
    std::memcpy(to + offset(dst, row, 0) * 4, list.data(), whole * sizeof(Pair));
  }
}

void merge_blocks(const Tile& dst, const Tile& src, uint32_t block) {
  instruction = "TMRGSORT";
  int cols = src.valid_cols, four = 4 * static_cast<int>(block);
  require(block % 64 == 0 && block > 0, "the block is a multiple of 64");
  // the remainder behind the last four blocks is left to the caller
  int repeats = cols / four;
  require(repeats >= 1 && repeats <= 255, "1 to 255 groups of four blocks");
  const char* from = operand(src, 1, repeats * four, "src");
  char* to = operand(dst, 1, repeats * four, "dst");
  for (int group = 0; group < repeats; ++group) {
    std::vector<std::vector<Pair>> lists;
    for (int i = 0; i < 4; ++i)
      lists.push_back(pairs(from + (group * 4ll + i) * block * 4, block / 2));
    std::vector<Pair> all = merged(lists);
    std::memcpy(to + group * static_cast<int64_t>(four) * 4, all.data(), all.size() * sizeof(Pair));
  }
}

void merge_lists(const Tile& dst, const Tile& tmp, const Tile* tiles, int count) {
  instruction = "TMRGSORT";
  std::vector<std::vector<Pair>> lists;
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    int64_t length = tiles[i].valid_cols / 2;
    const char* from = operand(tiles[i], 1, tiles[i].valid_cols, "a list");
    lists.push_back(pairs(from, length));
    total += length;
  }
  std::vector<Pair> all = merged(lists);
  char* scratch = region(tmp, total * sizeof(Pair), "tmp");
  std::memcpy(scratch, all.data(), all.size() * sizeof(Pair));
  int64_t bytes = round_up(dst.valid_cols * 4, 32);
  region(tmp, bytes, "tmp");
  std::memmove(region(dst, bytes, "dst"), scratch, bytes);
}

}  // namespace isa

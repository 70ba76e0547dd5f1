// The types of the PTO ISA with which PyPTO's tile operations describe their operands.
#pragma once

#include "aicore.h"

namespace pto {

enum class TileType { Vec, Mat, Left, Right, Acc, Bias, Scaling };
enum class BLayout { RowMajor, ColMajor };
enum class SLayout { NoneBox, RowMajor, ColMajor };
enum class Layout { ND, DN, NZ, MX_A_ND, MX_A_DN, MX_B_ND, MX_B_DN };
enum class PadValue : uint64_t { Null, Zero, Max, Min };
constexpr uint64_t PAD_NUMBER = uint64_t{1} << 32;  // the bits of a float are below
constexpr PadValue PadValueCustom(float value) {
  return static_cast<PadValue>(PAD_NUMBER | __builtin_bit_cast(uint32_t, value));
}
enum class CompactMode { Null, Normal, RowAlignedPadding, RowPlusOne };
// how precisely an instruction computes; both are exact here
#define ISA_ALGORITHM(NAME) enum class NAME##Algorithm{DEFAULT, HIGH_PRECISION};
ISA_ALGORITHM(Exp)
ISA_ALGORITHM(Sqrt)
ISA_ALGORITHM(Log)
ISA_ALGORITHM(Recip)
ISA_ALGORITHM(Div)
ISA_ALGORITHM(Fmod)
ISA_ALGORITHM(FmodS)
ISA_ALGORITHM(Pow)
ISA_ALGORITHM(Rem)
ISA_ALGORITHM(RemS)
#undef ISA_ALGORITHM
enum class RoundMode : uint8_t {
  CAST_NONE,
  CAST_RINT,
  CAST_ROUND,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_TRUNC,
  CAST_ODD
};
enum class SaturationMode : uint8_t { ON, OFF };
enum class CmpMode : uint8_t { EQ, NE, LT, LE, GT, GE };
enum class MaskPattern : uint8_t { P0101 = 1, P1010, P0001, P0010, P0100, P1000, P1111 };
enum class AtomicType : uint8_t { AtomicNone, AtomicAdd };
enum class ReluPreMode : uint8_t { NoRelu, NormalRelu };
enum class AccToVecMode : uint8_t { SingleModeVec0, SingleModeVec1 };

struct MrgSortExecutedNumList {
  uint16_t mrgSortList0, mrgSortList1, mrgSortList2, mrgSortList3;
};

struct TileConfig {
  static constexpr int alignedSize = 32, fractalABSize = 512, fractalCSize = 1024;
};

template <class T>
constexpr isa::Type type_of() {
  using std::is_same_v;
  if constexpr (is_same_v<T, float>) return isa::Type::f32;
  if constexpr (is_same_v<T, half>) return isa::Type::f16;
  if constexpr (is_same_v<T, bfloat16_t>) return isa::Type::bf16;
  if constexpr (is_same_v<T, int64_t>) return isa::Type::i64;
  if constexpr (is_same_v<T, uint64_t>) return isa::Type::u64;
  if constexpr (is_same_v<T, int32_t>) return isa::Type::i32;
  if constexpr (is_same_v<T, uint32_t>) return isa::Type::u32;
  if constexpr (is_same_v<T, int16_t>) return isa::Type::i16;
  if constexpr (is_same_v<T, uint16_t>) return isa::Type::u16;
  if constexpr (is_same_v<T, int8_t>) return isa::Type::i8;
  return isa::Type::u8;  // uint8_t, bool
}

// Five sizes, -1 for those known only at run time.
template <int N0 = -1, int N1 = -1, int N2 = -1, int N3 = -1, int N4 = -1>
struct Sizes {
  int64_t values[5] = {N0, N1, N2, N3, N4};
  Sizes() = default;
  template <class... Values>
  Sizes(Values... given) {
    constexpr int dynamic = (N0 < 0) + (N1 < 0) + (N2 < 0) + (N3 < 0) + (N4 < 0);
    static_assert(sizeof...(Values) == dynamic, "one value for each size that is not static");
    int64_t list[] = {static_cast<int64_t>(given)...};
    for (int i = 0, next = 0; i < 5; ++i)
      if (values[i] < 0) values[i] = list[next++];
  }
};

template <int N0 = -1, int N1 = -1, int N2 = -1, int N3 = -1, int N4 = -1>
struct Shape : Sizes<N0, N1, N2, N3, N4> {
  using Sizes<N0, N1, N2, N3, N4>::Sizes;
};
template <class... Values>
Shape(Values...) -> Shape<-1, -1, -1, -1, -1>;

template <int N0 = -1, int N1 = -1, int N2 = -1, int N3 = -1, int N4 = -1>
struct Stride : Sizes<N0, N1, N2, N3, N4> {
  using Sizes<N0, N1, N2, N3, N4>::Sizes;
};
template <class... Values>
Stride(Values...) -> Stride<-1, -1, -1, -1, -1>;

template <class Element, class ShapeOf, class StrideOf, Layout LayoutOf = Layout::ND>
struct GlobalTensor {
  using DType = Element;
  static constexpr Layout layout = LayoutOf;
  Element* address;
  ShapeOf shape;
  StrideOf stride;

  GlobalTensor(Element* address, const ShapeOf& shape, const StrideOf& stride)
      : address(address), shape(shape), stride(stride) {}

  isa::Global view() const {
    isa::Global global = {type_of<Element>(), reinterpret_cast<uint64_t>(address), {}, {}};
    for (int i = 0; i < 5; ++i)
      global.shape[i] = shape.values[i], global.stride[i] = stride.values[i];
    return global;
  }
};

template <TileType Location, class Element, int RowsOf, int ColsOf,
          BLayout Outer = BLayout::RowMajor, int ValidRows = RowsOf, int ValidCols = ColsOf,
          SLayout Inner = SLayout::NoneBox, int Fractal = 512, PadValue PadOf = PadValue::Null,
          CompactMode CompactOf = CompactMode::Null>
struct Tile {
  using DType = Element;
  static constexpr TileType Loc = Location;
  static constexpr int Rows = RowsOf, Cols = ColsOf, ValidRow = ValidRows, ValidCol = ValidCols;
  static constexpr int RowStride = Outer == BLayout::RowMajor ? Cols : 1;
  static constexpr int ColStride = Outer == BLayout::RowMajor ? 1 : Rows;
  static constexpr bool isRowMajor = Outer == BLayout::RowMajor;
  static_assert(Inner != SLayout::NoneBox ||
                    (isRowMajor ? Cols : Rows) * sizeof(Element) % TileConfig::alignedSize == 0 ||
                    (isRowMajor ? Rows : Cols) == 1,
                "ISA: a row (a column, if column-major) of a tile is a multiple of 32 bytes");
  static_assert(ValidRows <= Rows && ValidCols <= Cols, "ISA: a tile's valid part is within it");

  uint64_t address = 0;
  int valid_rows = ValidRows, valid_cols = ValidCols;

  Tile() = default;
  Tile(int rows, int cols) {
    if (ValidRows < 0) valid_rows = rows;
    if (ValidCols < 0) valid_cols = cols;
  }

  int GetValidRow() const { return valid_rows; }
  int GetValidCol() const { return valid_cols; }
  uint64_t data() const { return address; }
  void SetKAligned(bool) {}
  void ResetMadMode() {}
  void SetMadTF32Mode(RoundMode) { isa::unsupported("TMATMUL in TF32"); }

  isa::Tile view() const {
    constexpr isa::Buffer buffers[] = {isa::Buffer::UB,     isa::Buffer::L1,  isa::Buffer::L0A,
                                       isa::Buffer::L0B,    isa::Buffer::L0C, isa::Buffer::bias,
                                       isa::Buffer::fixpipe};
    constexpr isa::Pad pads[] = {isa::Pad::none, isa::Pad::zero, isa::Pad::highest,
                                 isa::Pad::lowest};
    constexpr isa::Layout layout = Inner == SLayout::NoneBox
                                       ? (isRowMajor ? isa::Layout::rows : isa::Layout::columns)
                                   : Inner == SLayout::RowMajor && !isRowMajor ? isa::Layout::nz
                                   : Inner == SLayout::ColMajor && isRowMajor  ? isa::Layout::zn
                                                                               : isa::Layout::other;
    constexpr uint64_t pad = static_cast<uint64_t>(PadOf);
    return {buffers[static_cast<int>(Location)],
            type_of<Element>(),
            layout,
            Rows,
            Cols,
            valid_rows,
            valid_cols,
            address,
            pad & PAD_NUMBER ? isa::Pad::number : pads[pad & 3],
            isa::float_of(static_cast<uint32_t>(pad)),
            CompactOf != CompactMode::RowAlignedPadding};
  }
};

// operands and result of the cube unit on A2/A3
template <class T, int R, int C, int VR = R, int VC = C>
using TileLeft = Tile<TileType::Left, T, R, C, BLayout::RowMajor, VR, VC, SLayout::RowMajor>;
template <class T, int R, int C, int VR = R, int VC = C>
using TileRight = Tile<TileType::Right, T, R, C, BLayout::RowMajor, VR, VC, SLayout::ColMajor>;
template <class T, int R, int C, int VR = R, int VC = C>
using TileAcc = Tile<TileType::Acc, T, R, C, BLayout::ColMajor, VR, VC, SLayout::RowMajor,
                     TileConfig::fractalCSize>;
template <class T, int R, int C, int VR = R, int VC = C>
using TileLeftCompact = TileLeft<T, R, C, VR, VC>;
template <class T, int R, int C, int VR = R, int VC = C>
using TileRightCompact = TileRight<T, R, C, VR, VC>;
template <class T, int R, int C, int VR = R, int VC = C>
using TileLeftScaleCompact = TileLeft<T, R, C, VR, VC>;
template <class T, int R, int C, int VR = R, int VC = C>
using TileRightScaleCompact = TileRight<T, R, C, VR, VC>;

template <class T>
void TASSIGN(T& tile, uint64_t address) {
  tile.address = address;
}
template <class T, class Element>
void TASSIGN(T& global, Element* address) {
  global.address = address;
}

}  // namespace pto

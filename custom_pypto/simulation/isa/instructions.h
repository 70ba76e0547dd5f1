// The instructions of the PTO ISA that PyPTO's tile operations name. The library behind them takes
// operands without static types, so the ISA's rules about types are asserted here.
#pragma once

#include "tile.h"

namespace pto {

template <class T, class... Others>
constexpr bool is_one_of = (std::is_same_v<T, Others> || ...);
template <class T>
constexpr bool is_number = is_one_of<T, float, half, int32_t, int16_t>;
template <class T>
constexpr bool is_real = is_one_of<T, float, half>;
template <class T>
constexpr bool is_factor = is_one_of<T, float, half, bfloat16_t, int8_t>;
template <class First, class... Others>
constexpr bool one_type = (std::is_same_v<typename First::DType, typename Others::DType> && ...);

template <class Dst, class Src>
void TLOAD(Dst& dst, const Src& src) {
  static_assert(sizeof(typename Dst::DType) == sizeof(typename Src::DType), "TLOAD: sizes");
  static_assert(Dst::Loc == TileType::Vec || Dst::Loc == TileType::Mat, "TLOAD: to UB or L1");
  static_assert(Src::layout == Layout::ND, "TLOAD: of global memory, only ND is modelled");
  isa::load(dst.view(), src.view());
}

// explicit arguments in the ISA's order: the tile, then global memory
template <class Src, class Dst, AtomicType Atomic = AtomicType::AtomicNone,
          ReluPreMode Relu = ReluPreMode::NoRelu>
void TSTORE(const Dst& dst, const Src& src) {
  static_assert(Src::Loc == TileType::Vec || Src::Loc == TileType::Acc,
                "TSTORE: from UB or L0C, others are not modelled");
  static_assert(Dst::layout == Layout::ND, "TSTORE: of global memory, only ND is modelled");
  isa::store(dst.view(), src.view(), Atomic == AtomicType::AtomicAdd,
             Relu == ReluPreMode::NormalRelu);
}
#define ISA_BINARY(NAME, op)                                                                     \
  template <class Dst, class A, class B>                                                         \
  void T##NAME(const Dst& dst, const A& a, const B& b) {                                         \
    static_assert(one_type<Dst, A, B> && is_number<typename Dst::DType>, "T" #NAME ": type");    \
    isa::binary("T" #NAME, isa::Binary::op, dst.view(), a.view(), b.view());                     \
  }                                                                                              \
  template <class Dst, class A>                                                                  \
  void T##NAME##S(const Dst& dst, const A& a, typename Dst::DType scalar) {                      \
    static_assert(one_type<Dst, A> && is_number<typename Dst::DType>, "T" #NAME "S: type");      \
    double value = static_cast<double>(scalar);                                                  \
    isa::binary_scalar("T" #NAME "S", isa::Binary::op, dst.view(), a.view(), value);             \
  }                                                                                              \
  template <class Dst, class A, class B>                                                         \
  void TROWEXPAND##NAME(const Dst& dst, const A& a, const B& b) {                                \
    static_assert(one_type<Dst, A, B> && is_real<typename Dst::DType>,                           \
                  "TROWEXPAND" #NAME ": type");                                                  \
    isa::row_expand_binary("TROWEXPAND" #NAME, isa::Binary::op, dst.view(), a.view(), b.view()); \
  }                                                                                              \
  template <class Dst, class A, class B>                                                         \
  void TCOLEXPAND##NAME(const Dst& dst, const A& a, const B& b) {                                \
    static_assert(one_type<Dst, A, B> && is_real<typename Dst::DType>,                           \
                  "TCOLEXPAND" #NAME ": type");                                                  \
    isa::column_expand_binary("TCOLEXPAND" #NAME, isa::Binary::op, dst.view(), a.view(),         \
                              b.view());                                                         \
  }
ISA_BINARY(ADD, add)
ISA_BINARY(SUB, sub)
ISA_BINARY(MUL, mul)
ISA_BINARY(DIV, div)
ISA_BINARY(MAX, max)
ISA_BINARY(MIN, min)
template <DivAlgorithm Algorithm, class Dst, class A, class B>
void TDIV(const Dst& dst, const A& a, const B& b) {
  TDIV(dst, a, b);
}
template <DivAlgorithm Algorithm, class Dst, class A>
void TDIVS(const Dst& dst, const A& a, typename Dst::DType scalar) {
  TDIVS(dst, a, scalar);
}
template <DivAlgorithm Algorithm, class Dst, class A, class B>
void TROWEXPANDDIV(const Dst& dst, const A& a, const B& b) {
  TROWEXPANDDIV(dst, a, b);
}
template <DivAlgorithm Algorithm, class Dst, class A, class B>
void TCOLEXPANDDIV(const Dst& dst, const A& a, const B& b) {
  TCOLEXPANDDIV(dst, a, b);
}
#undef ISA_BINARY

#define ISA_UNARY(NAME, op)                                                                \
  template <class Dst, class Src>                                                          \
  void T##NAME(const Dst& dst, const Src& src) {                                           \
    static_assert(one_type<Dst, Src> && is_real<typename Dst::DType>, "T" #NAME ": type"); \
    isa::unary("T" #NAME, isa::Unary::op, dst.view(), src.view());                         \
  }                                                                                        \
  template <auto Algorithm, class Dst, class Src>                                          \
  void T##NAME(const Dst& dst, const Src& src) {                                           \
    T##NAME(dst, src);                                                                     \
  }
ISA_UNARY(EXP, exp)
ISA_UNARY(SQRT, sqrt)
ISA_UNARY(RSQRT, rsqrt)
ISA_UNARY(RECIP, reciprocal)
ISA_UNARY(ABS, absolute)
ISA_UNARY(LOG, log)
#undef ISA_UNARY

#define ISA_REDUCE(NAME, op)                                                                    \
  template <class Dst, class Src, class Tmp>                                                    \
  void TROW##NAME(const Dst& dst, const Src& src, const Tmp& tmp) {                             \
    static_assert(one_type<Dst, Src> && is_number<typename Dst::DType>, "TROW" #NAME ": type"); \
    isa::row_reduce("TROW" #NAME, isa::Reduce::op, dst.view(), src.view(), tmp.view());         \
  }                                                                                             \
  template <class Dst, class Src>                                                               \
  void TCOL##NAME(const Dst& dst, const Src& src) {                                             \
    static_assert(one_type<Dst, Src> && is_number<typename Dst::DType>, "TCOL" #NAME ": type"); \
    isa::column_reduce("TCOL" #NAME, isa::Reduce::op, dst.view(), src.view(), nullptr);         \
  }
ISA_REDUCE(SUM, sum)
ISA_REDUCE(MAX, max)
ISA_REDUCE(MIN, min)
ISA_REDUCE(PROD, prod)
#undef ISA_REDUCE

template <class Dst, class Src, class Tmp>
void TCOLSUM(const Dst& dst, const Src& src, const Tmp& tmp, bool binary) {
  static_assert(one_type<Dst, Src, Tmp> && is_number<typename Dst::DType>, "TCOLSUM: type");
  isa::Tile scratch = tmp.view();
  isa::column_reduce("TCOLSUM", isa::Reduce::sum, dst.view(), src.view(),
                     binary ? &scratch : nullptr);
}

template <class Dst, class Scalar>
void TEXPANDS(const Dst& dst, Scalar scalar) {
  static_assert(Dst::Loc == TileType::Vec && sizeof(typename Dst::DType) <= 4, "TEXPANDS: type");
  isa::fill(dst.view(), static_cast<double>(static_cast<typename Dst::DType>(scalar)));
}
template <class Dst, class Src>
void TMOV(const Dst& dst, const Src& src) {
  static_assert(Dst::Loc == TileType::Vec && Src::Loc == TileType::Vec,
                "TMOV: from UB to UB, others are not modelled");
  static_assert(one_type<Dst, Src>, "TMOV: type");
  isa::copy(dst.view(), src.view());
}
template <class Dst, class Src>
void TCVT(const Dst& dst, const Src& src, RoundMode mode, SaturationMode = SaturationMode::ON) {
  isa::convert(dst.view(), src.view(), static_cast<isa::Round>(mode));
}
template <class Dst, class Src, class Tmp>
void TCVT(const Dst& dst, const Src& src, const Tmp& tmp, RoundMode mode,
          SaturationMode saturation = SaturationMode::ON) {
  isa::spoil(tmp.view());
  TCVT(dst, src, mode, saturation);
}
template <class Dst, class A, class B>
void TCMP(const Dst& dst, const A& a, const B& b, CmpMode mode) {
  static_assert(one_type<A, B> && is_one_of<typename A::DType, float, half, int32_t>, "TCMP: type");
  isa::compare(dst.view(), a.view(), b.view(), static_cast<isa::Compare>(mode));
}
template <class Dst, class A, class Scalar>
void TCMPS(const Dst& dst, const A& a, Scalar scalar, CmpMode mode) {
  static_assert(is_one_of<typename A::DType, float, half, int32_t>, "TCMPS: type");
  isa::compare_scalar(dst.view(), a.view(), static_cast<double>(scalar),
                      static_cast<isa::Compare>(mode));
}
template <class Dst, class Mask, class A, class B, class Tmp>
void TSEL(const Dst& dst, const Mask& mask, const A& a, const B& b, const Tmp& tmp) {
  constexpr int size = sizeof(typename Dst::DType);
  static_assert(one_type<Dst, A, B> && (size == 2 || size == 4), "TSEL: type");
  isa::select(dst.view(), mask.view(), a.view(), b.view(), tmp.view());
}
template <class Dst, class Src>
void TROWEXPAND(const Dst& dst, const Src& src) {
  static_assert(one_type<Dst, Src>, "TROWEXPAND: type");
  isa::row_expand(dst.view(), src.view());
}
template <class Dst, class Src>
void TCOLEXPAND(const Dst& dst, const Src& src) {
  static_assert(one_type<Dst, Src>, "TCOLEXPAND: type");
  isa::column_expand(dst.view(), src.view());
}
template <class Dst, class Src>
void TFILLPAD_EXPAND(const Dst& dst, const Src& src) {
  static_assert(sizeof(typename Dst::DType) == sizeof(typename Src::DType), "TFILLPAD: type");
  static_assert(Dst::Cols >= Src::Cols && Dst::Rows >= Src::Rows, "TFILLPAD_EXPAND: shapes");
  isa::fill_pad(dst.view(), src.view());
}
template <class Dst, class Src>
void TFILLPAD(const Dst& dst, const Src& src) {
  static_assert(Dst::Loc == TileType::Mat && std::is_same_v<Dst, Src>,
                "TFILLPAD: in place in L1, others are not modelled");
  isa::fill_pad_in_l1(dst.view(), src.view());
}
template <class Dst, class T, int Descending>
void TCI(const Dst& dst, T start) {
  static_assert(std::is_same_v<typename Dst::DType, T> && Dst::Cols != 1, "TCI: type");
  isa::count_up(dst.view(), static_cast<int64_t>(start), Descending);
}
template <class Dst, class Src, class Tmp>
void TTRANS(const Dst& dst, const Src& src, const Tmp& tmp) {
  static_assert(one_type<Dst, Src>, "TTRANS: type");
  isa::transpose(dst.view(), src.view(), tmp.view());
}

template <class Dst, class Src, class Index, class Tmp>
void TGATHER(const Dst& dst, const Src& src, const Index& index, const Tmp& tmp) {
  static_assert(one_type<Dst, Src> && sizeof(typename Index::DType) == 4, "TGATHER: type");
  isa::gather(dst.view(), src.view(), index.view(), tmp.view());
}
template <class Dst, class Src, MaskPattern Pattern>
void TGATHER(const Dst& dst, const Src& src) {
  static_assert(Pattern == MaskPattern::P0101 || Pattern == MaskPattern::P1010,
                "TGATHER: of the patterns only every second element is modelled");
  static_assert(sizeof(typename Dst::DType) == sizeof(typename Src::DType), "TGATHER: type");
  isa::gather_every_second(dst.view(), src.view(), Pattern == MaskPattern::P1010);
}
template <class Dst, class Src, class Index, class... Tmp>
void TSORT32(const Dst& dst, const Src& src, const Index& index, const Tmp&... tmp) {
  static_assert(one_type<Dst, Src> && std::is_same_v<typename Dst::DType, float> &&
                    std::is_same_v<typename Index::DType, uint32_t>,
                "TSORT32: only float is modelled");
  isa::Tile scratch[] = {tmp.view()..., {}};
  isa::sort32(dst.view(), src.view(), index.view(), sizeof...(Tmp) ? scratch : nullptr);
}
template <class Dst, class Src>
void TMRGSORT(const Dst& dst, const Src& src, uint32_t block) {
  static_assert(one_type<Dst, Src> && std::is_same_v<typename Dst::DType, float>,
                "TMRGSORT: only float is modelled");
  isa::merge_blocks(dst.view(), src.view(), block);
}

template <class Dst, class Tmp, class... Lists>
void merge(const Dst& dst, const Tmp& tmp, const Lists&... lists) {
  static_assert(one_type<Dst, Tmp, Lists...> && std::is_same_v<typename Dst::DType, float>,
                "TMRGSORT: only float is modelled");
  isa::Tile views[] = {lists.view()...};
  isa::merge_lists(dst.view(), tmp.view(), views, sizeof...(Lists));
}
template <class Dst, class Tmp, class A, class B, bool Exhausted>
void TMRGSORT(const Dst& dst, MrgSortExecutedNumList&, const Tmp& tmp, const A& a, const B& b) {
  static_assert(!Exhausted, "TMRGSORT: the exhausted form is not modelled");
  merge(dst, tmp, a, b);
}
template <class Dst, class Tmp, class A, class B, class C, bool Exhausted>
void TMRGSORT(const Dst& dst, MrgSortExecutedNumList&, const Tmp& tmp, const A& a, const B& b,
              const C& c) {
  static_assert(!Exhausted, "TMRGSORT: the exhausted form is not modelled");
  merge(dst, tmp, a, b, c);
}
template <class Dst, class Tmp, class A, class B, class C, class D, bool Exhausted>
void TMRGSORT(const Dst& dst, MrgSortExecutedNumList&, const Tmp& tmp, const A& a, const B& b,
              const C& c, const D& d) {
  static_assert(!Exhausted, "TMRGSORT: the exhausted form is not modelled");
  merge(dst, tmp, a, b, c, d);
}

template <class Dst, class Src>
void TEXTRACT(const Dst& dst, const Src& src, int row, int col) {
  static_assert(
      Src::Loc == TileType::Mat && (Dst::Loc == TileType::Left || Dst::Loc == TileType::Right),
      "TEXTRACT: from L1 to L0A or L0B, others are not modelled");
  static_assert(one_type<Dst, Src> && is_factor<typename Dst::DType>,
                "TEXTRACT: only float, half, bfloat16_t and int8_t are modelled");
  static_assert(
      Src::Rows % 16 == 0 && Src::Cols % 16 == 0 && Dst::Rows % 16 == 0 && Dst::Cols % 16 == 0,
      "TEXTRACT: sizes are multiples of 16");
  isa::extract(dst.view(), src.view(), row, col);
}

template <class C, class A, class B>
void check_product() {
  static_assert(C::Loc == TileType::Acc && A::Loc == TileType::Left && B::Loc == TileType::Right,
                "TMATMUL: L0C from L0A and L0B");
  // documented as equal rows, but an int8 left operand has 32 where PyPTO since CANN 9.1 gives the
  // result 16; pto-isa for A2/A3 does not compare them, the product takes its rows at run time
  static_assert(
      (std::is_same_v<typename A::DType, int8_t> ? C::Rows <= A::Rows : C::Rows == A::Rows) &&
          A::Cols == B::Rows && B::Cols == C::Cols,
      "TMATMUL: static shapes");
  using Sum = std::conditional_t<std::is_same_v<typename A::DType, int8_t>, int32_t, float>;
  static_assert(
      one_type<A, B> && is_factor<typename A::DType> && std::is_same_v<typename C::DType, Sum>,
      "TMATMUL: only floats into float, int8_t into int32_t are modelled");
}
template <class C, class A, class B>
void TMATMUL(const C& c, const A& a, const B& b) {
  check_product<C, A, B>();
  isa::multiply(c.view(), a.view(), b.view(), false);
}
template <class C, class A, class B>
void TMATMUL_ACC(const C& c, const C&, const A& a, const B& b) {
  check_product<C, A, B>();
  isa::multiply(c.view(), a.view(), b.view(), true);
}

// named by PyPTO's templates, used by none of our kernels
#define ISA_UNSUPPORTED(NAME)                                          \
  template <class... Operands>                                         \
  void NAME(Operands...) {                                             \
    static_assert(sizeof...(Operands) == 0, #NAME " is not modelled"); \
  }                                                                    \
  template <auto Algorithm, class... Operands>                         \
  void NAME(Operands...) {                                             \
    static_assert(sizeof...(Operands) == 0, #NAME " is not modelled"); \
  }
ISA_UNSUPPORTED(TAND)
ISA_UNSUPPORTED(TANDS)
ISA_UNSUPPORTED(TAXPY)
ISA_UNSUPPORTED(TCOLARGMAX)
ISA_UNSUPPORTED(TCOLARGMIN)
ISA_UNSUPPORTED(TCOLEXPANDEXPDIF)
ISA_UNSUPPORTED(TCONCAT)
ISA_UNSUPPORTED(TDEQUANT)
ISA_UNSUPPORTED(TEXTRACT_FP)
ISA_UNSUPPORTED(TFMOD)
ISA_UNSUPPORTED(TFMODS)
ISA_UNSUPPORTED(TINSERT)
ISA_UNSUPPORTED(TINSERT_FP)
ISA_UNSUPPORTED(TLRELU)
ISA_UNSUPPORTED(TMATMUL_BIAS)
ISA_UNSUPPORTED(TNEG)
ISA_UNSUPPORTED(TNOT)
ISA_UNSUPPORTED(TOR)
ISA_UNSUPPORTED(TORS)
ISA_UNSUPPORTED(TPARTARGMAX)
ISA_UNSUPPORTED(TPARTARGMIN)
ISA_UNSUPPORTED(TPOW)
ISA_UNSUPPORTED(TPOWS)
ISA_UNSUPPORTED(TQUANT)
ISA_UNSUPPORTED(TREM)
ISA_UNSUPPORTED(TREMS)
ISA_UNSUPPORTED(TROWARGMAX)
ISA_UNSUPPORTED(TROWARGMIN)
ISA_UNSUPPORTED(TROWEXPANDEXPDIF)
ISA_UNSUPPORTED(TSELS)
ISA_UNSUPPORTED(TSTORE_FP)
ISA_UNSUPPORTED(TXOR)
ISA_UNSUPPORTED(TXORS)
#undef ISA_UNSUPPORTED

}  // namespace pto

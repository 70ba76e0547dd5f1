#include "contract.h"

#include <algorithm>
#include <string>

namespace custom_pypto {

// a copy: torch returns a string or a view, by version
std::string dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

Argument::Argument(const char* op, const char* name, const Tensor& tensor)
    : op_(op), name_(name), tensor_(tensor) {
  CHECK_ARGUMENT(tensor.defined(), op, name, "a tensor", "None");
}

const Argument& Argument::rank(int64_t rank, const char* shape) const {
  CHECK_ARGUMENT(tensor_.dim() == rank, op_, name_, c10::str("of shape ", shape),
                 tensor_.sym_sizes());
  return *this;
}

const Argument& Argument::size(int64_t dim, const Dim& expected) const {
  TORCH_SYM_CHECK(tensor_.sym_size(dim).sym_eq(expected.size), op_, ": ", name_, ".size(", dim,
                  ") must be ", expected.size, " (",
                  expected.why ? expected.why : c10::str(expected.name, " of ", expected.owner),
                  "), got ", tensor_.sym_size(dim));
  return *this;
}

const Argument& Argument::size(int64_t dim, const c10::SymInt& expected, const char* why) const {
  return size(dim, Dim("", why, expected));
}

const Argument& Argument::sizes(const Tensor& like, int64_t dims, const char* why) const {
  for (int64_t i = 0; i < dims; ++i) size(i, like.sym_size(i), why);
  return *this;
}

const Argument& Argument::keeps(int64_t dim, Dim::Rule rule, const char* letter) const {
  const c10::SymInt size = tensor_.sym_size(dim);
  const auto check = [&](bool kept, const auto&... expected) {
    CHECK_ARGUMENT(kept, op_, c10::str(name_, ".size(", dim, ")"), c10::str(expected...), size);
  };
  if (rule == Dim::kPositive) check(size > 0, "at least 1 (", letter, ")");
  if (rule == Dim::kMultipleOf16) check(size > 0 && size % 16 == 0, "a positive multiple of 16");
  if (rule == Dim::kBlockSize) {
    check(size > 0 && size <= 1024 && size % 16 == 0, "a multiple of 16 up to 1024 (block_size)");
  }
  if (rule == Dim::kInt8Dims) {
    check(size > 0 && size <= 1024 && size % 16 == 0, "a multiple of 16 up to 1024 (", letter, ")");
  }
  return *this;
}

const Argument& Argument::dtype(at::ArrayRef<at::ScalarType> expected, const char* why) const {
  const auto dtype = tensor_.scalar_type();
  if (std::count(expected.begin(), expected.end(), dtype)) return *this;
  std::string names(dtype_name(expected[0]));
  for (size_t i = 1; i < expected.size(); ++i) {
    names += c10::str(i + 1 < expected.size() ? ", " : " or ", dtype_name(expected[i]));
  }
  CHECK_ARGUMENT(false, op_, c10::str(name_, ".dtype"),
                 why ? c10::str(names, " (", why, ")") : names, dtype_name(dtype));
}

const Argument& Argument::dtype_or_float32(at::ScalarType expected, const char* why) const {
  const auto dtype = tensor_.scalar_type();
  CHECK_ARGUMENT(
      dtype == expected || dtype == at::kFloat, op_, c10::str(name_, ".dtype"),
      c10::str(dtype_name(expected), " (", why, ")", expected == at::kFloat ? "" : " or float32"),
      dtype_name(dtype));
  return *this;
}

const Argument& Argument::int8(const char* unquantized) const {
  const auto dtype = tensor_.scalar_type();
  const bool wide = std::count(std::begin(kFloating), std::end(kFloating), dtype);
  // hifloat8, which torch lacks, is passed as uint8
  const bool float8 = c10::isFloat8Type(dtype) || dtype == at::kByte;
  CHECK_ARGUMENT(dtype == at::kChar, op_, c10::str(name_, ".dtype"), "int8", dtype_name(dtype),
                 wide     ? c10::str("; ", unquantized, " takes it")
                 : float8 ? "; only Ascend 950 multiplies 8-bit floats, this op does not"
                          : "");
  return *this;
}

const Argument& Argument::device_of(const Tensor& first) const {
  CHECK_ARGUMENT(tensor_.device() == first.device(), op_, c10::str(name_, ".device"),
                 c10::str(first.device(), " (device of the first argument)"), tensor_.device());
  return *this;
}

const Argument& Argument::dense_rows() const {
  TORCH_SYM_CHECK(tensor_.sym_stride(-1).sym_eq(1), op_, ": ", name_,
                  ".stride(-1) must be 1 (contiguous last dim), got ", tensor_.sym_stride(-1),
                  "; call .contiguous()");
  return *this;
}

Argument ShapeTable::row(const char* name, const Tensor& tensor,
                         std::initializer_list<std::reference_wrapper<Dim>> shape) {
  const Argument argument(op_, name, tensor);
  if (tensor.dim() != static_cast<int64_t>(shape.size())) {
    std::string letters;
    for (const Dim& dim : shape) letters += (letters.empty() ? "" : ", ") + std::string(dim.name);
    argument.rank(shape.size(), c10::str("[", letters, "]").c_str());
  }
  int64_t i = 0;
  for (Dim& dim : shape) {
    if (dim.owner || dim.why) {
      sizes_.push_back(Size{.argument = argument, .dim = i, .expected = dim});
    } else {
      dim.owner = name;
      dim.size = tensor.sym_size(i);
      argument.keeps(i, dim.rule, dim.name);
    }
    ++i;
  }
  return argument;
}

void ShapeTable::check_sizes() const {
  for (const Size& size : sizes_) size.argument.size(size.dim, size.expected);
}

}  // namespace custom_pypto

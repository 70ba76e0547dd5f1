// Checks of an op's arguments. Messages name op and argument; sizes are symbolic, so that Meta and
// CPU run the same checks.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <functional>
#include <initializer_list>
#include <utility>

#include "../tasks/tensor.h"

namespace custom_pypto {

// "op: argument must be expected, got actual"
#define CHECK_ARGUMENT(condition, op, argument, expected, ...) \
  TORCH_CHECK(condition, op, ": ", argument, " must be ", expected, ", got ", __VA_ARGS__)

// An op and its schema, "(arguments) -> results". Names and order of arguments follow the published
// custom_pypto recipe; shapes, dtypes and meaning follow torch_npu's op of that name. Our own
// arguments are keyword-only. Mutated caches are declared, so that torch.compile keeps the writes
// in order.
// An op is a template, to state its signature once. Meta runs op<false>: check arguments, allocate
// the output. CPU runs op<true>: compute as well.
#define REGISTER_OP(op, schema) REGISTER_OVERLOAD(op, #op, schema)
#define REGISTER_OVERLOAD(op, name, schema)                             \
  TORCH_LIBRARY_FRAGMENT(custom_pypto, m) { m.def(name schema); }       \
  TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) { m.impl(name, &op<true>); } \
  TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) { m.impl(name, &op<false>); }

// Runs `overload` of an op without the results that its last argument, a flag, asks for, and
// returns the first one.
template <const char* overload>
void first_result(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto whole =
      c10::Dispatcher::singleton().findSchemaOrThrow(op.operator_name().name.c_str(), overload);
  stack->emplace_back(false);
  whole.callBoxed(stack);
  torch::jit::drop(*stack, whole.schema().returns().size() - 1);
}

// An op whose last argument, a flag, asks for more than the first result: `overload` is the op, and
// the default overload a composite of it, so that autograd, Meta, NPUs, GE and the log see one op.
// The default one is defined first, as torch.ops takes the first that fits the arguments.
#define REGISTER_OP_WITH_FLAG(op, overload, arguments, flag, results)            \
  constexpr char overload##_name[] = #overload;                                  \
  TORCH_LIBRARY_FRAGMENT(custom_pypto, m) {                                      \
    using torch::CppFunction;                                                    \
    m.def(#op arguments ") -> Tensor",                                           \
          CppFunction::makeFromBoxedFunction<&first_result<overload##_name>>()); \
  }                                                                              \
  REGISTER_OVERLOAD(op, #op "." #overload, arguments ", bool " #flag "=False) -> " results)

std::string dtype_name(at::ScalarType dtype);  // as Python prints it: float32

constexpr at::ScalarType kFloating[] = {at::kBFloat16, at::kHalf, at::kFloat};
constexpr at::ScalarType kHalves[] = {at::kBFloat16, at::kHalf};
constexpr at::ScalarType kSlots[] = {at::kInt, at::kLong};

// A size in a contract's shapes: a letter, or an expression of letters.
struct Dim {
  enum Rule { kAny, kPositive, kMultipleOf16, kBlockSize, kInt8Dims };
  explicit Dim(const char* letter, Rule size_rule = kAny) : name(letter), rule(size_rule) {}
  // for a size that no single argument determines
  Dim(const char* expression, const char* reason, c10::SymInt value = 0)
      : name(expression), size(std::move(value)), why(reason) {}

  const char* name;
  Rule rule = kAny;
  c10::SymInt size = 0;
  const char* owner = nullptr;  // the argument that determines the size
  const char* why = nullptr;    // replaces "name of owner" in messages
};

// A required argument of an op: rejects None, which arrives as an undefined tensor.
class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor);

  const Argument& rank(int64_t rank, const char* shape) const;
  const Argument& size(int64_t dim, const Dim& expected) const;
  const Argument& size(int64_t dim, const c10::SymInt& expected, const char* why) const;
  // the first `dims` sizes match those of `like`
  const Argument& sizes(const Tensor& like, int64_t dims, const char* why) const;
  const Argument& keeps(int64_t dim, Dim::Rule rule, const char* letter) const;
  const Argument& dtype(at::ArrayRef<at::ScalarType> expected, const char* why = nullptr) const;
  const Argument& dtype_or_float32(at::ScalarType expected, const char* why) const;
  // `unquantized` is the op that takes tensors of kFloating
  const Argument& int8(const char* unquantized) const;
  const Argument& device_of(const Tensor& first) const;
  const Argument& dense_rows() const;  // the last dim is contiguous

 private:
  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

// Checks shapes in letters. The first argument with a letter determines the letter's size.
class ShapeTable {
 public:
  explicit ShapeTable(const char* op) : op_(op) {}
  // Checks the rank, and the rules of new letters.
  Argument row(const char* name, const Tensor& tensor,
               std::initializer_list<std::reference_wrapper<Dim>> shape);
  // Checks all other sizes, in the order of the rows.
  void check_sizes() const;

 private:
  struct Size {
    Argument argument;
    int64_t dim;
    const Dim& expected;
  };
  const char* op_;
  c10::SmallVector<Size, 48> sizes_;
};

}  // namespace custom_pypto

// In the place of CANN's header of this name, for tests/test_graph.py: the macros of the prototypes
// print one line per link of a chain, fields separated by tabs, when the program starts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>

namespace ge {

struct DataType {
  const char* name;
};
constexpr DataType DT_BF16{"DT_BF16"}, DT_FLOAT16{"DT_FLOAT16"}, DT_FLOAT{"DT_FLOAT"},
    DT_INT8{"DT_INT8"}, DT_INT32{"DT_INT32"}, DT_INT64{"DT_INT64"};

struct TensorType {
  TensorType(std::initializer_list<DataType> types) {
    for (const DataType& type : types) names += (names.empty() ? "" : ",") + std::string(type.name);
  }
  std::string names;
};

// what braces around a default convert to without narrowing
using Int = int64_t;
using Float = float;
using String = const char*;
using Bool = bool;
using ListInt = std::initializer_list<int64_t>;

struct Chain {
  const Chain& print(const char* macro, const char* name, const std::string& text) const {
    std::printf("%s\t%s\t%s\n", macro, name, text.c_str());
    return *this;
  }
};

}  // namespace ge

#define TENSOR(macro, x, ...) print(macro, #x, ::ge::TensorType(__VA_ARGS__).names)
#define DEFAULT(macro, x, kind, ...) \
  print(macro, #x, (::ge::kind{__VA_ARGS__}, #kind "\t" #__VA_ARGS__))

#define REG_OP(x) static const ::ge::Chain chain_##x = ::ge::Chain().print("REG_OP", #x, "")
#define INPUT(x, ...) TENSOR("INPUT", x, __VA_ARGS__)
#define OPTIONAL_INPUT(x, ...) TENSOR("OPTIONAL_INPUT", x, __VA_ARGS__)
#define OUTPUT(x, ...) TENSOR("OUTPUT", x, __VA_ARGS__)
#define ATTR(x, kind, ...) DEFAULT("ATTR", x, kind, __VA_ARGS__)
#define REQUIRED_ATTR(x, kind) DEFAULT("REQUIRED_ATTR", x, kind, )
#define OP_END_FACTORY_REG(x) print("OP_END_FACTORY_REG", #x, "");

// Reads GE operator prototypes without CANN. Stands in for CANN's header of the same name: a chain
//
//   REG_OP(Type).INPUT(x, TensorType({DT_BF16})).ATTR(a, Int, 1) ... .OP_END_FACTORY_REG(Type)
//
// becomes an entry of ge::prototype::entries(). Written from the documented form of the macros; of
// what they offer it knows the part defined at the end of this file. Faults are collected, not
// thrown: the chains run before main().
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

namespace ge {

// GE's numbers
enum DataType {
  DT_FLOAT = 0,
  DT_FLOAT16 = 1,
  DT_INT8 = 2,
  DT_INT32 = 3,
  DT_UINT8 = 4,
  DT_INT16 = 6,
  DT_UINT16 = 7,
  DT_UINT32 = 8,
  DT_INT64 = 9,
  DT_UINT64 = 10,
  DT_DOUBLE = 11,
  DT_BOOL = 12,
  DT_BF16 = 27,
};

struct TensorType {
  TensorType(DataType type) : types{type} {}
  TensorType(std::initializer_list<DataType> list) : types(list) {}
  std::vector<DataType> types;
};

namespace prototype {

inline std::string name(DataType type) {
  switch (type) {
    case DT_FLOAT:
      return "DT_FLOAT";
    case DT_FLOAT16:
      return "DT_FLOAT16";
    case DT_INT8:
      return "DT_INT8";
    case DT_INT32:
      return "DT_INT32";
    case DT_UINT8:
      return "DT_UINT8";
    case DT_INT16:
      return "DT_INT16";
    case DT_UINT16:
      return "DT_UINT16";
    case DT_UINT32:
      return "DT_UINT32";
    case DT_INT64:
      return "DT_INT64";
    case DT_UINT64:
      return "DT_UINT64";
    case DT_DOUBLE:
      return "DT_DOUBLE";
    case DT_BOOL:
      return "DT_BOOL";
    case DT_BF16:
      return "DT_BF16";
  }
  return std::to_string(static_cast<int>(type));
}

inline std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// The shortest decimals that give the same float32, which is what GE keeps of a Float: 1e-06, not
// 9.99999997e-07; and 1.0, not 1.
inline std::string decimals(double value) {
  const float kept = static_cast<float>(value);
  char text[32];
  for (int digits = 1; digits <= 9; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, static_cast<double>(kept));
    if (std::strtof(text, nullptr) == kept) break;
  }
  const std::string shortest = text;
  return shortest.find_first_not_of("-0123456789") == shortest.npos ? shortest + ".0" : shortest;
}

// A default as written in a chain; what it must be follows from the kind beside it.
class Value {
 public:
  enum Form { kBool, kInt, kFloat, kString, kType, kList };

  Value() : form_(kList) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  Value(T value)
      : form_(std::is_same<T, bool>::value ? kBool
              : std::is_integral<T>::value ? kInt
                                           : kFloat),
        integer_(std::is_integral<T>::value ? static_cast<int64_t>(value) : 0),
        number_(static_cast<double>(value)) {}
  Value(const char* text) : form_(kString), text_(text) {}
  Value(DataType type) : form_(kType), text_(name(type)) {}
  Value(std::initializer_list<Value> elements) : form_(kList), elements_(elements) {}

  // Whether it is a list of lists ... (depth) of such elements; an integer is a Float as well.
  bool is(Form element, int depth) const {
    if (depth == 0) {
      return form_ == element ? form_ != kFloat || finite() : element == kFloat && form_ == kInt;
    }
    if (form_ != kList) return false;
    for (const Value& value : elements_) {
      if (!value.is(element, depth - 1)) return false;
    }
    return true;
  }

  std::string json(Form element) const {
    switch (form_) {
      case kBool:
        return integer_ ? "true" : "false";
      case kInt:
        return element == kFloat ? decimals(number_) : std::to_string(integer_);
      case kFloat:
        return finite() ? decimals(number_) : quoted(decimals(number_));
      case kString:
      case kType:
        return quoted(text_);
      case kList:
        break;
    }
    std::string out;
    for (const Value& value : elements_) out += (out.empty() ? "" : ", ") + value.json(element);
    return "[" + out + "]";
  }

  // As it was written, for messages.
  std::string json() const { return json(form_); }

 private:
  bool finite() const { return std::isfinite(static_cast<float>(number_)); }

  Form form_;
  int64_t integer_ = 0;
  double number_ = 0;
  std::string text_;
  std::vector<Value> elements_;
};

struct Kind {
  const char* name;
  const char* vt;  // GE's name of the type of the value
  Value::Form element;
  int depth;  // of lists
};

inline const Kind* find_kind(const std::string& name) {
  static const Kind kinds[] = {
      {"Int", "VT_INT", Value::kInt, 0},
      {"Float", "VT_FLOAT", Value::kFloat, 0},
      {"String", "VT_STRING", Value::kString, 0},
      {"Bool", "VT_BOOL", Value::kBool, 0},
      {"Type", "VT_DATA_TYPE", Value::kType, 0},
      {"ListInt", "VT_LIST_INT", Value::kInt, 1},
      {"ListFloat", "VT_LIST_FLOAT", Value::kFloat, 1},
      {"ListString", "VT_LIST_STRING", Value::kString, 1},
      {"ListBool", "VT_LIST_BOOL", Value::kBool, 1},
      {"ListType", "VT_LIST_DATA_TYPE", Value::kType, 1},
      {"ListListInt", "VT_LIST_LIST_INT", Value::kInt, 2},
  };
  for (const Kind& kind : kinds) {
    if (name == kind.name) return &kind;
  }
  return nullptr;
}

struct Tensor {
  std::string name;
  std::string kind;  // required, optional or dynamic
  std::vector<DataType> types;
};

struct Attribute {
  std::string name;
  std::string kind;
  std::string vt;
  bool required;
  std::string json;  // of the default
};

struct Entry {
  std::string type;
  std::string header;
  std::vector<Tensor> inputs, outputs;
  std::vector<Attribute> attributes;
  std::vector<std::string> faults;
};

// A deque: a chain holds on to its entry while others are added.
inline std::deque<Entry>& entries() {
  static std::deque<Entry> all;
  return all;
}

template <typename Named>
const Named* find(const std::vector<Named>& all, const std::string& name) {
  for (const Named& one : all) {
    if (one.name == name) return &one;
  }
  return nullptr;
}

class Chain;

// What a chain ends as.
struct Registered {
  Registered() = default;
  inline Registered(const Chain& unfinished);
};

class Chain {
 public:
  Chain(const char* type, const char* header) {
    std::string first;
    for (const Entry& entry : entries()) {
      if (entry.type == type) first = entry.header;
    }
    entries().push_back({type, header, {}, {}, {}, {}});
    entry_ = &entries().back();
    if (!first.empty()) fault("registered twice, first in " + first);
  }

  Chain& input(const char* name, const char* kind, const TensorType& type) {
    if (find(entry_->inputs, name)) fault(std::string("two inputs are named ") + name);
    entry_->inputs.push_back({name, kind, type.types});
    return *this;
  }

  Chain& output(const char* name, const char* kind, const TensorType& type) {
    if (find(entry_->outputs, name)) fault(std::string("two outputs are named ") + name);
    const Tensor* written = find(entry_->inputs, name);  // in place
    if (written && (written->kind != kind || written->types != type.types)) {
      fault(std::string("output ") + name +
            " is the input of that name, written in place, and must be as it is: " + written->kind +
            ", with the same dtypes");
    }
    entry_->outputs.push_back({name, kind, type.types});
    return *this;
  }

  Chain& attribute(const char* name, const char* kind) { return attribute(name, kind, nullptr); }
  Chain& attribute_or(const char* name, const char* kind, const Value& value) {
    return attribute(name, kind, &value);
  }

  Registered end(const char* type) {
    if (entry_->type != type) fault(std::string("OP_END_FACTORY_REG names ") + type);
    if (entry_->outputs.empty()) fault("has no output");
    return {};
  }

 private:
  Chain& attribute(const char* name, const char* kind_name, const Value* value) {
    if (find(entry_->attributes, name)) fault(std::string("two attributes are named ") + name);
    if (find(entry_->inputs, name)) fault(std::string(name) + " is an input and an attribute");
    const Kind* kind = find_kind(kind_name);
    if (!kind) {
      fault(std::string("attribute ") + name + " is of kind " + kind_name + ", which is unknown");
      return *this;
    }
    if (value && !value->is(kind->element, kind->depth)) {
      fault(std::string("the default of attribute ") + name + " must be " + kind_name + ", got " +
            value->json());
      return *this;
    }
    entry_->attributes.push_back(
        {name, kind_name, kind->vt, !value, value ? value->json(kind->element) : "null"});
    return *this;
  }

  void fault(const std::string& what) const {
    entry_->faults.push_back(entry_->header + ": " + entry_->type + ": " + what);
  }

  friend struct Registered;

  Entry* entry_;
};

Registered::Registered(const Chain& unfinished) {
  unfinished.fault("does not end with OP_END_FACTORY_REG");
}

}  // namespace prototype
}  // namespace ge

#define GE_PROTOTYPE_JOIN_(a, b) a##b
#define GE_PROTOTYPE_JOIN(a, b) GE_PROTOTYPE_JOIN_(a, b)

// a name of its own, so that an operator that is registered twice compiles and is reported
#define REG_OP(x)                                                                        \
  static const ::ge::prototype::Registered GE_PROTOTYPE_JOIN(ge_prototype_, __COUNTER__) \
      [[maybe_unused]] = ::ge::prototype::Chain(#x, __FILE__)
#define INPUT(x, ...) input(#x, "required", __VA_ARGS__)
#define OPTIONAL_INPUT(x, ...) input(#x, "optional", __VA_ARGS__)
#define DYNAMIC_INPUT(x, ...) input(#x, "dynamic", __VA_ARGS__)
#define OUTPUT(x, ...) output(#x, "required", __VA_ARGS__)
#define DYNAMIC_OUTPUT(x, ...) output(#x, "dynamic", __VA_ARGS__)
#define ATTR(x, kind, ...) attribute_or(#x, #kind, __VA_ARGS__)
#define REQUIRED_ATTR(x, kind) attribute(#x, #kind)
#define OP_END_FACTORY_REG(x) end(#x);

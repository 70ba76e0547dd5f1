// Prints the prototypes of the headers that the command line includes (-include) as JSON; faults go
// to the standard error, and the exit code is then 1.
#include <cstdio>
#include <string>

#include "graph/operator_reg.h"

namespace {

using ge::prototype::quoted;

template <typename Items, typename Json>
std::string list(const Items& items, Json json) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + json(item);
  return "[" + out + "]";
}

std::string tensor_json(const ge::prototype::Tensor& tensor) {
  const auto dtype = [](ge::DataType type) { return quoted(ge::prototype::name(type)); };
  return "{\"name\": " + quoted(tensor.name) + ", \"kind\": " + quoted(tensor.kind) +
         ", \"dtypes\": " + list(tensor.types, dtype) + "}";
}

std::string attribute_json(const ge::prototype::Attribute& attribute) {
  return "{\"name\": " + quoted(attribute.name) + ", \"kind\": " + quoted(attribute.kind) +
         ", \"vt\": " + quoted(attribute.vt) +
         ", \"required\": " + (attribute.required ? "true" : "false") +
         ", \"default\": " + attribute.json + "}";
}

std::string entry_json(const ge::prototype::Entry& entry) {
  return "\n{\"type\": " + quoted(entry.type) + ", \"header\": " + quoted(entry.header) +
         ",\n \"inputs\": " + list(entry.inputs, tensor_json) +
         ",\n \"outputs\": " + list(entry.outputs, tensor_json) +
         ",\n \"attributes\": " + list(entry.attributes, attribute_json) + "}";
}

}  // namespace

int main() {
  bool wrong = false;
  for (const auto& entry : ge::prototype::entries()) {
    for (const auto& fault : entry.faults) {
      std::fprintf(stderr, "%s\n", fault.c_str());
      wrong = true;
    }
  }
  if (wrong) return 1;
  std::printf("%s\n", list(ge::prototype::entries(), entry_json).c_str());
}

#include <Python.h>
#include <torch/library.h>

#include <sstream>
#include <string>
#include <vector>

#include "../tasks/stored_weight.h"
#include "contract.h"

TORCH_LIBRARY_FRAGMENT(custom_pypto, m) {
  m.def("cpu_isa() -> str", []() { return std::string(custom_pypto::kernels().name); });
  // whether the CPU has instructions for products of bfloat16, which torch uses too
  m.def("has_bf16() -> bool", []() { return custom_pypto::kernels().bf16 != nullptr; });
  // whether it multiplies bfloat16 faster than float32
  m.def("multiplies_bf16() -> bool", []() { return custom_pypto::multiplies_bf16(); });
  // each format of stored weights: name, dtypes of codes and scales, codes in an element, whether
  // scales are of blocks, values of a group, whether scales have zeros, whether floats are rounded
  // to it with scales
  m.def("weight_formats() -> str[]", []() {
    std::vector<std::string> found;
    for (int i = 0; i < custom_pypto::cpu::kWeightFormats; ++i) {
      const custom_pypto::WeightFacts& facts = custom_pypto::kWeightFacts[i];
      const bool rounded = facts.scales && custom_pypto::kernels().weights[i].round;
      std::ostringstream line;
      line << facts.name << " " << custom_pypto::dtype_name(facts.weight) << " "
           << (facts.scales ? custom_pypto::dtype_name(*facts.scales) : "None") << " "
           << facts.codes << " " << facts.blocks << " " << facts.group << " " << facts.zeros << " "
           << rounded;
      found.push_back(line.str());
    }
    return found;
  });
}

// Importing custom_pypto._C loads this library; the ops are reached through torch.ops.
extern "C" PyObject* PyInit__C(void) {
  static PyModuleDef module = {.m_base = PyModuleDef_HEAD_INIT,
                               .m_name = "_C",
                               .m_doc = nullptr,
                               .m_size = -1,
                               .m_methods = nullptr,
                               .m_slots = nullptr,
                               .m_traverse = nullptr,
                               .m_clear = nullptr,
                               .m_free = nullptr};
  return PyModule_Create(&module);
}

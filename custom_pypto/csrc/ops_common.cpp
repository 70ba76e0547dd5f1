#include "ops_common.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace custom_pypto {

const cpu::Kernels& kernels() {
  static const cpu::Kernels& chosen = []() -> const cpu::Kernels& {
    // best first
    std::vector<const cpu::Kernels*> usable;
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) usable.push_back(&cpu::kAvx512Bf16);
    if (avx512) usable.push_back(&cpu::kAvx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      usable.push_back(&cpu::kAvx2);
    }
#endif
    usable.push_back(&cpu::kGeneric);
    const char* asked = std::getenv("CUSTOM_PYPTO_CPU_ISA");
    if (!asked || !*asked) return *usable.front();
    std::string names;
    for (const cpu::Kernels* candidate : usable) {
      if (candidate->name == std::string(asked)) return *candidate;
      names += std::string(names.empty() ? "" : ", ") + candidate->name;
    }
    TORCH_CHECK(false, "custom_pypto: CUSTOM_PYPTO_CPU_ISA must be one of ", names,
                " on this machine, got '", asked, "'");
  }();
  return chosen;
}

}  // namespace custom_pypto

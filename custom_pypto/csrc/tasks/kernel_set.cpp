#include "kernel_set.h"

#include <c10/util/Exception.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

#include <climits>
#include <cstdlib>
#include <string>
#include <vector>

namespace custom_pypto {

namespace {

// Ways of products with stored weights, chosen where a set is composed: x in 16 bits is rounded to
// int16; or x in bfloat16 stays that, in vectors or in tiles.
#if defined(__x86_64__)
constexpr cpu::WeightPolicy kByInt16 = {
    .float32 = {}, .float16 = {.rounds = true}, .bfloat16 = {.rounds = true}, .halves = {}};
#endif
#if defined(CUSTOM_PYPTO_AVX512_BF16)
constexpr cpu::WeightWays kVectors = {.most_stored = 24, .most_packed = 256, .in_bfloat16 = true};
constexpr cpu::WeightPolicy kByVectors = {
    .float32 = {}, .float16 = {}, .bfloat16 = kVectors, .halves = kVectors};
#endif
#if defined(CUSTOM_PYPTO_AMX)
constexpr cpu::WeightPolicy kByTiles = {
    .float32 = {},
    .float16 = {},
    .bfloat16 = {.most_stored = 6, .most_packed = 256, .in_bfloat16 = true},
    .halves = {.most_stored = 4, .most_packed = 256, .in_bfloat16 = true}};
#endif

#if defined(__x86_64__)
// of AMD: 25 is Zen 3 and 4, 26 Zen 5; 0 of others
int amd_family() {
  unsigned eax, ebx, ecx, edx;
  if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
  return (eax >> 8 & 15) + (eax >> 20 & 255);
}

// Intel's CPUs read several rows of a weight at once faster, Zen 5 one, Zen 4 one of a length that
// leaves x in the level-1 cache.
void set_most_in_turn(cpu::Kernels& set) {
  const int family = amd_family();
  if (family == 25) {
    set.most_in_turn[cpu::kBfloat16Weight] = 8192;
    set.most_in_turn[cpu::kFp8Weight] = 2048;
  } else if (family > 25) {
    for (int& most : set.most_in_turn) most = INT_MAX;
  }
}
#endif

// The sets that this CPU can run, best first; an emulation last.
std::vector<cpu::Kernels> usable_kernels() {
  std::vector<cpu::Kernels> usable, emulated;
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  cpu::Kernels vectors = cpu::kAvx512;
  set_most_in_turn(vectors);
  if (__builtin_cpu_supports("avx512vnni")) {
    vectors.int8_as_uint8 = &cpu::kAvx512Vnni;
    vectors.int16 = &cpu::kAvx512VnniInt16;
    vectors.dots[0] = cpu::kAvx512VnniDots;
    vectors.ways = kByInt16;
  }
#if defined(CUSTOM_PYPTO_AVX512_BF16)
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    cpu::Kernels set = vectors;
    set.bf16 = &cpu::kAvx512Bf16;
    // on Intel vdpbf16ps has half the rate of the float FMA, on AMD its double
    const bool intel = __builtin_cpu_is("intel");
    if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")) {
      set.dots_of_bf16 = intel ? cpu::kIntelBf16Dots : cpu::kAvx512Bf16Dots;
    }
#if defined(CUSTOM_PYPTO_AMX)
    set.name = "amx";
    set.tiles = &cpu::kAmx;
    set.ways = kByTiles;
    if (cpu::grants_amx()) usable.push_back(set);
    set.name = "amx_emulated";
    set.tiles = &cpu::kAmxEmulated;
    emulated.push_back(set);
    set.tiles = nullptr;
#endif
    set.name = "avx512_bf16";
    set.widens = intel;
    set.ways = intel ? vectors.ways : kByVectors;
    usable.push_back(set);
  }
#endif
  if (avx512) usable.push_back(vectors);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    cpu::Kernels set = cpu::kAvx2;
    set.int8_as_int16 = &cpu::kAvx2Int8;
    set.int16 = &cpu::kAvx2Int16;
    set.ways = kByInt16;
    usable.push_back(set);
  }
#endif
#if defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) {
    cpu::Kernels set = cpu::kGeneric;
    set.name = "neon_dotprod";
    set.dots[0] = cpu::kDotprodDots;
    usable.push_back(set);
  }
#endif
  usable.push_back(cpu::kGeneric);
  usable.insert(usable.end(), emulated.begin(), emulated.end());
  return usable;
}

}  // namespace

const cpu::Kernels& kernels() {
  static const cpu::Kernels chosen = [] {
    const std::vector<cpu::Kernels> usable = usable_kernels();
    const char* asked = std::getenv("CUSTOM_PYPTO_CPU_ISA");
    if (!asked || !*asked) return usable.front();
    std::string names;
    for (const cpu::Kernels& candidate : usable) {
      if (candidate.name == std::string(asked)) return candidate;
      names += std::string(names.empty() ? "" : ", ") + candidate.name;
    }
    TORCH_CHECK(false, "custom_pypto: CUSTOM_PYPTO_CPU_ISA must be one of ", names,
                " on this machine, got '", asked, "'");
  }();
  return chosen;
}

}  // namespace custom_pypto

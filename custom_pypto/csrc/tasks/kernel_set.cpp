#include "kernel_set.h"

#include <c10/util/Exception.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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
constexpr cpu::WeightWays kInt16 = {.rounds = true};
constexpr cpu::WeightPolicy kByInt16 = {
    .float32 = {}, .float16 = kInt16, .bfloat16 = {{}, kInt16, kInt16, kInt16, kInt16}};
#endif
#if defined(CUSTOM_PYPTO_AVX512_BF16)
constexpr cpu::WeightWays kVectors = {.most_stored = 24, .most_packed = 256, .in_bfloat16 = true};
constexpr cpu::WeightPolicy kByVectors = {
    .float32 = {}, .float16 = {}, .bfloat16 = {kVectors, kVectors, kVectors, kVectors, kVectors}};
#endif
#if defined(CUSTOM_PYPTO_AMX)
// torch.mm is as fast from the largest number on
constexpr cpu::WeightWays kHalves = {.most_stored = 4, .most_packed = 256, .in_bfloat16 = true};
constexpr cpu::WeightWays kTiles = {.most_stored = 4, .most_packed = 1024, .in_bfloat16 = true};
constexpr cpu::WeightWays kTilesOfFloats = {
    .most_stored = 2, .most_packed = 1024, .in_bfloat16 = true};
constexpr cpu::WeightPolicy kByTiles = {
    .float32 = {},
    .float16 = {},
    .bfloat16 = {kHalves, kTiles, kTilesOfFloats, kTiles, kTilesOfFloats}};
#endif

#if defined(__x86_64__)
// of AMD: 25 is Zen 3 and 4, 26 Zen 5; 0 of others
int amd_family() {
  unsigned eax, ebx, ecx, edx;
  if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
  return (eax >> 8 & 15) + (eax >> 20 & 255);
}

// How rows of a weight are read fastest, measured: on Intel's CPUs several at once, on Zen 5 one,
// on Zen 4 one of a format whose values take many instructions, or few, if x stays in the level-1
// cache.
void set_streams(cpu::Kernels& set) {
  const int family = amd_family();
  if (family == 25) {
    set.near = 256;
    set.most_by_four = 4096;
    for (auto format : {cpu::kFp8Weight, cpu::kInt4Weight, cpu::kFp4Weight}) {
      set.most_in_turn[format] = 8192;
    }
  } else if (family > 25) {
    for (int& most : set.most_in_turn) most = INT_MAX;
  }
}
#endif

#if defined(CUSTOM_PYPTO_AMX)
// Whether the CPU has AMX and the system lets this process use it.
bool grants_amx() {
  // g++ 12's __builtin_cpu_supports does not know AMX
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool tiles = d >> 24 & 1, bf16 = d >> 22 & 1, int8 = d >> 25 & 1;
  // Linux 5.16 and later: for all threads of the process and its children
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tiles && bf16 && int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Sets {
  std::vector<cpu::Kernels> usable;  // that this CPU can run, best first; an emulation last
  std::string left_out;              // what this CPU could run and the build's could not

  // Whether the CPU has the instructions of kernels and the library has the kernels.
  bool has(bool instructions, const void* kernels, const char* name) {
    if (instructions && !kernels) left_out += std::string(left_out.empty() ? "" : ", ") + name;
    return instructions && kernels;
  }
};

Sets sets_of_cpu() {
  Sets sets;
  std::vector<cpu::Kernels>& usable = sets.usable;
  std::vector<cpu::Kernels> emulated;
#if defined(__x86_64__)
  const bool bw = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bytes = bw && __builtin_cpu_supports("avx512vnni");
  const bool avx512 = sets.has(bw, &cpu::kAvx512, "avx512");
  const bool vnni = sets.has(bytes, &cpu::kAvx512Vnni, "avx512_vnni") && avx512;
  cpu::Kernels vectors = avx512 ? cpu::kAvx512 : cpu::kGeneric;
  set_streams(vectors);
  if (vnni) {
    vectors.int8_as_uint8 = &cpu::kAvx512Vnni;
    vectors.int16 = &cpu::kAvx512VnniInt16;
    vectors.int8_products = &cpu::kAvx512VnniInt8Products;
    vectors.dots[0] = cpu::kAvx512VnniDots;
    vectors.dots_of_int8 = cpu::kAvx512VnniInt8Dots;
    vectors.ways = kByInt16;
  }
#if defined(CUSTOM_PYPTO_AVX512_BF16)
  const bool halves = bw && __builtin_cpu_supports("avx512bf16");
  const bool bf16 = sets.has(halves, &cpu::kAvx512Bf16, "avx512_bf16") && avx512;
  const bool vbmi = bytes && __builtin_cpu_supports("avx512vbmi");
#if defined(CUSTOM_PYPTO_AMX)
  const bool amx = sets.has(halves && vbmi && grants_amx(), &cpu::kAmx, "amx");
#endif
  if (bf16) {
    cpu::Kernels set = vectors;
    set.bf16 = &cpu::kAvx512Bf16;
    // on Intel vdpbf16ps has half the rate of the float FMA, on AMD its double
    const bool intel = __builtin_cpu_is("intel");
    if (vnni && vbmi) {
      set.dots_of_bf16 = intel ? cpu::kIntelBf16Dots : cpu::kAvx512Bf16Dots;
      set.dots_of_int8 = cpu::kAvx512Bf16Int8Dots;
    }
#if defined(CUSTOM_PYPTO_AMX)
    set.name = "amx";
    set.tiles = &cpu::kAmx;
    set.int8_products = &cpu::kAmxInt8Products;
    set.ways = kByTiles;
    if (amx) usable.push_back(set);
    set.name = "amx_emulated";
    set.tiles = &cpu::kAmxEmulated;
    set.int8_products = &cpu::kAmxEmulatedInt8Products;
    if (vbmi && &cpu::kAmxEmulated) emulated.push_back(set);
    set.tiles = nullptr;
    set.int8_products = vectors.int8_products;
#endif
    set.name = "avx512_bf16";
    set.widens = intel;
    set.ways = intel ? vectors.ways : kByVectors;
    usable.push_back(set);
  }
#endif
  if (avx512) usable.push_back(vectors);
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (sets.has(avx2, &cpu::kAvx2, "avx2")) {
    cpu::Kernels set = cpu::kAvx2;
    set_streams(set);
    set.most_in_turn[cpu::kFp8Weight] = 0;  // floats meet several rows at once
    set.int8_as_int16 = &cpu::kAvx2Int8;
    set.int16 = &cpu::kAvx2Int16;
    set.dots_of_int8 = cpu::kAvx2Int8Dots;
    set.ways = kByInt16;
    usable.push_back(set);
  }
#endif
#if defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) {
    cpu::Kernels set = cpu::kGeneric;
    set.name = "neon_dotprod";
    set.dots[0] = cpu::kDotprodDots;
    set.dots_of_int8 = cpu::kDotprodInt8Dots;
    usable.push_back(set);
  }
#endif
  usable.push_back(cpu::kGeneric);
  usable.insert(usable.end(), emulated.begin(), emulated.end());
  return sets;
}

}  // namespace

const cpu::Kernels& kernels() {
  static const cpu::Kernels chosen = [] {
    const Sets sets = sets_of_cpu();
    const std::string remedy =
        sets.left_out.empty()
            ? ""
            : c10::str("; the library was compiled on another CPU, without the kernels ",
                       sets.left_out, " of this one: run bash build_and_install.sh --editable");
    const char* asked = std::getenv("CUSTOM_PYPTO_CPU_ISA");
    if (!asked || !*asked) {
      if (!remedy.empty()) {
        TORCH_WARN("custom_pypto: the ops use the kernels ", sets.usable.front().name, remedy);
      }
      return sets.usable.front();
    }
    std::string names;
    for (const cpu::Kernels& candidate : sets.usable) {
      if (candidate.name == std::string(asked)) return candidate;
      names += std::string(names.empty() ? "" : ", ") + candidate.name;
    }
    TORCH_CHECK(false, "custom_pypto: CUSTOM_PYPTO_CPU_ISA must be one of ", names,
                " on this machine, got '", asked, "'", remedy);
  }();
  return chosen;
}

}  // namespace custom_pypto

#define TILE_KERNELS kAmx
#include "amx.h"

#if defined(CUSTOM_PYPTO_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace custom_pypto::cpu {

bool grants_amx() {
  // g++ 12's __builtin_cpu_supports does not know AMX
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool tiles = d >> 24 & 1, bf16 = d >> 22 & 1;
  // Linux 5.16 and later: for all threads of the process and its children
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tiles && bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace custom_pypto::cpu
#endif

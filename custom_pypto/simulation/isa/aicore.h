// The device's dialect of C++ on a host: address spaces, pipes and scalar intrinsics.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "device.h"

#define __gm__ /* global memory; the attribute [aicore] is removed from the text */
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __aicore__
#define TILEOP static
#define __always_inline inline

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t {
  EVENT_ID0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7
};

inline void set_flag(pipe_t from, pipe_t to, event_t event) { isa::set_flag(from, to, event); }
inline void wait_flag(pipe_t from, pipe_t to, event_t event) { isa::wait_flag(from, to, event); }

// instructions run one by one: nothing to wait for, no cache to empty
inline void pipe_barrier(pipe_t) {}
enum cache_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE, CACHELINE_OUT };
template <class... Arguments>
inline void dcci(Arguments...) {}
using mem_dsb_t = int;
inline void dsb(mem_dsb_t) {}

// registers that PyPTO's templates for other instructions set
template <class... Arguments>
inline void set_vector_mask(Arguments...) {
  isa::unsupported("set_vector_mask");
}
#define ISA_ATOMIC(kind) \
  inline void set_atomic_##kind() { isa::unsupported("set_atomic_" #kind); }
ISA_ATOMIC(f32)
ISA_ATOMIC(f16)
ISA_ATOMIC(bf16)
ISA_ATOMIC(s32)
ISA_ATOMIC(s16)
ISA_ATOMIC(s8)
ISA_ATOMIC(add)
#undef ISA_ATOMIC

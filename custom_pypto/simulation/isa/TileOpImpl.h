// The header of a task's generated code: PyPTO's own tile operations from its wheel, on our
// instructions. PyPTO's file of this name also includes operations of an older, untyped interface.
#pragma once

#include "aicore.h"
// in this order: PyPTO's headers need the macros above, and each other
// clang-format off
#include "tilefwk/aicore_runtime.h"
#include "tileop_common.h"
#include "utils/layout.h"
#include "vector/unary.h"
#include "vector/trans.h"
#include "vector/binary.h"
#include "vector/binary_scalar.h"
#include "vector/cast.h"
#include "vector/reduce.h"
#include "vector/sort.h"
#include "vector/mte.h"
#include "vector/compare.h"
#include "vector/gather.h"
#include "vector/expand.h"
#include "vector/extract.h"
#include "vector/where.h"
#include "vector/fillpad.h"
#include "vector/vector_dup.h"
#include "vector/range.h"
#include "cube/cube_pto.h"
// clang-format on

struct TaskStat;  // the type of a body's parameter since CANN 9.1, always null here

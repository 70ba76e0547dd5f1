#define TILE_KERNELS kAmx
#define TILE_INT8 kAmxInt8Products
#include "amx.h"

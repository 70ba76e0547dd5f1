#define EMULATED_TILES
#define TILE_KERNELS kAmxEmulated
#define TILE_INT8 kAmxEmulatedInt8Products
#include "amx.h"

#define EMULATED_TILES
#define TILE_KERNELS kAmxEmulated
#include "amx.h"

#define TILE_KERNELS kAmx
#include "amx.h"

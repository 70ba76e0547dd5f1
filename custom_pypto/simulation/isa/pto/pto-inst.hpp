// The name under which PyPTO's tile operations include the instructions.
#pragma once

#include "../instructions.h"

// Moved: include "ptx/tma.cuh".
#pragma once

#include "ptx/tma.cuh"

// Moved: include "ptx/wgmma.cuh".
#pragma once

#include "ptx/wgmma.cuh"

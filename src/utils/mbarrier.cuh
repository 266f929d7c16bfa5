// Moved: include "ptx/mbarrier.cuh".
#pragma once

#include "ptx/mbarrier.cuh"

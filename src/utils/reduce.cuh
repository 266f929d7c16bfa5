// Moved: include "reduce/reduce.cuh".
#pragma once

#include "reduce/reduce.cuh"

// The part of CUDA's header of this name that kernels use: blocks that run together are a cluster.
#pragma once

#include "emulator.h"

namespace cooperative_groups {

struct grid_group {
  void sync() const { emulator::cluster_barrier(); }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups

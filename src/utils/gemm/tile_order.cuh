// The order in which blocks take the tiles of a matrix.
#pragma once

namespace cuda_ops {

template <class Int>
struct TileIndex {
  Int row, column;
};

// Tile number `index`: down a band of `height` tile rows, then to the next column of the
// band. The tiles in flight are then about as high as wide, and what they read stays in the
// L2 cache.
template <class Int>
__device__ TileIndex<Int> tile_in_bands(Int index, Int rows, Int columns, Int height) {
  const Int first = index / (height * columns) * height;
  const Int left = rows - first, own = left < height ? left : height;
  const Int at = index - first * columns;
  return {first + at % own, at / own};
}

}  // namespace cuda_ops

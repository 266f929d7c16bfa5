// What may be tuned about sums over rows: the binding's side of reduce.h.
#pragma once

#include "reduce/reduce.h"
#include "tuned.h"

namespace cuda_ops {

inline Knob sum_blocks_per_sm{"blocks_per_sm", RowSums().blocks_per_sm, {4, 8, 16, 32}};
inline Knob sum_split_bytes{"split_bytes", RowSums().split_bytes, {32, 64, 128, 256}};

// Fills in what was chosen for rows of such sizes, once a call.
inline void use_choice(RowSums& p) {
  const int bucket = bucket_of(p.rows.numel, p.n, p.rows.dtype);
  p.blocks_per_sm = sum_blocks_per_sm.at(bucket);
  p.split_bytes = sum_split_bytes.at(bucket);
}

}  // namespace cuda_ops

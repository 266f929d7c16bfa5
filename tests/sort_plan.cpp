// Prints which kernels sort.h chooses: one line for each line of input,
//   rows, their length, element bytes, shared memory, whether clusters can be launched, how many of
//   16 blocks at once.
#include "sort/sort.h"

#include <cstdio>

int main() {
  long long rows, n, size, shared, wide;
  int clusters;
  while (std::scanf("%lld %lld %lld %lld %d %lld", &rows, &n, &size, &shared, &clusters, &wide) ==
         6) {
    const auto c = cuda_ops::sort_config(rows, n, size, {shared, clusters != 0, wide});
    std::printf(
        "%d width %d items %d cluster %d threads %d blocks %lld shared %lld at once %lld"
        "%s, %lld bytes\n",
        int(c.path), c.width, c.items, c.cluster, c.threads, (long long)c.blocks,
        (long long)c.shared_bytes, (long long)c.rows_at_once,
        c.separate ? " by separate launches" : "",
        (long long)cuda_ops::sort_workspace_bytes(c, n, size));
  }
}

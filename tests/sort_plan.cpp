// Prints which kernels sort.h chooses: one line for each line of input,
//   device as device_named() reads it, rows, their length, element bytes, whether clusters can be
//   launched, how many of 16 blocks at once.
#include "sort/sort.h"

#include <cstdio>

int main() {
  long long rows, n, size, wide;
  char name[64];
  cuda_ops::DeviceInfo device;
  int clusters;
  while (std::scanf("%63s %lld %lld %lld %d %lld", name, &rows, &n, &size, &clusters, &wide) == 6) {
    if (!cuda_ops::device_named(name, device)) return 1;
    const auto c = cuda_ops::sort_config(rows, n, size, device, {clusters != 0, wide});
    std::printf(
        "%d width %d items %d cluster %d threads %d blocks %lld shared %lld at once %lld"
        "%s, %lld bytes\n",
        int(c.path), c.width, c.items, c.cluster, c.threads, (long long)c.blocks,
        (long long)c.shared_bytes, (long long)c.rows_at_once,
        c.separate ? " by separate launches" : "",
        (long long)cuda_ops::sort_workspace_bytes(c, n, size));
  }
}

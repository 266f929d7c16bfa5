#pragma once
namespace leet {
__device__ inline float top(float a, float b) { return a > b ? a : b; }
inline int blocks(int n, int each) { return (n + each - 1) / each; }
}

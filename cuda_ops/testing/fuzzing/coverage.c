// What operators call that are built with -fsanitize-coverage=trace-pc,trace-cmp. gcc has no
// counters in the fuzzer's form, so they stand here, and comparisons are passed on to it.
#include <stdint.h>

#define COUNT 65536
#define SHOWN __attribute__((visibility("default")))

SHOWN uint8_t cuda_ops_counters[COUNT];
SHOWN uint64_t cuda_ops_counter_count = COUNT;
// The fuzzer's functions for comparisons of 1, 2, 4 and 8 bytes, those with constants, and
// switches; null until it is there.
SHOWN void (*cuda_ops_compare[9])(uint64_t, uint64_t);

SHOWN void __sanitizer_cov_trace_pc(void) {
  uintptr_t place = (uintptr_t)__builtin_return_address(0);
  place ^= place >> 16;
  ++cuda_ops_counters[place % COUNT];
}

// The last thing that each does is a jump, so the fuzzer sees the operator as its caller.
#define COMPARISON(name, type, index)                              \
  SHOWN void __sanitizer_cov_trace_##name(type a, type b) {        \
    void (*compare)(uint64_t, uint64_t) = cuda_ops_compare[index]; \
    if (compare) compare(a, b);                                    \
  }
COMPARISON(cmp1, uint8_t, 0)
COMPARISON(cmp2, uint16_t, 1)
COMPARISON(cmp4, uint32_t, 2)
COMPARISON(cmp8, uint64_t, 3)
COMPARISON(const_cmp1, uint8_t, 4)
COMPARISON(const_cmp2, uint16_t, 5)
COMPARISON(const_cmp4, uint32_t, 6)
COMPARISON(const_cmp8, uint64_t, 7)
COMPARISON(switch, uint64_t, 8)
SHOWN void __sanitizer_cov_trace_cmpf(float a, float b) {}
SHOWN void __sanitizer_cov_trace_cmpd(double a, double b) {}

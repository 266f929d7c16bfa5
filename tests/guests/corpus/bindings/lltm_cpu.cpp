#include "lltm_shapes.h"

double lltm_cpu(double x) { return kLltmGates * x; }

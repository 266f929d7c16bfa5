// The one include of a binding: tensors, launches, elementwise loops and the
// manifest. Everything comes from the LibTorch stable ABI, so one build serves
// every torch from 2.10 on.
#pragma once

#include "elementwise.h"
#include "manifest.h"

"""``python -m benchmarks``: every operator of this checkout, measured."""

import sys

from cuda_ops.benchmarking.command import main

sys.exit(main())

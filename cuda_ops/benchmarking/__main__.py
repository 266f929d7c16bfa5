"""Runs ``python -m cuda_ops.benchmarking``."""

import sys

from cuda_ops.benchmarking.command import main

sys.exit(main())

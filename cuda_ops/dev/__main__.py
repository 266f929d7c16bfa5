"""``python -m cuda_ops.dev``: the same as ``python compile_dev.py``."""

import sys

from cuda_ops.dev import main

sys.exit(main())

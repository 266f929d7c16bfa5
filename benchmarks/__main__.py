"""``python -m benchmarks`` measures every operator of this checkout."""

import sys

from benchmarks import peers
from cuda_ops.benchmarking.command import main
from cuda_ops.registry import registry

registry().plugins.add(peers, "benchmarks.peers")
sys.exit(main())

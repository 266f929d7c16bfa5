"""Build, load and check operators while they are written; see ``--help``.

From Python: ``import compile_dev; compile_dev.compiled_ops["silu"](x)``, and
``compile_dev.reload()`` after an edit.
"""

import sys

from cuda_ops.dev import compiled_ops, main, reload

__all__ = ["compiled_ops", "main", "reload"]

if __name__ == "__main__":
    sys.exit(main())

"""Build, load and check operators while they are written; see ``--help``.

From Python: ``import compile_dev; compile_dev.compiled_ops["silu"](x)``, and
``compile_dev.reload()`` after an edit. ``compile_dev.add_root("my_ops")`` lists the pairs
of another folder too.
"""

import sys

from cuda_ops.dev import add_root, compiled_ops, main, reload

__all__ = ["add_root", "compiled_ops", "main", "reload"]

if __name__ == "__main__":
    sys.exit(main())

"""The dev loop, ``compile_dev.py`` and ``cuda-ops``: build, reload and check while you write.

>>> from cuda_ops.dev import compiled_ops, reload
>>> compiled_ops["silu"](x)
>>> reload()  # after an edit: functions obtained earlier run the new code
"""

from cuda_ops.compile_ops import add_root, compiled_ops, reload
from cuda_ops.dev.command import main

__all__ = ["add_root", "compiled_ops", "main", "reload"]

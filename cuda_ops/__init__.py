"""Turns two files into a PyTorch operator.

``cuda_ops.<op>`` is the public function of each operator, ``torch.ops.cuda_ops.<op>``
the one that the dispatcher calls. Importing this package opens no operator library;
the first use of an operator does.

>>> import torch, cuda_ops
>>> cuda_ops.silu(torch.zeros(3))
tensor([0., 0., 0.])
"""

# Names with an underscore alone: any other would hide the operator of that name. So no
# `from __future__ import annotations` either.
import importlib.util as _util

from cuda_ops.namespaces import expose as _expose

__version__ = "0.1.0"

if _util.find_spec("torch") is not None:  # setup.py may come before torch
    from cuda_ops import torch_ops as _torch_ops

    _torch_ops.install()

__getattr__, __dir__ = _expose("cuda_ops", __name__)

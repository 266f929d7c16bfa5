"""Roots with an operator ``add`` in a namespace of their own, and code in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent

#: An operator with the name of one of cuda_ops, in a namespace of its own.
_BINDING = """
#include "binding.h"
using namespace cuda_ops;
namespace {{
Tensor forward(const Tensor& x, const Tensor& y) {{
  Tensor out = empty_elementwise(x, y);
  map_cpu(strided(out, x, y), [](double v, double w) {{ return v + {factor} * w; }});
  return out;
}}
std::tuple<Tensor, Tensor> backward(const Tensor& grad_out, const Tensor& x, const Tensor& y) {{
  Tensor grad_x = empty_elementwise(grad_out, x, y), grad_y = empty_elementwise(grad_out, x, y);
  map_cpu(strided(grad_x, grad_out), [](double g) {{ return g; }});
  map_cpu(strided(grad_y, grad_out), [](double g) {{ return {factor} * g; }});
  return {{grad_x, grad_y}};
}}
}}
CUDA_OPS({space}library) {{
  library.op("add(Tensor x, Tensor y{more}) -> Tensor", "(),()->()").dtypes(kFloating)
      .cpu<forward>();
  library.op("add_backward(Tensor grad_out, Tensor x, Tensor y) -> (Tensor grad_x, Tensor grad_y)",
             "(),(),()->(),()").dtypes(kFloating).cpu<backward>();
}}
"""


@dataclass
class Spaced:
    """A root with an operator ``add``."""

    root: Path
    namespace: str

    def write(self, factor: int, more: str = "") -> None:
        space = f"{self.namespace}, " if self.namespace != "cuda_ops" else ""
        text = _BINDING.format(factor=factor, space=space, more=more)
        (self.root / "bindings").mkdir(parents=True, exist_ok=True)
        (self.root / "bindings" / "add.cpp").write_text(text)

    @property
    def key(self) -> str:
        return f"{self.namespace}::add"

    @property
    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = registry().public(self.key)
        return function


def fresh(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in another process, which finds packages in these folders."""
    searched = [*map(str, (*paths, REPO)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )

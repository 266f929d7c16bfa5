"""The checks, in the order in which they run: from the specific to the general.

An operator that ignores strides should fail ``layouts``, and not ``reference`` first; so each check
looks for its own mistakes alone. One module per class of mistake.
"""

from __future__ import annotations

from cuda_ops.testing.case import Check
from cuda_ops.testing.checks.abi import abi
from cuda_ops.testing.checks.alignment import alignment
from cuda_ops.testing.checks.autocast import autocast
from cuda_ops.testing.checks.boundaries import boundaries, limits_elsewhere, tails
from cuda_ops.testing.checks.bounds import bounds, indices
from cuda_ops.testing.checks.by_torch import by_torch
from cuda_ops.testing.checks.checkpoint import checkpoint
from cuda_ops.testing.checks.compiled import compile_dynamic, compile_static
from cuda_ops.testing.checks.defaults import defaults
from cuda_ops.testing.checks.devices import devices
from cuda_ops.testing.checks.dtensor import dtensor
from cuda_ops.testing.checks.empty import empty
from cuda_ops.testing.checks.forward_mode import jvp
from cuda_ops.testing.checks.gradient_edges import gradient_edges
from cuda_ops.testing.checks.gradient_layouts import gradient_layouts, gradient_outputs
from cuda_ops.testing.checks.gradients import gradcheck, gradient_declared
from cuda_ops.testing.checks.graphs import graphs
from cuda_ops.testing.checks.index_width import far_rows, far_strides, many_elements
from cuda_ops.testing.checks.large import large
from cuda_ops.testing.checks.launches import launches
from cuda_ops.testing.checks.layouts import layouts
from cuda_ops.testing.checks.leaks import leaks
from cuda_ops.testing.checks.lists import lists, mixed_lists
from cuda_ops.testing.checks.numerics import numerics, reference, rounding
from cuda_ops.testing.checks.opcheck import opcheck
from cuda_ops.testing.checks.parallel import parallel
from cuda_ops.testing.checks.public import public
from cuda_ops.testing.checks.races import early_start, repeats
from cuda_ops.testing.checks.random import draws, independence, replays
from cuda_ops.testing.checks.registration import gaps, mutation, registration, written
from cuda_ops.testing.checks.reinplaced import reinplaced
from cuda_ops.testing.checks.saved import frozen, saved
from cuda_ops.testing.checks.scalars import scalars
from cuda_ops.testing.checks.sizes import gradient_sizes, sizes
from cuda_ops.testing.checks.state import state
from cuda_ops.testing.checks.streams import late_inputs, streams
from cuda_ops.testing.checks.temporaries import freed_copies, temporaries
from cuda_ops.testing.checks.threads import threads
from cuda_ops.testing.checks.unwritten import unwritten
from cuda_ops.testing.checks.vmap import vmap
from cuda_ops.testing.checks.workspaces import workspaces

CHECKS: tuple[Check, ...] = (
    abi,
    empty,
    streams,
    state,
    mutation,
    written,
    unwritten,
    repeats,
    parallel,
    bounds,
    workspaces,
    temporaries,
    alignment,
    gaps,
    devices,
    graphs,
    registration,
    reference,
    by_torch,
    indices,
    layouts,
    lists,
    mixed_lists,
    numerics,
    rounding,
    scalars,
    defaults,
    sizes,
    launches,
    boundaries,
    tails,
    limits_elsewhere,
    far_strides,
    far_rows,
    many_elements,
    large,
    freed_copies,
    late_inputs,
    early_start,
    threads,
    gradient_declared,
    gradcheck,
    frozen,
    saved,
    gradient_edges,
    jvp,
    gradient_layouts,
    gradient_outputs,
    checkpoint,
    gradient_sizes,
    independence,
    draws,
    replays,
    public,
    autocast,
    vmap,
    dtensor,
    opcheck,
    compile_static,
    compile_dynamic,
    reinplaced,
    leaks,
)

#: What ``compile_dev.py --check`` runs: those that take seconds.
QUICK = tuple(check for check in CHECKS if check.quick)


def by_name(name: str) -> Check:
    """Returns the check of this name.

    Raises:
        ValueError: there is none; the text lists all.
    """
    for check in CHECKS:
        if check.name == name:
            return check
    raise ValueError(f"no check {name!r}; known: {', '.join(c.name for c in CHECKS)}")

"""Everything cuda_ops raises on its own account derives from :class:`CudaOpsError`."""

from __future__ import annotations


class CudaOpsError(RuntimeError):
    """Base of all errors below."""


class DiscoveryError(CudaOpsError):
    """Files under an operator root that do not form operators."""


class BuildError(CudaOpsError):
    """An operator did not compile; the message holds the failing compiler lines."""


class ManifestError(CudaOpsError):
    """A library's manifest contradicts itself: schema, signature line and C++ types."""


class PluginError(CudaOpsError):
    """A plugin is invalid, or a hook of it raised."""


class ResultError(CudaOpsError):
    """An operator was built and loaded, and computes something else than its reference."""


class KitError(CudaOpsError):
    """The test kit could not make or compare something, which says nothing about the operator."""


class NotTunedError(CudaOpsError, ValueError):
    """Arguments for which an operator has no launch configurations to choose among."""


class BenchmarkError(CudaOpsError):
    """A measurement that must not be believed, or two that cannot be compared."""


class StageError(CudaOpsError):
    """A stage of ``cuda_ops.runtime.pipeline`` raised; ``__cause__`` is what it raised."""


class StreamRaceError(CudaOpsError):
    """``cuda_ops.runtime.check_streams`` found a tensor that was used on a stream which had not
    waited for the one that uses it before; ``race`` has both uses.
    """

    def __init__(self, race: object) -> None:
        super().__init__(f"check_streams: {race}")
        self.race = race


class GraphError(CudaOpsError):
    """``cuda_ops.runtime.graphed`` cannot capture a function, for the reason that it names."""

"""A kernel of PTX, launched in clusters through the driver: small ones that look at the GPU itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cutegen.errors import DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["DriverKernel"]


class DriverKernel:
    """A kernel on the present device.

    Args:
        ptx: Its text.
        name: Of its entry.
        smem_bytes: Dynamic shared memory of each CTA.
    """

    def __init__(self, ptx: str, name: str, smem_bytes: int = 0) -> None:
        import cuda.bindings.driver as cuda
        import torch

        self._cuda: Any = cuda
        self._torch: Any = torch
        self._smem_bytes = smem_bytes
        torch.zeros(1, device="cuda")  # creates the context
        module = self._done(cuda.cuModuleLoadData(ptx.encode() + b"\0"))
        self._function = self._done(cuda.cuModuleGetFunction(module, name.encode()))
        attributes = cuda.CUfunction_attribute
        self._set(attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        self._set(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)

    def _set(self, attribute: Any, value: int) -> None:
        self._done(self._cuda.cuFuncSetAttribute(self._function, attribute, value))

    @staticmethod
    def _done(result: tuple[Any, ...]) -> Any:
        """Return what a call of the driver returned.

        Raises:
            DeviceError: The call failed.
        """
        if int(result[0]):
            raise DeviceError(f"a call of the CUDA driver failed: {result[0]}")
        return result[1] if len(result) > 1 else None

    def _config(
        self, cluster: int, threads: int, clusters: int, stream: torch.cuda.Stream | None, *, plain: bool
    ) -> Any:
        config = self._cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster * clusters, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._smem_bytes
        config.hStream = (stream or self._torch.cuda.current_stream()).cuda_stream
        attribute = self._cuda.CUlaunchAttribute()
        attribute.id = self._cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = attribute.value.clusterDim
        dims.x, dims.y, dims.z = cluster, 1, 1
        if not plain:
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def launch(
        self,
        cluster: int,
        threads: int,
        clusters: int,
        arguments: Sequence[int] = (),
        stream: torch.cuda.Stream | None = None,
        plain: bool = False,
    ) -> None:
        """Launch so many clusters of ``cluster`` CTAs, with 64-bit arguments, on a stream or the current one.

        ``plain`` CTAs are of no cluster; others count as those of clusters even where these have but one.

        Raises:
            DeviceError: The driver refuses.
        """
        config = self._config(cluster, threads, clusters, stream, plain=plain)
        passed = (tuple(arguments), (ctypes.c_uint64,) * len(arguments)) if arguments else 0
        self._done(self._cuda.cuLaunchKernelEx(config, self._function, passed, 0))

    def at_a_time(self, cluster: int, threads: int, sm_count: int) -> int:
        """Return how many clusters run at a time by the driver's own count.

        Raises:
            DeviceError: The driver refuses.
        """
        if cluster == 1:
            count = self._cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor
            return int(self._done(count(self._function, threads, self._smem_bytes))) * sm_count
        config = self._config(cluster, threads, 1, None, plain=False)
        return int(self._done(self._cuda.cuOccupancyMaxActiveClusters(self._function, config)))

"""Workspaces of kernels under test: poisoned or zeroed before a run, and inspected after it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutegen.errors import CheckError, LaunchError
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["Scratch"]

#: Floats behind a workspace that must stay untouched.
_GUARD = 4096


class Scratch:
    """One allocation for all kernels that take a workspace as it is, another for those that want zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[bool, torch.Tensor] = {}

    def take(self, launch: Launch, *, poison: bool = False) -> torch.Tensor | None:
        """Return the workspace for ``launch``, None if it needs none.

        Args:
            launch: What it is for.
            poison: Fill it (unless it must be zero), and what lies behind it, with NaN.

        Raises:
            LaunchError: There is not that much memory.
        """
        if not launch.workspace_bytes:
            return None
        count = launch.workspace_bytes // 4
        buffer = self._buffer(launch.zeroed, count)
        if poison:
            buffer.fill_(math.nan)
        if launch.zeroed:
            buffer[:count].zero_()
        return buffer[:count]

    def _buffer(self, zeroed: bool, count: int) -> torch.Tensor:
        import torch

        buffer = self._buffers.get(zeroed)
        if buffer is None or buffer.numel() < count + _GUARD:
            try:
                buffer = torch.zeros(count + _GUARD, dtype=torch.float32, device=self._device)
            except RuntimeError as error:
                raise LaunchError(f"workspace of {count * 4} bytes does not fit: {error}") from error
            self._buffers[zeroed] = buffer
        return buffer

    def inspect(self, launch: Launch) -> None:
        """Do nothing if runs of ``launch`` since ``take(..., poison=True)`` kept to the workspace.

        Raises:
            CheckError: They wrote past its end, or did not leave the zeros that the next launch needs.
        """
        if not launch.workspace_bytes:
            return
        count = launch.workspace_bytes // 4
        buffer = self._buffers[launch.zeroed]
        if not bool(buffer[count : count + _GUARD].isnan().all()):
            raise CheckError(f"wrote behind its workspace of {launch.workspace_bytes} bytes")
        if launch.zeroed and bool(buffer[:count].any()):
            raise CheckError(
                f"left numbers in its workspace of {launch.workspace_bytes} bytes, which must be zero"
            )

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()

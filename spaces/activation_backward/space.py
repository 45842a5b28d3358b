"""The configs of the gradients of activations: those of gates."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..gated.space import build


def build_space(arch: Arch) -> Space:
    """Return the space of the backward kernels bound to ``arch``."""
    return build("activation_backward", arch)

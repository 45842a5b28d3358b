"""An Operator API that is not installed: a package by name only, and what its manifest would list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cutegen.space import Config

PACKAGE = "nvidia-cutlass-operators 0.0.0 (0123456789ab)"
HOPPER = "Sm90StaticPersistentGemmOperator"


def operator(tile: str, cluster: str = "1x1") -> Config:
    """The config of a Hopper operator."""
    return Config.parse(f"source=operators operator={HOPPER} tile_shape_mn={tile} cluster_shape_mn={cluster}")


def design(m: int, n: int, cluster: tuple[int, int] = (1, 1), name: str = HOPPER) -> dict[str, Any]:
    """What the API says of an operator; shapes have a third number."""
    return {"operator": name, "tile_shape": [m, n, 64], "cluster_shape": [*cluster, 1]}


#: Two that can be launched, one without an adapter, one of a tile that is unknown; and refusals.
LISTED: Mapping[str, Any] = {
    "designs": [
        design(128, 256, (2, 1)),
        design(64, 64),
        design(128, 64, name="SomeOtherOperator"),
        design(128, 96),
    ],
    "refused": [
        {"operator": "OldOperator", "reason": "needs\n  another target"},
        {"operator": "OldOperator", "reason": "needs another target"},
    ],
}
OFFERED = (operator("128x256", "2x1"), operator("64x64"))


def pretend_installed(monkeypatch: pytest.MonkeyPatch, package: str = PACKAGE) -> None:
    """Let every module believe that the package is there."""
    for module in ("families.gemm.family", "operator_api.answers", "tuning.autotuner", "tuning.sweep"):
        monkeypatch.setattr(f"cutegen.{module}.require_package", lambda: package)

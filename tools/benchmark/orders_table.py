"""What orders of tiles take in one wave: files of tools/sweep_products.py --every-order, rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.wave_order import Order, least_loads
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure.statistics import geometric_mean
from cutegen.space import Config
from tools.benchmark.markdown import down, line, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["SWEEP_OF_PRODUCTS", "Orders"]

#: What such files say that they are.
SWEEP_OF_PRODUCTS = "sweep of products"
#: Orders that a kernel must have been timed in to count.
_LEAST_ORDERS = 8
_ARCH = find_arch("sm_90a")


@dataclass(frozen=True)
class _Kernel:
    """A kernel of one wave on one product, in several orders."""

    tiling: Tiling
    config: Config
    times: Mapping[Order, float]

    @property
    def best(self) -> float:
        """Microseconds of the fastest order."""
        return min(self.times.values())

    def chosen(self) -> float:
        """Return what the order with the fewest loads, of those that the space has, takes over the best."""
        bands = find_space("gemm", _ARCH).domains["swizzle_size"]
        orders = sorted(order for order in self.times if order[0] in bands)
        return self.times[least_loads(self.tiling.wave(self.config, 1), orders)] / self.best

    def along(self) -> float:
        """Return what tiles in bands of one, along the side with more of them, take over the best."""
        shape = self.tiling.geometry(self.config)
        return self.times[1, shape.clusters_m > shape.clusters_n] / self.best

    def worst(self) -> float:
        """Return what the slowest order takes over the best."""
        return max(self.times.values()) / self.best


class Orders(QuotedFile):
    """Kernels of one wave in several orders."""

    tool = "tools/sweep_products.py --every-order"

    def kernels(self) -> Iterator[_Kernel]:
        """Yield what was timed in enough orders."""
        for row in self.facts["rows"]:
            yield from self._of_product(row)

    def _of_product(self, row: Mapping[str, Any]) -> Iterator[_Kernel]:
        tiling = Tiling(Problem.parse(row["problem"]), self._sm_count, find_machine(_ARCH))
        found: dict[Config, dict[Order, float]] = {}
        for point in row["points"]:
            config = Config.parse(point["config"])
            order = config.integer("swizzle_size"), config.flag("raster_along_m")
            kernel = config.replace(swizzle_size=1, raster_along_m=False)
            found.setdefault(kernel, {})[order] = point["us"]
        for kernel, times in found.items():
            one_wave = kernel["split_k"] == 1 and tiling.is_one_wave(kernel, 1)
            if one_wave and len(times) >= _LEAST_ORDERS and tiling.geometry(kernel).has_orders:
                yield _Kernel(tiling, kernel, times)

    @property
    def _sm_count(self) -> int:
        return int(self.facts["conditions"]["gpu"]["sm_count"])

    def summary(self) -> list[str]:
        """Return what the chosen order takes over the best one."""
        kernels = list(self.kernels())
        chosen = up(100 * (geometric_mean(kernel.chosen() for kernel in kernels) - 1), 1)
        along = down(100 * (geometric_mean(kernel.along() for kernel in kernels) - 1), 1)
        return [
            f"- {len(kernels)} kernels of one wave: the order with the fewest loads takes **{chosen} %** "
            "longer than the best in the geometric mean, bands of one along the side with more tiles "
            f"{along} %"
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        kernels = list(self.kernels())
        head = ["order", "geometric mean", "of ten, the ninth", "largest"]
        table = [line(head), line(["---", "---:", "---:", "---:"])]
        for name, of, round_ in (
            ("with the fewest loads", _Kernel.chosen, up),
            ("in bands of one, along the side with more tiles", _Kernel.along, down),
            ("the slowest", _Kernel.worst, down),
        ):
            values = sorted(of(kernel) for kernel in kernels)
            cells = geometric_mean(values), values[len(values) * 9 // 10], values[-1]
            table.append(line([name, *(f"{round_(100 * (value - 1), 1)} %" for value in cells)]))
        return "\n".join(
            [*self.summary(), "", *table, "", f"Time over that of the fastest order. {self.where()}"]
        )

"""What orders of tiles take: files of tools/sweep_products.py with several of each kernel, rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.wave_order import Order, orders_of
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure.statistics import geometric_mean
from cutegen.space import Config
from tools.benchmark.markdown import down, line, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["SWEEP_OF_PRODUCTS", "Orders"]

#: What such files say that they are.
SWEEP_OF_PRODUCTS = "sweep of products"
_ARCH = find_arch("sm_90a")


@dataclass(frozen=True)
class _Kernel:
    """A kernel on one product, in several orders.

    Attributes:
        tiling: Of the product.
        config: The kernel.
        times: Microseconds by order.
    """

    tiling: Tiling
    config: Config
    times: Mapping[Order, float]

    @property
    def is_one_wave(self) -> bool:
        """Whether all its tiles run at once."""
        return self.tiling.is_one_wave(self.config, 1)

    @property
    def best(self) -> float:
        """Microseconds of the fastest order."""
        return min(self.times.values())

    def chosen(self) -> float:
        """Return what the order that is chosen today, or one that is the same, takes over the best."""
        orders = orders_of(find_space("gemm", _ARCH).domains["swizzle_size"], (False, True))
        return self._us(self.tiling.best_order(self.config, 1, orders)) / self.best

    def _us(self, order: Order) -> float:
        shape = self.tiling.geometry(self.config)
        band, along = order
        most = shape.clusters_n if along else shape.clusters_m
        return next(
            us
            for (width, way), us in self.times.items()
            if way == along and min(width, most) == min(band, most)
        )

    def first(self) -> float:
        """Return what the first order takes over the best: bands of one cluster, along n."""
        return self._us((1, False)) / self.best

    def worst(self) -> float:
        """Return what the slowest order takes over the best."""
        return max(self.times.values()) / self.best


class Orders(QuotedFile):
    """Kernels in several orders."""

    tool = "tools/sweep_products.py"

    def kernels(self) -> list[_Kernel]:
        """Return what was timed in several orders."""
        return [kernel for row in self.facts["rows"] for kernel in self._of_product(row)]

    def _of_product(self, row: Mapping[str, Any]) -> Iterator[_Kernel]:
        sm_count = int(self.facts["conditions"]["gpu"]["sm_count"])
        tiling = Tiling(Problem.parse(row["problem"]), sm_count, find_machine(_ARCH))
        found: dict[Config, dict[Order, float]] = {}
        for point in row["points"]:
            config = Config.parse(point["config"])
            order = config.integer("swizzle_size"), config.flag("raster_along_m")
            kernel = config.replace(swizzle_size=1, raster_along_m=False)
            found.setdefault(kernel, {})[order] = point["us"]
        for kernel, times in found.items():
            if kernel["split_k"] == 1 and len(times) > 1 and tiling.geometry(kernel).has_orders:
                yield _Kernel(tiling, kernel, times)

    def summary(self) -> list[str]:
        """Return what the chosen order takes over the best one."""
        lines = []
        for one_wave in (True, False):
            some = [kernel for kernel in self.kernels() if kernel.is_one_wave == one_wave]
            if some:
                chosen = up(100 * (geometric_mean(kernel.chosen() for kernel in some) - 1), 1)
                waves = "one wave" if one_wave else "several waves"
                lines.append(
                    f"- {len(some)} kernels of {waves}: the order that is chosen takes **{chosen} %** longer "
                    "than the best in the geometric mean"
                )
        return lines

    def render(self) -> str:
        """Return the Markdown of the file."""
        kernels = self.kernels()
        head = ["order", "geometric mean", "of ten, the ninth", "largest"]
        table = [line(head), line(["---", "---:", "---:", "---:"])]
        for name, of, round_ in (
            ("as chosen", _Kernel.chosen, up),
            ("bands of one cluster, along n", _Kernel.first, down),
            ("the slowest", _Kernel.worst, down),
        ):
            values = sorted(of(kernel) for kernel in kernels)
            cells = geometric_mean(values), values[len(values) * 9 // 10], values[-1]
            table.append(line([name, *(f"{round_(100 * (value - 1), 1)} %" for value in cells)]))
        return "\n".join(
            [*self.summary(), "", *table, "", f"Time over that of the fastest order. {self.where()}"]
        )

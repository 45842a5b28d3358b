"""The GEMM families as the rest of cutegen sees them: plain GEMMs, and GEMMs with scale factors along k."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.arch import Arch
from cutegen.errors import ProblemError, UsageError
from cutegen.families.gemm.knobs import KNOBS
from cutegen.families.gemm.operator_package import require_package
from cutegen.families.gemm.perf_model.accuracy import measured_accuracy
from cutegen.families.gemm.perf_model.few_rows_strategy import FewRowsStrategy
from cutegen.families.gemm.perf_model.fitted import is_fitted
from cutegen.families.gemm.perf_model.gpu_params import is_measured
from cutegen.families.gemm.perf_model.strategy import GemmStrategy
from cutegen.families.gemm.perf_model.torch_mm import after_mm_us, reading_c_us, torch_mm_us
from cutegen.families.gemm.problem import (
    ACTIVATIONS,
    BIASES,
    BLOCK_SCALED,
    BLOCK_SCALED_FAMILY,
    BLOCKS_FAMILY,
    LAYOUTS,
    OUT_DTYPES,
    SCALED_OUT_DTYPES,
    Epilogue,
    Problem,
    parse_sizes,
)
from cutegen.families.gemm.tail_shapes import tail_problems
from cutegen.families.resources import resource_root
from cutegen.family import Argument, Baseline, Family, Inputs, Option, Reference, Size, StandIn, Tensors
from cutegen.space import Config, Value
from cutegen.strategy import Strategy

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCKS_GEMM", "BLOCK_SCALED_GEMM", "FEW_ROWS", "GEMM", "GemmFamily"]

_PLAIN = Epilogue()
#: Rows up to which what is fused costs little.
_FEW_ROWS = 32
#: See :meth:`GemmFamily.doubt`.
_DOUBT_ALONG_M = 1.1
_UNMEASURED = (
    "Nothing was measured on this target: times are those of a model whose constants are from public sources "
    "or taken from Hopper. The order is worth a try, the microseconds are not."
)
FEW_ROWS = "few_rows"
_FLAGS = {
    "alpha": "multiply by a factor that the caller gives",
    "beta": "add beta * C",
    "scale": "multiply by one factor for each operand, read from device memory",
    "unaligned": "rows of D do not start at multiples of 16 bytes",
    "promote": "add fp8 partial sums up in fp32",
    "any_order": "allow a nondeterministic split-K reduction",
}


class GemmFamily(Family):
    """``D = activation(alpha * A @ B + beta * C + bias)``, of operands of some dtypes.

    Args:
        name: ``gemm``, ``gemm_blockscaled`` or ``gemm_blocks``.
        meaning: What it computes.
        dtypes: Of A and B, the default first.
        out_dtypes: Of D.
    """

    metric = "TFLOP/s"
    #: Source: an H200, medians beside what the fit says, behind another kernel: 0.5 us of 37 products of less
    #: than 5 us, 0.4 of 77 up to 10 us, 0.1 of 33 up to 14 us; ``torch.mm`` takes no longer.
    hidden_us = 0.4
    sizes = (
        Size("m", "rows of A and D"),
        Size("n", "columns of B and D"),
        Size("k", "columns of A, rows of B"),
        Size("batch", "independent GEMMs", default=1),
    )

    def __init__(self, name: str, meaning: str, dtypes: tuple[str, ...], out_dtypes: tuple[str, ...]) -> None:
        self.name = name
        self.meaning = meaning
        self._dtypes = dtypes
        self.algorithms = (FEW_ROWS,) if name == "gemm" else ()
        self.knobs = KNOBS
        self.options = (
            Option("dtype", "of A and B", dtypes, dtypes[0]),
            Option(
                "out", "dtype of D (default: as A and B where it can be)", out_dtypes, aliases=("out_dtype",)
            ),
            Option("layout", "contiguous axis of A, then of B", tuple(LAYOUTS), "kk"),
            Option("bias", "a vector to add, along m or n", tuple(filter(None, BIASES))),
            Option("act", "activation", tuple(filter(None, ACTIVATIONS)), aliases=("activation",)),
            *(Option(name, meaning) for name, meaning in _FLAGS.items()),
        )

    # -- problems

    def parse(self, line: str) -> Problem:
        """Return the problem that prints as ``line``; raises :class:`ProblemError`."""
        return Problem.parse(line)

    def lines(self, problem: Problem) -> tuple[str, ...]:
        """Return the line of ``problem``, and its line with the old names of layouts."""
        return str(problem), problem.old_line

    @property
    def shape_form(self) -> str:
        """The batch comes first, and is left out if it is 1."""
        return "MxNxK or BATCHxMxNxK"

    def parse_shape(self, word: str) -> dict[str, int]:
        """Return the sizes of ``MxNxK`` or ``BATCHxMxNxK``; raises :class:`UsageError`."""
        try:
            m, n, k, batch = parse_sizes(word.strip().lower())
        except ProblemError as error:
            raise UsageError(f"shape: {error}; write for example {self.example_shape}") from error
        return {"m": m, "n": n, "k": k, "batch": batch}

    def problem(self, sizes: Mapping[str, int], options: Mapping[str, str | bool]) -> Problem:
        """Return the problem of sizes and options by name; raises :class:`ProblemError`."""

        def text(name: str) -> str:
            return str(options.get(name) or "")

        def flag(name: str) -> bool:
            return bool(options.get(name))

        epilogue = Epilogue(flag("alpha"), flag("beta"), text("bias"), text("act"), flag("scale"))
        return Problem(
            **{name: sizes.get(name, 1) for name in ("m", "n", "k", "batch")},
            ab_dtype=text("dtype") or self._dtypes[0],
            out_dtype=text("out"),
            layout=text("layout") or "kk",
            unaligned_out=flag("unaligned"),
            epilogue=epilogue,
            promote=flag("promote"),
            any_order=flag("any_order"),
            family=self.name,
        )

    def typical(self) -> Sequence[Problem]:
        """Return extreme sizes, layouts and dtypes."""
        shapes: Sequence[str] = ("4096x4096x4096", "16x8192x8192", "256x256x65536", "4x512x512x512")
        if self.name == BLOCK_SCALED_FAMILY:
            kinds = [f"{dtype} kk" for dtype in BLOCK_SCALED]
        elif self.name == BLOCKS_FAMILY:
            shapes, kinds = shapes[:3], ["e4m3 kk", "e4m3 kk out=fp32 bias=n act=silu"]
        else:
            kinds = [f"bf16 {layout}" for layout in LAYOUTS]
            kinds += ["bf16 kk out=fp32", "e4m3 kk", "e4m3 kk promote", "int8 kk", "bf16 kk any_order"]
        return [Problem.parse(f"{self.name} {shape} {kind}") for shape, kind in product(shapes, kinds)]

    def tails(self, problem: Problem) -> Sequence[Problem]:
        """Return sizes that leave remainders for every tile."""
        return tail_problems(problem)

    def kin(self, problem: Problem) -> Hashable:
        """Return the signature without its epilogue."""
        return replace(problem.signature, epilogue=_PLAIN)

    def is_plain(self, problem: Problem) -> bool:
        """Return whether nothing is fused behind the GEMM."""
        return problem.epilogue == _PLAIN

    def is_library_call(self, problem: Problem) -> bool:
        """Return whether one call alone computes it, in the operands' dtype, and rounds as often as a kernel.

        It is ``torch.mm`` or ``torch.bmm``; in 16 bits with alpha, and beta or a bias along n, it is
        ``torch.addmm`` or ``torch.baddbmm``.
        """
        p, epilogue = problem, problem.epilogue
        if p.out_dtype != p.ab_dtype:
            return False
        if epilogue == _PLAIN:
            return True
        if p.ab_dtype not in ("bf16", "fp16"):
            return False
        adds_bias = epilogue.bias == "n" and not epilogue.beta and p.batch == 1
        return not (epilogue.scale or epilogue.activation) and (not epilogue.bias or adds_bias)

    def is_library_calls(self, problem: Problem) -> bool:
        """Return whether such a call and an activation compute it: the GEMM is rounded in between."""
        linear = replace(problem, epilogue=replace(problem.epilogue, activation=""))
        return self.is_library_call(linear)

    # -- kernels

    def arguments(self, problem: Problem) -> tuple[Argument, ...]:
        """Return A, B and D, then what the epilogue reads, the workspace, integers and factors."""
        p, epilogue = problem, problem.epilogue
        batch = (p.batch,) if p.batch > 1 else ()
        aligned = not p.unaligned_out
        found = [
            Argument("a", "in", p.ab_dtype, (*batch, p.m, p.k)),
            Argument("b", "in", p.ab_dtype, (*batch, p.k, p.n)),
            Argument("out", "out", p.out_dtype, (*batch, p.m, p.n), aligned),
        ]
        if epilogue.beta:
            found.append(Argument("c", "in", p.out_dtype, (*batch, p.m, p.n), aligned))
        if epilogue.bias:
            found.append(Argument("bias", "in", p.out_dtype, (p.n if epilogue.bias == "n" else p.m,)))
        if epilogue.scale:
            found += [Argument(name, "in", "fp32", (1,)) for name in ("scale_a", "scale_b")]
        elif p.ab_dtype in BLOCK_SCALED:
            scale = BLOCK_SCALED[p.ab_dtype].scale
            counts = zip(("scale_a", "scale_b"), p.scale_factors, strict=True)
            found += [Argument(name, "in", scale, (p.batch * count,)) for name, count in counts]
        elif p.has_factors:
            shapes = zip(("scale_a", "scale_b"), p.factor_shapes, strict=True)
            found += [Argument(name, "in", "fp32", shape) for name, shape in shapes]
        found += [Argument("workspace", "scratch"), Argument("launch", "launch", "int32")]
        found += [Argument(name, "scalar", "fp32") for name in ("alpha", "beta") if getattr(epilogue, name)]
        return tuple(found)

    def any_order(self, problem: Problem) -> bool:
        """Return whether a nondeterministic split-K reduction is allowed."""
        return problem.any_order

    def render_values(
        self, problem: Any, config: Config, derived: Mapping[str, Value], arch: Arch
    ) -> Mapping[str, Any]:
        """Return the installed Operator API for a config of its kernels; raises :class:`ResourceError`."""
        return {"package": require_package()} if config.source == "operators" else {}

    # -- the check, and what is compared

    def inputs(self, problem: Problem, generator: torch.Generator, *, awkward: bool = False) -> Inputs:
        """Return uniform operands, and factors that are exact in every dtype."""
        from cutegen.families.gemm.inputs import make_inputs

        return make_inputs(problem, generator, awkward=awkward)

    def reference(self, problem: Problem, inputs: Inputs) -> Reference:
        """Return the GEMM in fp64, with an error bound derived from k and the dtypes."""
        from cutegen.families.gemm.reference import make_reference

        return make_reference(problem, inputs)

    def baselines(self, problem: Problem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return torch's own GEMM, with what is left of the epilogue as element-wise calls."""
        from cutegen.families.gemm.baselines import make_baselines

        return make_baselines(problem, inputs, outputs)

    def stand_in(self, problem: Problem) -> StandIn | None:
        """Return torch's GEMM, with the epilogue in fp32; None for operands that no torch dtype holds."""
        from cutegen.families.gemm.stand_in import make_stand_in

        return make_stand_in(problem, plain=self.is_library_call(problem))

    # -- choosing

    def strategy(self, arch: Arch, algorithm: str = "") -> Strategy | None:
        """Return the analytic model of an algorithm where its constants are known for ``arch``."""
        if self.name == BLOCK_SCALED_FAMILY:
            return None
        return FewRowsStrategy.of(arch) if algorithm == FEW_ROWS else GemmStrategy.of(arch)

    def baseline_us(self, problem: Problem, arch: Arch, sm_count: int) -> float | None:
        """Return what ``torch.mm`` takes by a fit to measured times, and what calls behind it take.

        None for what was not measured.
        """
        product, rest = torch_mm_us(problem, arch, sm_count), after_mm_us(problem)
        return None if product is None else product + rest

    def fused_us(self, problem: Problem) -> float:
        """Return what a bias, an activation and reading C add.

        Source: 106 such GEMMs in four runs on an H200, beside what the fit to plain GEMMs says. Up to
        32 rows each of the three added 0.3 to 0.6 us in the median; beyond, a bias 1.3 us, C 2 to 3 us and
        reading it. Bias and silu together added 0.3 to 0.4 us to GEMMs of up to 14 us, and 4.6 and
        9.6 us to 289 and 1448 rows of 18992x2048; with a longer k they hide behind the GEMM.
        """
        few, epilogue = problem.m <= _FEW_ROWS, problem.epilogue
        elements = problem.m * problem.n * problem.batch
        found = 0.0
        if epilogue.bias:
            found += 0.5 if few or epilogue.activation else 1.2
        if epilogue.beta:
            found += (0.5 if few else 2.5) + reading_c_us(problem)
        if epilogue.activation:
            found += 0.3 + 1.3e-6 * elements * min(1.0, 1024 / max(problem.k, 1)) ** 2
        return found

    def doubt(self, problem: Problem) -> float:
        """Return more than 1 where A is contiguous along m.

        Source: on 168 such GEMMs on an H200, each (n, k) left out of the fits, expected ratios of times
        are off by 15 %, on 1755 others by 7 %. Believed from a lead of 3 % on they come to
        1.024 of torch.mm in the geometric mean, and 3.0 % are under 0.85; from 12 % on to 1.028, and 0.6 %.
        """
        return _DOUBT_ALONG_M if problem.layout[0] == "m" else 1.0

    def is_fitted(self, problem: Problem, arch: Arch) -> bool:
        """Return whether the recorded sweep says how fast such GEMMs are: 16 bits on Hopper."""
        return self.name == "gemm" and is_fitted(problem, arch)

    def accuracy(self, arch: Arch) -> str:
        """Return how the model's order compares with measurements, where there are some."""
        if self.name != GEMM.name:
            return ""
        return str(measured_accuracy(arch) or "") if is_measured(arch) or arch.calibration else _UNMEASURED

    def files(self) -> Sequence[Path]:
        """Return the model, and the rules that the spaces of both families share."""
        model = Path(__file__).parent.glob("perf_model/*.py")
        return sorted([*model, *(resource_root("spaces") / "gemm").glob("*.py")])


GEMM = GemmFamily("gemm", "GEMM with a fused epilogue", tuple(OUT_DTYPES), ("bf16", "fp16", "fp32", "int32"))
BLOCK_SCALED_GEMM = GemmFamily(
    BLOCK_SCALED_FAMILY, "GEMM with scale factors along k", tuple(BLOCK_SCALED), SCALED_OUT_DTYPES
)
BLOCKS_GEMM = GemmFamily(
    BLOCKS_FAMILY,
    "fp8 GEMM with blockwise fp32 scales, 1x128 of A and 128x128 of B",
    ("e4m3",),
    OUT_DTYPES["e4m3"],
)

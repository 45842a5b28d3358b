"""The measuring child of a family's benchmark: kernels, and calls that take a kernel's arguments.

A candidate whose library is :data:`CALL` is such a call; its symbol is a problem and what to call for it, or
a problem and a kernel that is to write its outputs in the place of inputs.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.dtypes import DTYPE_BYTES
from cutegen.errors import LaunchError
from cutegen.families.registry import find_family, parse_problem
from cutegen.family import Baseline, Inputs, Problem, Tensors
from cutegen.measure import Candidate
from cutegen.measure.operand_sets import rotating
from cutegen.measure.sizing import plan_rotation
from cutegen.measure.torch_engine import TorchEngine, open_cuda

if TYPE_CHECKING:
    import torch

__all__ = [
    "CALL",
    "COPIES",
    "ENGINE",
    "PEERS",
    "FamilyCall",
    "InPlace",
    "call_names",
    "in_place",
    "open_engine",
    "operand_sets",
    "order",
]

#: What to start the measuring child with.
ENGINE = "tools.benchmark.family_child:open_engine"
#: The same for kernels alone, whose problems are opened without calling what PyTorch offers.
BARE_ENGINE = "tools.benchmark.family_child:open_bare_engine"
#: Stands for a call in the place of a library.
CALL = "call-family"
#: Copies of as many bytes, beside the names of baselines and peers: by the driver, and by a kernel.
COPIES = ("copy", "copy kernel")
#: A peer that changes its inputs.
_IN_PLACE_PEER = "quack rotary in place"
#: Peers by the family that they know.
_KNOWN = {
    "rmsnorm": ("quack rmsnorm",),
    "softmax": ("quack softmax",),
    "layernorm": ("quack layernorm",),
    "cross_entropy": ("quack cross_entropy",),
    "rope": ("quack rotary", _IN_PLACE_PEER),
}


def call_names(problem: Problem, *, peers: bool = True, in_place: bool = False) -> list[str]:
    """Return the names of what to call for ``problem``: baselines, copies and the peers that know it.

    Peers that write in the place of inputs are among them if ``in_place`` says so.
    """
    baselines = find_family(problem.family).baselines(problem, Inputs({}), {})  # naming them needs no inputs
    known = _KNOWN.get(problem.family, ()) if peers and not _beyond_peers(problem) else ()
    return [*baselines, *COPIES, *(name for name in known if in_place or name != _IN_PLACE_PEER)]


def _beyond_peers(problem: Any) -> bool:
    """Return whether peers of the family do not know ``problem``.

    QuACK turns with a row of the tables for each token, in multiples of 8 elements, and takes no norm. Its
    softmax and LayerNorm read 16 bytes at a time, its cross-entropy 4 or more: other rows end in an
    assertion, or in an error of the compiler that ends the process.
    """
    row_in_multiples = {"softmax": 16, "layernorm": 16, "cross_entropy": 4}
    if problem.family in row_in_multiples:
        return bool(problem.n * DTYPE_BYTES[problem.dtype] % row_in_multiples[problem.family])
    if problem.family != "rope":
        return False
    return bool(problem.table != "tokens" or problem.norm or problem.d % 8 or problem.pairs % 4)


def order(problem: object, name: str) -> str:
    """Return the symbol of a candidate that calls ``name`` for ``problem``."""
    return json.dumps({"problem": str(problem), "name": name})


def in_place(candidate: Candidate) -> Candidate:
    """Return ``candidate`` with every output in the place of the first input that it may be."""
    kernel = {"library": str(candidate.shared_object), "symbol": candidate.symbol}
    symbol = json.dumps({"problem": str(candidate.problem), **kernel})
    return Candidate(candidate.name, Path(CALL), symbol, candidate.launch, candidate.problem)


class _Engine(TorchEngine):
    """cutegen's engine; calls may return outputs of their own, or none.

    What the open problem's family compiled for its baselines is not compiled again to call them.
    """

    def must_write(self, candidate: Candidate) -> bool:
        """Return whether ``candidate`` must fill the outputs that it is given."""
        return candidate.shared_object.name != CALL

    def _kernel(self, candidate: Candidate) -> Callable[..., None]:
        if candidate.shared_object.name == CALL and self._session is not None:
            wanted = json.loads(candidate.symbol)
            if "library" not in wanted:
                baseline = self._session.baselines.get(wanted["name"])
                return FamilyCall(wanted["problem"], wanted["name"], baseline)
        return super()._kernel(candidate)


class _BareEngine(_Engine):
    """Calls nothing of PyTorch's for a problem: rounds are paired with a copy."""

    def _choose_baseline(self, session: Any) -> None:
        session.baselines.clear()
        super()._choose_baseline(session)


def open_bare_engine(index: int) -> TorchEngine:
    """Return the engine for GPU ``index`` that compares kernels only; raises as :func:`open_engine`."""
    return open_cuda(index, _load, _BareEngine)


def open_engine(index: int) -> TorchEngine:
    """Return the engine for GPU ``index``, which also calls.

    Raises:
        DeviceError: There is no such GPU.
    """
    return open_cuda(index, _load, _Engine)


def _load(library: Path, symbol: str) -> Callable[..., None]:
    from cutegen.build.loader import load_kernel

    if library.name != CALL:
        return load_kernel(library, symbol)
    wanted = json.loads(symbol)
    if "library" in wanted:
        return InPlace(wanted["problem"], load_kernel(Path(wanted["library"]), wanted["symbol"]))
    return FamilyCall(wanted["problem"], wanted["name"])


class InPlace:
    """A kernel whose outputs are the first inputs that they may be, whichever it is called with.

    Args:
        line: The problem.
        kernel: The kernel.
    """

    def __init__(self, line: str, kernel: Callable[..., None]) -> None:
        problem = parse_problem(line)
        arguments = find_family(problem.family).arguments(problem)
        at = {a.name: i for i, a in enumerate(arguments)}
        self._places = [at[a.may_alias[0]] if a.may_alias else i for i, a in enumerate(arguments)]
        self._kernel = kernel

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel."""
        self._kernel(*(arguments[i] for i in self._places))


class FamilyCall:
    """A baseline, a peer or a copy, called with the arguments of a kernel.

    Args:
        line: The problem.
        name: Of a baseline of the family, of a peer, or of :data:`COPIES`.
        baseline: That baseline, where it is at hand.
    """

    def __init__(self, line: str, name: str, baseline: Baseline | None = None) -> None:
        self._problem = parse_problem(line)
        self._family = find_family(self._problem.family)
        self._arguments = [
            a for a in self._family.arguments(self._problem) if a.kind not in ("scratch", "launch")
        ]
        self._name = name
        self._baseline = baseline
        self._call: Baseline | None = None

    def __call__(self, *arguments: Any) -> None:
        """Make the call.

        Raises:
            LaunchError: There is nothing of that name for the problem.
        """
        pairs = list(zip(self._arguments, arguments, strict=True))
        inputs = Inputs(
            {a.name: value for a, value in pairs if a.kind in ("in", "inout")},
            {a.name: value for a, value in pairs if a.kind == "scalar"},
        )
        outputs = {a.name: value for a, value in pairs if a.kind in ("out", "inout")}
        if self._call is None:
            self._call = rotating(self._find(inputs, outputs), operand_sets(self._problem))
        self._call(inputs, outputs)

    def _find(self, inputs: Inputs, outputs: dict[str, torch.Tensor]) -> Baseline:
        if self._baseline is not None:
            return self._baseline
        if self._name in COPIES:
            return _copy(self._problem.min_bytes // 2, self._name)
        if self._name in PEERS:
            return PEERS[self._name](self._problem)
        baselines = self._family.baselines(self._problem, inputs, outputs)
        if self._name not in baselines:
            raise LaunchError(
                f"{self._problem} has no baseline {self._name!r}; it has {', '.join(baselines)}"
            )
        return baselines[self._name]


def operand_sets(problem: Problem) -> int:
    """Return how many sets of operands, and so of results, keep the L2 cache of the present GPU cold."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return plan_rotation(problem, gpu.L2_cache_size, gpu.total_memory).sets


def _copy(half: int, name: str) -> Baseline:
    """Return a copy of ``half`` bytes; pairs of buffers take turns over several L2 caches."""
    import torch

    count = min(512, max(2, -(-(2**28) // half)))
    words = max(2, half // 8)
    ring = [[torch.zeros(words, dtype=torch.int64, device="cuda") for _ in range(2)] for _ in range(count)]
    turn = 0

    def copy(inputs: Inputs, outputs: Tensors) -> None:
        nonlocal turn
        source, target = ring[turn % count]
        turn += 1
        if name == "copy":
            target.copy_(source)
        else:
            torch.bitwise_not(source, out=target)

    return copy


def _quack_rms_norm(inputs: Inputs, outputs: Tensors) -> None:
    """QuACK's RMSNorm with outputs given, as its own wrapper calls it."""
    rmsnorm: Any = importlib.import_module("quack.rmsnorm")  # quack has a function of that name

    given = inputs.tensors
    residual = given.get("residual")
    total = outputs.get("residual_out")
    if residual is not None and total is None:
        import torch

        total = torch.empty_like(residual)  # QuACK always writes the sum
    rmsnorm._rmsnorm_fwd(
        *(given["x"], given.get("weight"), outputs["out"], None, outputs.get("rstd"), None),
        *(residual, total, inputs.scalars["eps"], False, 0.0),
    )


def _quack_softmax(inputs: Inputs, outputs: Tensors) -> Tensors:
    """QuACK's softmax, which makes its output."""
    softmax: Any = importlib.import_module("quack.softmax")
    return {"out": softmax.softmax_fwd(inputs.tensors["x"])}


class _QuackLayerNorm:
    """QuACK's LayerNorm, which makes its output; weight and bias are in fp32, made so once."""

    def __init__(self) -> None:
        self._wide: dict[int, Any] = {}

    def __call__(self, inputs: Inputs, outputs: Tensors) -> Tensors:
        rmsnorm: Any = importlib.import_module("quack.rmsnorm")
        given = inputs.tensors
        weight, bias = (self._in_fp32(given.get(name)) for name in ("weight", "bias"))
        return {"out": rmsnorm.layernorm_fwd(given["x"], weight, bias=bias, eps=inputs.scalars["eps"])}

    def _in_fp32(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return self._wide.setdefault(tensor.data_ptr(), tensor.float())  # type: ignore[no-any-return]


def _quack_cross_entropy(inputs: Inputs, outputs: Tensors) -> Tensors:
    """QuACK's cross-entropy, which makes its outputs; its gradient is that of each loss, without a scale."""
    module: Any = importlib.import_module("quack.cross_entropy")
    found = module.cross_entropy_fwd(
        inputs.tensors["x"],
        inputs.tensors["target"],
        ignore_index=inputs.scalars["ignore_index"],
        return_lse="lse" in outputs,
        return_dx="grad" in outputs,
    )
    names = [name for name in ("loss", "lse", "grad") if name in outputs]
    return dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))


def _quack_rotary(problem: Any, in_place: bool) -> Baseline:
    """Return QuACK's rotary embedding, of queries and then of keys; each makes its output, or is it."""
    rotary: Any = importlib.import_module("quack.rotary")
    options = {
        "interleaved": problem.style == "interleaved",
        "conjugate": bool(problem.inverse),
        "inplace": in_place,
    }

    def call(inputs: Inputs, outputs: Tensors) -> Tensors:
        given = inputs.tensors
        q, k = (
            rotary.apply_rotary(given[name][None], given["cos"], given["sin"], **options)[0]
            for name in ("q", "k")
        )
        return {"q_out": q, "k_out": k}

    return call


#: What makes the call of a peer for a problem, by the name that it has in results.
PEERS: dict[str, Callable[[Problem], Baseline]] = {
    "quack rmsnorm": lambda problem: _quack_rms_norm,
    "quack softmax": lambda problem: _quack_softmax,
    "quack layernorm": lambda problem: _QuackLayerNorm(),
    "quack cross_entropy": lambda problem: _quack_cross_entropy,
    "quack rotary": lambda problem: _quack_rotary(problem, in_place=False),
    _IN_PLACE_PEER: lambda problem: _quack_rotary(problem, in_place=True),
}

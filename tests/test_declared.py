"""Families that are declared as data: problems and their lines, arguments, inputs, references."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="inputs are torch tensors")

from cutegen.dtypes import torch_dtype  # noqa: E402
from cutegen.errors import FamilyError, OperandError, ProblemError  # noqa: E402
from cutegen.families.calls import describe_call  # noqa: E402
from cutegen.families.declared import (  # noqa: E402
    DeclaredFamily,
    DeclaredProblem,
    integers,
    multiple,
    read,
    rounding_error,
    scalar,
    scratch,
    update,
    write,
)
from cutegen.family import Argument, Option, Size, bind  # noqa: E402
from cutegen.measure.check import judge  # noqa: E402
from cutegen.measure.poisoned_output import PoisonedOutput  # noqa: E402
from cutegen.space import Launch  # noqa: E402

CPU = torch.device("cpu")
SIZES = (Size("m", "rows"), Size("n", "columns", free=False), Size("groups", "groups", default=1))
OPTIONS = (
    Option("dtype", "of x and y", ("bf16", "fp16", "fp32"), "bf16"),
    Option("mode", "what is added", ("mean", "sum"), "mean"),
    Option("weight", "dtype of the weight", ("same", "fp32", "none"), "same"),
    Option("stats", "write the sum of each row"),
)
X = read("x", "dtype", ("m", "n"))
ARGUMENTS = (
    X,
    read("weight", "weight", ("n",), when="weight"),
    write("y", "dtype", ("m", "n"), may_alias=("x",)),
    write("total", "fp32", ("m",), when="stats"),
    scratch(),
    integers(),
    scalar("scale", "fp32", (2.0, -3.0)),
)


def reference(x: Any, weight: Any, scale: float) -> dict[str, Any]:
    y = x * scale
    return {"y": y if weight is None else y * weight, "total": x.sum(1)}


def family(**changes: Any) -> DeclaredFamily:
    given: dict[str, Any] = {
        "sizes": SIZES,
        "options": OPTIONS,
        "arguments": ARGUMENTS,
        "reference": reference,
        "rows": "m",
        **changes,
    }
    return DeclaredFamily("toy", "a scaled copy", **given)


TOY = family()


def inputs_of(problem: DeclaredProblem, *, awkward: bool = False) -> Any:
    return problem.declared.inputs(problem, torch.Generator().manual_seed(0), awkward=awkward)


# --- problems ---


@pytest.mark.parametrize(
    "line",
    [
        "toy 64x128x1 bf16",
        "toy 64x128x1 bf16 unaligned",
        "toy 64x128x4 fp32 mode=sum stats",
        "toy 64x17x1 fp16 weight=none",
        "toy 1x8x1 bf16 weight=fp32 stats unaligned",
    ],
)
def test_a_line_is_read_back(line: str) -> None:
    problem = TOY.parse(line)
    assert str(problem) == line and TOY.parse(str(problem)) == problem
    assert {problem: 1}[TOY.parse(line)] == 1


def test_sizes_and_options_are_attributes_of_problem_and_signature() -> None:
    """What is free is not compiled in; an option that is none is the empty text."""
    problem = TOY.parse("toy 64x128x4 fp16 weight=none stats")
    assert (problem.m, problem.n, problem.groups, problem.dtype) == (64, 128, 4, "fp16")
    sig = problem.signature
    assert (sig.n, sig.weight, sig.stats, sig.unaligned, sig.family) == (128, "", True, False, "toy")
    assert sig == problem.with_sizes(m=3).signature != problem.with_sizes(n=64).signature
    with pytest.raises(AttributeError, match="toy has no fixed size and no option 'm'"):
        _ = sig.m
    with pytest.raises(AttributeError, match="toy has no size and no option 'k'"):
        _ = problem.k


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("toy", "write toy MxNxGROUPS"),
        ("other 64x128x1 bf16", "is not a problem of toy"),
        ("toy 64x128 bf16", "shape '64x128' is not MxNxGROUPS"),
        ("toy 0x128x1 bf16", "m=0 must be an integer from 1 to 2147483647"),
        ("toy 64x128x2147483648 bf16", "groups=2147483648 must be"),
        ("toy 64x128x1 fp64", "dtype='fp64' is not valid; valid: bf16, fp16, fp32"),
        ("toy 64x128x1 bf16 mode=max", "mode='max' is not valid; valid: mean, sum"),
        ("toy 64x128x1 bf16 mode", "'toy 64x128x1 bf16 mode': mode takes a value: mode=mean, mode=sum"),
        ("toy 64x128x1 bf16 stats=yes", "stats takes no value"),
        ("toy 64x128x1 bf16 stats stats", "stats is given twice"),
        (
            "toy 64x128x1 bf16 fast",
            "'toy 64x128x1 bf16 fast': unknown word 'fast'; "
            "valid: dtype=..., mode=..., weight=..., stats, unaligned",
        ),
    ],
)
def test_a_malformed_line_is_refused_with_what_is_valid(line: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        TOY.parse(line)


def test_defaults_are_taken_where_nothing_is_said() -> None:
    assert TOY.problem({"m": 64, "n": 128}, {}) == TOY.parse("toy 64x128x1")
    with pytest.raises(ProblemError, match="n=None must be an integer"):
        TOY.problem({"m": 64}, {})


def test_rows_of_odd_length_are_unaligned_by_themselves() -> None:
    """And go back to being aligned with another length, unless the problem said so."""
    odd, even = TOY.parse("toy 4x9x1 bf16"), TOY.parse("toy 4x8x1 bf16")
    assert odd.unaligned and not even.unaligned and str(odd) == "toy 4x9x1 bf16"
    assert odd.with_sizes(n=8) == even and even.with_sizes(n=9) == odd
    asked = TOY.parse("toy 4x8x1 bf16 unaligned")
    assert asked.unaligned and asked.with_sizes(n=16).unaligned and asked != even


EIGHTS = (X, write("y", "e4m3", ("m", "n"), align_bytes=8))


@pytest.mark.parametrize(("n", "unaligned"), [(8, False), (16, False), (24, False), (12, True), (9, True)])
def test_rows_are_aligned_where_their_argument_declares(n: int, unaligned: bool) -> None:
    """Each argument for itself: 12 elements of bf16 have 24 bytes."""
    declared = family(arguments=EIGHTS)
    assert declared.parse(f"toy 4x{n}x1 bf16").unaligned == unaligned
    assert declared.option("unaligned").meaning == "rows do not start at multiples of 16 bytes (8 of y)"
    assert TOY.option("unaligned").meaning == "rows do not start at multiples of 16 bytes"


def test_calls_are_aligned_where_their_arguments_declare() -> None:
    declared = family(arguments=(read("x", "e4m3", ("m", "n"), aligned=True, align_bytes=8), *EIGHTS[1:]))
    memory = torch.zeros(512, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def posed(x: tuple[int, int], y: tuple[int, int]) -> DeclaredProblem:
        """Pitch and start of each."""
        at = {"x": x, "y": y}
        tensors = {name: memory.as_strided((4, 24), (step, 1), start) for name, (step, start) in at.items()}
        return describe_call(declared, tensors, frozenset("y"), device_type="cpu")

    assert not posed((24, 8), (40, 136)).unaligned
    assert posed((24, 8), (28, 136)).unaligned and posed((24, 8), (24, 132)).unaligned
    with pytest.raises(OperandError, match=r"x .* at byte 4 of 8: every row must start at a multiple of 8 "):
        posed((24, 4), (24, 136))


def test_bytes_and_operations_are_counted_from_the_arguments() -> None:
    """Each tensor once, what is updated in place twice."""
    problem = TOY.parse("toy 64x128x1 bf16 weight=fp32 stats")
    assert problem.min_bytes == 2 * 64 * 128 * 2 + 128 * 4 + 64 * 4
    assert problem.flops == 4 * (64 * 128 + 128)
    inplace = family(arguments=(X, update("total", "fp32", ("m", "n"))))
    assert inplace.parse("toy 64x128x1").min_bytes == 64 * 128 * (2 + 2 * 4)
    assert family(flops=lambda p: p.m).parse("toy 64x128x1").flops == 64


def test_tails_are_problems_of_the_same_signature() -> None:
    problem = TOY.parse("toy 4096x128x2 bf16 stats unaligned")
    tails = TOY.tails(problem)
    assert [tail.m for tail in tails] == [1, 37, 333]
    assert {tail.signature for tail in tails} == {problem.signature}
    assert family(rows="").tails(problem) == ()
    [typical] = family(examples=["8x16x1 fp32 stats"]).typical()
    assert str(typical) == "toy 8x16x1 fp32 stats"


# --- arguments ---


def test_arguments_follow_the_options() -> None:
    """What is absent is left out; sizes, dtypes and alignment are those of the problem."""
    full = TOY.arguments(TOY.parse("toy 4x9x1 fp16 stats"))
    assert [(a.name, a.kind, a.dtype, a.shape) for a in full] == [
        ("x", "in", "fp16", (4, 9)),
        ("weight", "in", "fp16", (9,)),
        ("y", "out", "fp16", (4, 9)),
        ("total", "out", "fp32", (4,)),
        ("workspace", "scratch", "", ()),
        ("launch", "launch", "int32", ()),
        ("scale", "scalar", "fp32", ()),
    ]
    assert not any(a.aligned for a in full) and full[2].may_alias == ("x",)
    short = TOY.arguments(TOY.parse("toy 4x8x1 bf16 weight=none"))
    assert [a.name for a in short] == ["x", "y", "workspace", "launch", "scale"]
    assert all(a.aligned for a in short)
    values = {"x": 1, "y": 2, "scale": 0.5}
    assert bind(short, values, Launch((7, 8), 16), "memory") == (1, 2, "memory", 7, 8, 0.5)
    assert bind(short, values, Launch((), 0)) == (1, 2, 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": (X, X)}, "argument x: it is named twice"),
        ({"arguments": (read("x", "dtype", ("m", "k")),)}, "no size is called 'k'; sizes: m, n, groups"),
        ({"arguments": (read("x", "int4", ("m",)),)}, "dtype 'int4' is neither an option nor of bf16"),
        ({"arguments": (read("x", "fp32", ("m",), when="mode"),)}, "when='mode' is no flag"),
        ({"arguments": (read("x", "fp32", ("m",), when="no"),)}, "when='no' is no flag"),
        ({"arguments": (X, write("y", "fp32", ("m",), may_alias=("z",)))}, "alias inputs only; inputs: x"),
        ({"arguments": (read("x", "fp32", ()),)}, "a tensor has at least one size"),
        ({"arguments": (X, write("y", "fp32", ("n",)))}, "argument y: rows='m' must be its first size"),
        ({"arguments": (read("x", "fp32", ("n", "m")),)}, "argument x: rows='m' must be its first size"),
        ({"arguments": (X, scalar("eps", "fp32", 1e-6))}, r"eps: values are 1e-06; give two numbers"),
        ({"arguments": (X, scalar("eps", "fp32", ("1", 2)))}, r"values are \('1', 2\); give two numbers"),
        (
            {"arguments": (X, write("y", "fp32", ("m", "n"), align_bytes=12))},
            "argument y: align_bytes=12 must be a power of two, at most 16; valid: 1, 2, 4, 8, 16",
        ),
        ({"arguments": (update("y", "fp32", ("m",), align_bytes=32),)}, "align_bytes=32 must be a power"),
        ({"arguments": (read("x", "fp32", ("m",), align_bytes=True),)}, "align_bytes=True must be a power"),
        ({"rows": "k"}, "rows='k' is no size; sizes: m, n, groups"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(**changes)


# --- inputs ---


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "e4m3", "int8", "uint8", "int64"])
@pytest.mark.parametrize("line", ["toy 5x16x1", "toy 5x16x1 unaligned", "toy 5x7x1"])
def test_awkward_inputs_have_gaps_and_other_scalars(line: str, dtype: str) -> None:
    """NaN lies behind each row where the type has one; pitches are odd exactly where rows are unaligned."""
    arguments = (read("x", dtype, ("m", "n")), *ARGUMENTS[1:])
    problem = family(arguments=arguments).parse(line)
    plain, awkward = inputs_of(problem), inputs_of(problem, awkward=True)
    assert (plain.scalars, awkward.scalars) == ({"scale": 2.0}, {"scale": -3.0})
    x, strided = plain.tensors["x"], awkward.tensors["x"]
    assert x.shape == strided.shape == (5, problem.n) and x.is_contiguous()
    assert torch.equal(x.double(), strided.double()), "the same seed gives the same values"
    pitch = strided.stride(0)
    assert (pitch * x.element_size() % 16 != 0) == problem.unaligned and pitch > problem.n
    if x.is_floating_point():
        behind = strided.as_strided((5, 1), strided.stride(), problem.n).float()
        assert behind.isnan().all() and strided.float().isfinite().all()


def test_values_that_are_absent_are_not_drawn() -> None:
    problem = TOY.parse("toy 5x16x1 weight=none")
    assert [*inputs_of(problem).tensors] == ["x"]


# --- the reference ---


def written(problem: DeclaredProblem, inputs: Any, error: float = 0.0) -> dict[str, PoisonedOutput]:
    """What a right kernel leaves, up to a relative error of y."""
    want = reference(
        **{"weight": None, **{name: tensor.double() for name, tensor in inputs.tensors.items()}},
        scale=inputs.scalars["scale"],
    )
    outputs = {a.name: PoisonedOutput(a, CPU) for a in problem.declared.arguments(problem) if a.kind == "out"}
    for name, output in outputs.items():
        output.poison()
        output.tensor.copy_(want[name] * (1 + error if name == "y" else 1))
    return outputs


@pytest.mark.parametrize("line", ["toy 50x16x1", "toy 1x16x1 fp32", "toy 50x16x1 fp16 weight=none stats"])
def test_the_reference_is_compared_by_rows(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are worked out at a time, a wrong element is found in its place."""
    problem = TOY.parse(line)
    inputs = inputs_of(problem)
    last = problem.m - 1
    for rows_at_once in (1, 7, 10**6):
        monkeypatch.setattr("cutegen.families.declared.family._CHUNK", rows_at_once * problem.n)
        found = TOY.reference(problem, inputs)
        assert found.compared("y") == 1
        outputs = written(problem, inputs)
        sizes = [chunk.got.shape[0] for chunk in found.chunks("y", outputs["y"].tensor)]
        assert sum(sizes) == problem.m and max(sizes) == min(rows_at_once, problem.m)
        assert judge(outputs, found).ok
        outputs["y"].tensor[last, 3] *= 1.1
        verdict = judge(outputs, found)
        assert (verdict.ok, verdict.output, verdict.where) == (False, "y", (last, 3))


def test_what_is_allowed_is_rounding_and_the_error_of_a_sum() -> None:
    """Half a unit in the last place of bf16 passes, one and a half do not."""
    problem = TOY.parse("toy 50x16x1 bf16 weight=none")
    inputs = inputs_of(problem)
    found = TOY.reference(problem, inputs)
    assert judge(written(problem, inputs, 2.0**-10), found).ok
    assert not judge(written(problem, inputs, 1.5 * 2.0**-8), found).ok


def test_an_output_without_rows_is_compared_as_a_whole() -> None:
    """Where problems are not independent along a size, the reference sees all of the inputs."""
    columns = family(
        arguments=(X, write("sums", "fp32", ("n",))),
        reference=lambda x: {"sums": x.sum(0)},
        rows="",
    )
    problem = columns.parse("toy 9x16x1")
    inputs = inputs_of(problem)
    [chunk] = columns.reference(problem, inputs).chunks("sums", torch.zeros(16))
    assert torch.equal(chunk.want, inputs.tensors["x"].double().sum(0)) and chunk.place((3,)) == (3,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x, weight, scale: {"y": x[0]}, r"gives y of shape \(16,\); it must be \(5, 16\)"),
        (lambda x, weight, scale: {"y": x[:, :8]}, r"gives y of shape \(5, 8\); it must be \(5, 16\)"),
        (lambda x, weight, scale: {"z": x}, r"gives y of shape None; it must be \(5, 16\)"),
        (lambda x: {"y": x}, "the reference of toy raised TypeError: .* unexpected keyword argument"),
        (lambda x, weight, scale: {"y": x @ x}, "the reference of toy raised RuntimeError"),
    ],
)
def test_a_reference_that_is_declared_wrongly_is_named(wrong: Any, message: str) -> None:
    broken = family(reference=wrong)
    problem = broken.parse("toy 5x16x1")
    with pytest.raises(FamilyError, match=message):
        list(broken.reference(problem, inputs_of(problem)).chunks("y", torch.zeros(5, 16)))


def test_a_tolerance_of_its_own_is_asked_for_each_output() -> None:
    asked: list[str] = []

    def tolerance(problem: DeclaredProblem, output: str, want: Any) -> Any:
        asked.append(output)
        return torch.full_like(want, 100.0)

    loose = family(tolerance=tolerance)
    problem = loose.parse("toy 5x16x1 stats")
    inputs = inputs_of(problem)
    outputs = written(problem, inputs)
    outputs["y"].tensor.zero_()
    assert judge(outputs, loose.reference(problem, inputs)).ok and set(asked) == {"y", "total"}


@pytest.mark.parametrize(
    ("dtype", "low"), [("bf16", -130), ("fp16", -24), ("fp32", -130), ("e4m3", -9), ("e5m2", -16)]
)
def test_rounding_error_is_that_of_torch(dtype: str, low: int) -> None:
    """No conversion errs by more, from subnormal numbers on, and some err by nearly as much."""
    powers = torch.arange(low, 8, dtype=torch.float64)
    want = (2.0**powers)[:, None] * torch.linspace(1, 1.999, 997, dtype=torch.float64)
    error = (want.to(torch.float32).to(torch_dtype(dtype)).double() - want).abs()
    share = error / rounding_error(dtype, want)
    assert share.max() <= 1 + 2.0**-20 and share.max() > 0.8


def test_integers_must_be_exact_and_other_types_need_a_tolerance() -> None:
    counts = family(
        arguments=(X, write("count", "int64", ("m",))), reference=lambda x: {"count": (x > 0).sum(1)}
    )
    problem = counts.parse("toy 5x16x1")
    inputs = inputs_of(problem)
    reference = counts.reference(problem, inputs)
    output = PoisonedOutput(Argument("count", "out", "int64", (5,)), CPU)
    output.poison()
    output.tensor.copy_((inputs.tensors["x"] > 0).sum(1))
    assert judge({"count": output}, reference).ok
    output.tensor[4] += 1
    assert judge({"count": output}, reference).where == (4,)
    assert float(rounding_error("int64", torch.tensor([2.0**40]))) < 0.5
    with pytest.raises(FamilyError, match="no tolerance is known for outputs of e8m0"):
        rounding_error("e8m0", torch.ones(1))


def test_an_axis_may_be_a_multiple_of_a_size_and_an_argument_may_go_with_values_of_an_option() -> None:
    """The shape, the bytes and the reference follow; the options that no tensor tells are known."""
    assert [multiple(dim) for dim in ("n", "2n", "16groups")] == [(1, "n"), (2, "n"), (16, "groups")]

    def halves(x: Any, weight: Any, mode: str) -> dict[str, Any]:
        return {"y": x[:, ::2] + x[:, 1::2] if mode == "sum" else x[:, ::2] * weight}

    declared = family(
        arguments=(
            read("x", "dtype", ("m", "2n")),
            read("weight", "weight", ("n",), when="mode=mean"),
            write("y", "dtype", ("m", "n")),
        ),
        reference=halves,
        tolerance=lambda problem, output, want: want.abs() * 2**-8,
    )
    assert [option.name for option in declared.named_options] == ["mode", "stats"]
    added = declared.parse("toy 8x16x1 bf16 mode=sum")
    assert [(a.name, a.shape) for a in declared.arguments(added)] == [("x", (8, 32)), ("y", (8, 16))]
    assert added.min_bytes == 8 * 48 * 2
    inputs = declared.inputs(added, torch.Generator().manual_seed(0))
    want = declared.wanted(added, inputs, 2, 5)["y"]
    x = inputs.tensors["x"].double()
    assert torch.equal(want, x[2:5, ::2] + x[2:5, 1::2])
    assert "weight" in {a.name for a in declared.arguments(declared.parse("toy 8x16x1 bf16"))}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (read("z", "dtype", ("m", "0n")), "no size is called 'n'"),
        (read("z", "dtype", ("m", "2k")), "no size is called 'k'"),
        (write("z", "dtype", ("m", "2m")), "must be its first size"),
        (read("z", "dtype", ("m", "n"), when="mode=max"), "when='mode=max' is no flag"),
        (read("z", "dtype", ("m", "n"), when="mode=mean,sum"), "when='mode=mean,sum' is no flag"),
        (read("z", "dtype", ("m", "n"), when="kind=mean"), "when='kind=mean' is no flag"),
    ],
    ids=str,
)
def test_a_multiple_or_value_that_is_none_is_refused(argument: Any, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        family(arguments=(*ARGUMENTS, argument))

"""Functions of declarations that raise, or return what they must not: file, line and what would be right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_kernels import write_kernel
from own_registry import without_user_families

torch = pytest.importorskip("torch", reason="references compute with torch")

from host_lane import candidate, new_engine  # noqa: E402

from cutegen.arch import find_arch  # noqa: E402
from cutegen.errors import FamilyError, SpaceError  # noqa: E402
from cutegen.families import registry  # noqa: E402

#: Rows of x where a mask is set, and how many elements that is; the kernel is never compiled.
CHOSEN = """
from cutegen.kernel import Kernel, fixed, free, read, write

kernel = Kernel(
    "chosen",
    entry="entry:launch",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("fp32",)},
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("mask", "bool", ("m", "n")),
        read("place", "int32", ("m",)),
        write("y", "dtype", ("m", "n")),
        write("count", "fp32", ("m",)),
    ),
    knobs={"threads": (32, 64)},
    call="x, mask, place, y, count, threads, width, stream",
)


@kernel.derive
def width(n, threads):
    return n // threads


@kernel.rule
def fits(n, threads):
    "Threads have work."
    return threads <= n


@kernel.inputs
def inputs(generator, m):
    import torch

    return {"place": torch.arange(m)}


@kernel.flops
def flops(m, n):
    return m * n


@kernel.tolerance
def tolerance(output, want):
    return want.abs() * 1e-6


@kernel.reference
def reference(x, mask):
    return {"y": x.where(mask, 0.0), "count": mask.sum(-1)}
"""
ENTRY = "def launch(x, mask, place, y, count, threads, width, stream): ...\n"


def declared(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> Any:
    """Return the family, after a change of its declaration."""
    without_user_families(monkeypatch)
    assert old in CHOSEN
    return registry.load_kernel(
        write_kernel(folder, {"entry.py": ENTRY, "declaration.py": CHOSEN.replace(old, new)})
    )


def right(x: Any, mask: Any, place: Any, y: Any, count: Any) -> None:
    y.copy_(x.where(mask, 0))
    count.copy_(mask.sum(-1))


def checked(family: Any, kernel: Callable[..., None] = right) -> Any:
    """Do everything that asks a declaration before a kernel is timed, and return the verdict."""
    problem = family.parse("chosen 5x64 fp32")
    space = registry.find_space(family.name, find_arch("sm_90a"))
    config = space.default(problem)
    assert space.derive(config, problem, space.arch)["width"] == 2 and problem.flops == 320
    engine = new_engine(load=lambda library, symbol: kernel)
    engine.open(problem, 0)
    return engine.check(candidate(problem, scalars=()), problem)


def test_a_reference_may_count_and_change_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers for an output of fp32 are numbers, and what is written to is a copy, of masks too."""
    changed = "    kept = mask.clone()\n    mask.zero_()\n    mask = kept\n    return {"
    family = declared(tmp_path, monkeypatch, '    return {"y"', changed + '"y"')
    assert checked(family).ok

    def wrong(*tensors: Any) -> None:
        right(*tensors)
        tensors[-1][3] += 1

    assert checked(family, wrong).reason.startswith("count[3] is ")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "return n // threads",
            "return n // (threads - 32)",
            r"raised at: width\(\) raised ZeroDivisionError",
        ),
        ("return threads <= n", "return n.threads", r"raised at: fits\(\) raised AttributeError"),
        ("return threads <= n", "threads <= n", r"begun at: fits\(\) returned None; a rule returns whether"),
        ("torch.arange(m)}", "torch.arange(m)[5]}", r"raised at: inputs\(\) raised IndexError"),
        (
            'return {"place": torch.arange(m)}',
            "pass",
            r"begun at: inputs\(\) returned NoneType; it returns ten",
        ),
        ("torch.arange(m)}", "list(range(m))}", r"inputs\(\) gives place as list; it must be a tensor"),
        (
            "torch.arange(m)}",
            "torch.arange(m) + 0.5}",
            r"place in torch.float32, with values that torch.int32",
        ),
        (
            "torch.arange(m)}",
            "torch.arange(m) + 2**31}",
            r"place in torch.int64, with values that torch.int3",
        ),
        ("return m * n", "return 'many'", r"begun at: flops\(\) returned 'many'; it returns a number from 0"),
        (
            "return want.abs() * 1e-6",
            "pass",
            r"begun at: tolerance\(\) returned None; it returns a tensor or a",
        ),
        ("return want.abs() * 1e-6", "return want.foo", r"raised at: tolerance\(\) raised AttributeError"),
        (
            "x.where(mask, 0.0)",
            "x.where(x, 0.0)",
            r"raised at: reference\(\) raised RuntimeError: where expected",
        ),
        ("x.where(mask, 0.0)", "x.tolist()", r"the reference of chosen gives y as list; it must be a tensor"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(
    old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = declared(tmp_path, monkeypatch, old, new)
    with pytest.raises(FamilyError) as found:
        checked(family)
    place, _, said = said.rpartition(" at: ")
    lines = CHOSEN[: CHOSEN.index(old)].splitlines()
    begun = max(number for number, line in enumerate(lines, 1) if line.startswith("@"))
    line = len(lines) if place == "raised" else begun
    where = f"{tmp_path / 'declaration.py'}, line {line}: " if place else ""
    assert str(found.value).startswith(where) and re.search(said, str(found.value)), found.value


def test_a_grid_has_whole_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quotient that is none was cut off, so that the last rows had no CTA."""
    launched = (
        'launch={"grid": lambda m: (m / 2, 1, 1), "block": (32, 1, 1)},\n    call="x, mask, place, y, count'
    )
    family = declared(tmp_path, monkeypatch, 'call="x, mask, place, y, count', launched)
    problem = family.parse("chosen 5x64 fp32")
    space = registry.find_space(family.name, find_arch("sm_90a"))
    with pytest.raises(SpaceError, match=r"the grid is \(2\.5, 1, 1\); it must be a tuple of three"):
        space.launch(space.default(problem), problem, 132)

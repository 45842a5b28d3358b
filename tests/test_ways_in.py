"""Ways to say which configs there are, and what is launched."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from own_registry import without_user_families

import cutegen
from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.errors import FamilyError
from cutegen.families import registry
from cutegen.kernel import Kernel, fixed, free, read, write
from cutegen.space import Config

ARCH = find_arch("sm_90a")
HEAD = """
from cutegen.kernel import Kernel, fixed, free, read, write

kernel = Kernel(
    "ways",
    sizes={"m": free, "n": fixed},
    arguments=(read("x", "fp32", ("m", "n")), write("y", "fp32", ("m", "n"))),
    rows="m",
"""
TAIL = """
)


@kernel.reference
def reference(x):
    return 2 * x
"""
#: Anything that may be called.
LAUNCH = "def launch(*anything): ...\n"
CLASS = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutegen


@cutegen.tunable("threads, unroll", [(32, 1), (64, 2), (128, 4)])
@cutegen.tunable("hint", ["none", "evict"])
class Doubling:
    def __init__(self, threads, n, hint, unroll=1):
        self.threads, self.n = threads, n

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        double(x, y, self.n, self.threads).launch(
            grid=(x.shape[0], 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )


@cute.kernel
def double(x: cute.Tensor, y: cute.Tensor, n: cutlass.Constexpr, threads: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    at = thread
    while at < n:
        y[row, at] = 2.0 * x[row, at]
        at += threads
"""
TEMPLATE = '''
"""Twice x, rows of {{ sig.n }}: {{ knobs }}"""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    for step in cutlass.range_constexpr({{ sig.n // threads }}):
        y[row, thread + step * {{ threads }}] = 2.0 * x[row, thread + step * {{ threads }}]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
    kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=({{ threads }}, 1, 1), stream=stream)


KERNELS = (kernel,)


def fake_arguments():
    rows = cute.sym_int()

    def matrix():
        pitch = cute.sym_int64(divisibility=4)
        shape = (rows, {{ sig.n }})
        return cute.runtime.make_fake_tensor(cutlass.Float32, shape, stride=(pitch, 1), assumed_align=16)

    return matrix(), matrix(), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_user_families(monkeypatch)
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def declare(folder: Path, arguments: str, **files: str) -> Any:
    """Return the family of a declaration with further arguments, and files beside it."""
    (folder / "ways.py").write_text(f"{HEAD}    {arguments}{TAIL}")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return registry.load_kernel(folder / "ways.py")


def configs(family: Any, n: int = 256) -> list[dict[str, Any]]:
    problem = family.parse(f"ways 8x{n}")
    return [dict(config) for config in registry.find_space("ways", ARCH).configs(problem)]


def compiled(family: Any, tmp_path: Path, config: Config | None = None) -> Any:
    problem = family.parse("ways 8x256")
    space = registry.find_space("ways", ARCH)
    with Builder(Store(tmp_path / "store"), workers=1) as builder:
        [(source, result)] = builder.build([render(problem, config or space.default(problem), ARCH)])
    assert isinstance(result, Artifact), result
    return source


def test_a_list_of_configs(folder: Path) -> None:
    """Exactly these, in their order; a config between them is refused with the reason, once."""
    listed = [{"a": 1, "b": 2, "c": "x"}, {"a": 2, "b": 2, "c": "y"}, {"a": 1, "b": 3, "c": "y"}]
    family = declare(
        folder, f'entry="own:launch", call="x, y, stream, a, b, c", configs={listed},', own__py=LAUNCH
    )
    found = configs(family)
    assert sorted(map(str, found)) == sorted(map(str, listed))
    space = registry.find_space("ways", ARCH)
    problem = family.parse("ways 8x256")
    assert space.default(problem) in [Config(config) for config in listed]
    (violation,) = space.explain(problem, Config({"a": 2, "b": 3, "c": "y"}))
    assert violation.rule == "a_b_go_together" and "a=1 b=2 c=x; " in violation.reason
    assert not space.explain(problem, {"a": 2, "b": 2})


def test_values_that_come_together_make_a_product_with_others(folder: Path) -> None:
    knobs = '{"a, b": [(1, 2), (2, 4)], "c": (5, 6, 7)}'
    family = declare(
        folder, f'entry="own:launch", call="x, y, stream, a, b, c", knobs={knobs},', own__py=LAUNCH
    )
    wanted = [{"a": a, "b": b, "c": c} for (a, b), c in product([(1, 2), (2, 4)], (5, 6, 7))]
    assert sorted(map(str, configs(family))) == sorted(map(str, wanted))


def test_axes_may_be_multiples_of_sizes(folder: Path) -> None:
    """Of a fixed size the extent is a number; of a free one it is open, and the size is worked out."""
    text = HEAD.replace('"ways"', '"pairs"').replace('    rows="m",\n', "")
    text = text.replace('("m", "n")), write(', '("2m", "2n")), write(')
    (folder / "pairs.py").write_text(f'{text} entry="own:launch", call="x, y, m, stream",{TAIL}')
    (folder / "own.py").write_text(LAUNCH)
    family = registry.load_kernel(folder / "pairs.py")
    problem = family.parse("pairs 8x256")
    found = render(problem, registry.find_space("pairs", ARCH).default(problem), ARCH).text
    assert "(cute.sym_int(), 512,)" in found and "(m, 256,)" in found and "m = y.shape[0]" in found


def test_a_knob_of_one_value_is_a_constant(folder: Path) -> None:
    arguments = 'entry="own:launch", call="x, y, stream, a, b", knobs={"a": (1,), "b": (2, 3)}, '
    arguments += 'default={"a": 1, "b": 3},'
    family = declare(folder, arguments, own__py=LAUNCH)
    assert configs(family) == [{"b": 2}, {"b": 3}]
    problem = family.parse("ways 8x256")
    default = registry.find_space("ways", ARCH).default(problem)
    assert dict(default) == {"b": 3} and "\na = 1\n" in render(problem, default, ARCH).text


@pytest.mark.dsl
def test_decorators_beside_the_entry(folder: Path, tmp_path: Path) -> None:
    """They are read from the file; constructor and call follow from the names of parameters."""
    family = declare(folder, 'entry="own:Doubling",', own__py=CLASS)
    found = configs(family)
    pairs = [(32, 1), (64, 2), (128, 4)]
    wanted = [{"threads": t, "unroll": u, "hint": h} for (t, u), h in product(pairs, ("none", "evict"))]
    assert sorted(map(str, found)) == sorted(map(str, wanted))
    source = compiled(family, tmp_path)
    assert "entry(threads=threads, n=n, hint=hint, unroll=unroll)" in source.text
    assert "entry(x=x, y=y, stream=stream)" in source.text


@pytest.mark.dsl
def test_a_kernel_without_a_function_that_launches_it(folder: Path, tmp_path: Path) -> None:
    launch = 'launch="grid=(m, 1, 1), block=(threads, 1, 1), min_blocks_per_mp=1"'
    arguments = f'entry="own:double", call="x, y, n, threads", {launch}, knobs={{"threads": (32, 64)}},'
    family = declare(folder, arguments, own__py=CLASS)
    source = compiled(family, tmp_path, Config({"threads": 64}))
    assert "entry(x, y, n, threads).launch(grid=(m, 1, 1), block=(threads, 1, 1)" in source.text


@pytest.mark.dsl
def test_functions_say_what_a_kernel_is_launched_with(folder: Path, tmp_path: Path) -> None:
    """The grid is worked out at each launch, so a knob of it compiles nothing; the rest is compiled in."""
    launch = 'launch={"grid": lambda m, spare: (m + spare, 1, 1), "block": lambda threads: (threads, 1, 1)}'
    arguments = f'entry="own:double", call="x, y, n, threads", {launch}, '
    arguments += 'knobs={"threads": (32, 64), "spare": (0, 1)},'
    family = declare(folder, arguments, own__py=CLASS)
    space, problem = registry.find_space("ways", ARCH), family.parse("ways 8x256")
    assert space.run_time_knobs == {"spare"}
    assert space.launch(Config({"threads": 64, "spare": 1}), problem, 132).scalars == (9, 1, 1)
    source = compiled(family, tmp_path, Config({"threads": 64, "spare": 1}))
    assert "launch_block = (64, 1, 1)" in source.text
    assert ".launch(grid=(grid_x, grid_y, grid_z), block=launch_block, stream=stream)" in source.text


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (
            '"grid": lambda m: (m, 1), "block": (32, 1, 1)',
            r"the grid is \(8, 1\); it must be a tuple of three",
        ),
        ('"grid": lambda rows: (rows, 1, 1)', "asks for rows; valid: threads, m, n"),
        (
            '"grid": lambda m: (m, 1, 1), "block": lambda m: (m, 1, 1)',
            "value launch_block asks for m, which is",
        ),
    ],
)
def test_what_cannot_be_a_launch_is_named(folder: Path, launch: str, said: str) -> None:
    entry = 'entry="own:double", call="x, y, n, threads", knobs={"threads": (32, 64)}, '
    with pytest.raises(cutegen.CutegenError, match=said):
        family = declare(folder, f"{entry}launch={{{launch}}},", own__py=CLASS)
        problem = family.parse("ways 8x256")
        registry.find_space("ways", ARCH).launch(Config({"threads": 32}), problem, 132)


@pytest.mark.dsl
def test_a_template_of_the_users(folder: Path, tmp_path: Path) -> None:
    family = declare(folder, 'template="twice.py.j2", knobs={"threads": (32, 64)},', twice__py__j2=TEMPLATE)
    assert "range_constexpr(4)" in compiled(family, tmp_path, Config({"threads": 64})).text


def test_a_mistake_in_a_template_names_file_and_line(folder: Path) -> None:
    text = TEMPLATE.replace("{{ threads }}, 1, 1)", "{{ threats }}, 1, 1)")
    family = declare(folder, 'template="twice.py.j2", knobs={"threads": (32, 64)},', twice__py__j2=text)
    problem = family.parse("ways 8x256")
    config = registry.find_space("ways", ARCH).default(problem)
    with pytest.raises(cutegen.CutegenError, match=r"twice\.py\.j2, line 18: 'threats' is undefined"):
        render(problem, config, ARCH)


def test_names_are_given_once() -> None:
    with pytest.raises(FamilyError, match="knob a is named twice"):

        @cutegen.tunable("a", [1, 2])
        @cutegen.tunable("a, b", [(1, 2)])
        def launch() -> None: ...

    with pytest.raises(FamilyError, match="knob a is named twice"):
        Kernel(
            "twice", entry="json:dumps", sizes={"m": free}, arguments=(), knobs={"a": (1,), "a, b": [(1, 2)]}
        )
    with pytest.raises(FamilyError, match=r"\(1, 2, 3\) must be 2 values"):
        cutegen.tunable("a, b", [(1, 2, 3)])


def test_knobs_are_said_in_one_place(folder: Path) -> None:
    with pytest.raises(FamilyError, match=r"knobs are given here and by tunable in .*own\.py"):
        declare(folder, 'entry="own:Doubling", knobs={"threads": (32, 64)},', own__py=CLASS)


def test_values_of_a_decorator_are_written_out(folder: Path) -> None:
    text = CLASS.replace('["none", "evict"]', "list(HINTS)")
    with pytest.raises(FamilyError, match=r"own\.py, line 9: the values of tunable are not written out"):
        declare(folder, 'entry="own:Doubling",', own__py=text)


def test_a_constructor_that_takes_more_is_named(folder: Path) -> None:
    text = CLASS.replace("(self, threads, n,", "(self, treads, n,")
    with pytest.raises(FamilyError, match=r"constructor of Doubling takes treads \(did you mean threads\?\)"):
        declare(folder, 'entry="own:Doubling",', own__py=text)


def test_a_declaration_in_a_program_is_as_good(folder: Path) -> None:
    """A kernel can also be declared where no file is; it needs one only to be found by other processes."""
    kernel = Kernel(
        "ways",
        entry="json:dumps",
        sizes={"m": free, "n": fixed},
        arguments=(read("x", "fp32", ("m", "n")), write("y", "fp32", ("m", "n"))),
        call="x, y, stream, a",
        configs=[{"a": 1}, {"a": 2}],
    )
    assert kernel.domains == {"a": (1, 2)}


def test_a_space_is_listed_where_the_module_is_not(folder: Path) -> None:
    """Only compiling needs it, and says so."""
    arguments = 'entry="absent:Doubling", construct="threads", call="x, y, stream", '
    arguments += 'knobs={"threads": (32, 64)},'
    family = declare(folder, arguments)
    assert configs(family) == [{"threads": 32}, {"threads": 64}]
    problem = family.parse("ways 8x256")
    config = registry.find_space("ways", ARCH).default(problem)
    with pytest.raises(FamilyError, match=r"ways\.py, line 4: module absent is not there"):
        render(problem, config, ARCH)

"""What authors of kernels are told of kernels that are not right yet."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from own_kernels import build_every_config
from own_registry import without_user_families

from cutegen.arch import find_arch
from cutegen.build import Builder, Failure
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.cli.main import main
from cutegen.errors import FamilyError, ProblemError
from cutegen.families import registry
from cutegen.families.user.family import UserFamily
from cutegen.kernel import read

TEXT = '0] = "text"'
ARCH = find_arch("sm_90a")
KERNEL = """
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(q: cute.Tensor, scale: cute.Tensor, y: cute.Tensor, how: cutlass.Constexpr):
    row, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(how == "name"):
        y[row, 0] = unknown_name
    if cutlass.const_expr(how == "text"):
        y[row, 0] = "text"


@cute.jit
def launch(
    q: cute.Tensor, scale: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream, how: cutlass.Constexpr
):
    if cutlass.const_expr(how == "refused"):
        raise ValueError("refused is not supported")
    kernel(q, scale, y, how).launch(grid=(q.shape[0], 1, 1), block=(32, 1, 1), stream=stream)
"""
DECLARATION = """
from cutegen.kernel import Kernel, free, read, write

kernel = Kernel(
    "dequantize_blocks",
    entry="blocks:launch",
    sizes={"m": free, "n": free},
    arguments=(
        read("q", "int8", ("m", "n")),
        read("scale", "fp32", ("m/128", "n/128")),
        write("y", "bf16", ("m", "n")),
    ),
    knobs={"how": ("plain", "name", "text", "refused")},
)


@kernel.reference
def reference(q, scale):
    return q * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
"""


@pytest.fixture
def declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_user_families(monkeypatch)
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "blocks.py").write_text(KERNEL)
    (folder / "blocks_kernel.py").write_text(DECLARATION)
    return folder / "blocks_kernel.py"


def load(declaration: Path, old: str = "", new: str = "") -> UserFamily:
    declaration.write_text(DECLARATION.replace(old, new) if old else DECLARATION)
    return registry.load_kernel(declaration)


def test_candidates_are_checked_on_small_sizes_of_which_parts_are_whole(declaration: Path) -> None:
    """Four scales of 4 bytes are the fewest whose rows start at multiples of 16 bytes."""
    family = load(declaration)
    (tail,) = family.tails(family.parse("dequantize_blocks 4096x4096"))
    assert tail.sizes == {"m": 128, "n": 512} and not tail.unaligned


def test_small_sizes_follow_a_problem_whose_rows_may_start_anywhere(declaration: Path) -> None:
    family = load(declaration)
    (tail,) = family.tails(family.parse("dequantize_blocks 4096x4096 unaligned"))
    assert tail.sizes == {"m": 128, "n": 128} and tail.unaligned


def test_parts_of_rows_do_not_go_with_independent_rows(declaration: Path) -> None:
    with pytest.raises(FamilyError, match="argument scale: rows='m' must be whole in its first size 'm/128'"):
        load(declaration, "    knobs=", '    rows="m",\n    knobs=')


def test_the_rule_of_aligned_rows_names_tensors_and_ways_out(
    declaration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--arch", "sm_90a", "--shape", "256x256"]
    assert main(["space", "--kernel", str(declaration), *words]) == 2
    said = capsys.readouterr().err
    assert "Rows of q, scale, y must start at multiples of 16 bytes" in said
    assert "anywhere=True" in said and "aligned=False" in said
    changed = DECLARATION.replace('("m/128", "n/128")', '("m/128", "n/128"), anywhere=True')
    other = declaration.with_name("other_kernel.py")
    other.write_text(changed.replace("dequantize_blocks", "dequantize_anywhere"))
    assert main(["space", "--kernel", str(other), *words]) == 0
    assert "Rows of q, y must" in " ".join(capsys.readouterr().out.split())


def test_a_kernel_may_need_less_than_16_bytes_of_a_tensor(declaration: Path) -> None:
    """What it is compiled for, and what its rule says."""
    family = load(
        declaration, 'write("y", "bf16", ("m", "n"))', 'write("y", "bf16", ("m", "n"), align_bytes=8)'
    )
    space = registry.find_space(family.name, ARCH)
    assert "multiples of 16 bytes (8 of y), unless" in " ".join(rule.reason for rule in space.rules)
    problem = family.parse("dequantize_blocks 4096x8192")
    text = render(problem, space.default(problem), ARCH).text
    (y,) = (line for line in text.splitlines() if "cutlass.BFloat16, (" in line)
    assert "divisibility=4" in y and "assumed_align=8" in y


def test_a_lint_without_problems_finds_nothing_unused(
    declaration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["space", "--kernel", str(declaration), "--arch", "sm_90a", "--lint"]) == 2
    captured = capsys.readouterr()
    assert "give --shape, or examples= in the declaration" in captured.err and not captured.out


@pytest.mark.dsl
def test_mistakes_in_a_kernel_are_reported_with_file_and_line(declaration: Path, tmp_path: Path) -> None:
    """A refusal in the author's own words stays as it is."""
    family = load(declaration)
    problem = family.parse("dequantize_blocks 4096x4096")
    built = build_every_config(problem, ARCH, tmp_path / "store")
    found = {source.config["how"]: result for source, result in built}
    said = {how: result.message for how, result in found.items() if isinstance(result, Failure)}
    lines = KERNEL.splitlines()
    at = {word: 1 + next(i for i, line in enumerate(lines) if word in line) for word in ("unknown_", TEXT)}
    assert said["name"] == f"blocks.py, line {at['unknown_']}: NameError: name 'unknown_name' is not defined"
    assert said["text"].startswith(f"blocks.py, line {at[TEXT]}: ")
    assert said["refused"] == "refused is not supported"
    assert "plain" not in said


#: What authors get wrong: a part of the declaration, what they write instead, and what they are told.
MISTAKES = {
    "sizes in a tuple": (
        '{"m": free, "n": free}',
        '("m", "n")',
        r"sizes is \('m', 'n'\); it must be like sizes={'m': free",
    ),
    "a number as an axis": ('"bf16", ("m", "n")', '"bf16", ("m", 4096)', "axis 4096 is no text; name a size"),
    "torch's name of a dtype": (
        '"bf16", ("m", "n")),\n    ),',
        '"out", ("m", "n")),\n    ),\n    options={"out": ("bfloat16", "fp32")},',
        "argument y: its dtype, option out, may not be 'bfloat16'; valid: bf16, fp16",
    ),
    "an unknown size in tails": (
        "    knobs=",
        '    tails=({"k": 8},),\n    knobs=',
        "tails name k, which is no size; .*: m, n",
    ),
    "no number in tails": ("    knobs=", '    tails=({"n": "8"},),\n    knobs=', "tails have n='8'"),
    "a fixed size in tails": (
        '"n": free}',
        '"n": "fixed"}, tails={"n": 8}',
        "tails name n, which is fixed; one kernel serves all values of free sizes only: m",
    ),
    "the name of a size": ('{"m": free', '{"q": free', "argument q has a name that is taken: a size"),
    "a name of cutegen's": (
        'read("q"',
        'read("stream"',
        "argument stream has a name that is taken: cutegen's",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_declaration_are_named_with_file_and_line(declaration: Path, mistake: str) -> None:
    old, new, said = MISTAKES[mistake]
    assert old in DECLARATION
    with pytest.raises(FamilyError, match=said) as failure:
        load(declaration, old, new)
    assert f"{declaration}, line " in str(failure.value)


def test_one_of_something_needs_no_tuple(declaration: Path) -> None:
    """An axis, an example, and a small shape: the comma of a tuple of one is easily forgotten."""
    more = '    tails={"m": 256, "n": 512},\n    examples="4096x4096",\n    knobs='
    family = load(declaration, "    knobs=", more)
    problem = family.parse("dequantize_blocks 4096x4096")
    assert [tail.sizes for tail in family.tails(problem)] == [{"m": 256, "n": 512}]
    assert list(family.typical()) == [problem]
    assert read("sums", "fp32", "m").dims == ("m",)


@pytest.mark.dsl
def test_a_module_inside_a_package_is_named_with_it(declaration: Path, tmp_path: Path) -> None:
    (declaration.parent / "helpers.py").write_text("")
    (declaration.parent / "blocks.py").write_text(f"from . import helpers\n{KERNEL}")
    family = load(declaration)
    problem = family.parse("dequantize_blocks 4096x4096")
    config = registry.find_space(family.name, ARCH).default(problem)
    with Builder(Store(tmp_path / "store"), workers=1) as builder:
        ((_, result),) = builder.build([render(problem, config, ARCH)])
    assert isinstance(result, Failure) and "entry='package.module:name'" in result.message


@pytest.fixture
def second(declaration: Path) -> Path:
    path = declaration.with_name("second_kernel.py")
    path.write_text(DECLARATION.replace("dequantize_blocks", "dequantize_again"))
    return path


def test_of_several_kernels_one_is_named(
    declaration: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kernel", str(declaration), "--kernel", str(second), "--arch", "sm_90a", "--shape", "512x512"]
    assert main(["space", *words]) == 2
    said = capsys.readouterr().err
    assert "--kernel is given 2 times; name one of dequantize_blocks, dequantize_again" in said
    assert main(["space", "dequantize_again", *words]) == 0
    assert capsys.readouterr().out.startswith("dequantize_again 512x512")
    assert main(["space", "gemm", *words]) == 2
    assert "declares dequantize_blocks, dequantize_again, not gemm" in capsys.readouterr().err


def test_a_kernel_that_was_not_loaded_is_said_to_be_missing(
    declaration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProblemError, match=r"loaded first \(cutegen.load, --kernel FILE.py\)"):
        registry.parse_problem("dequantize_blocks 512x512")
    assert main(["space", "dequantize_blocks", "--arch", "sm_90a", "--shape", "512x512"]) == 2
    assert "--kernel FILE.py a kernel" in capsys.readouterr().err


@pytest.mark.dsl
def test_recorded_calls_of_several_kernels_are_tuned_and_the_next_command_can_be_pasted(
    declaration: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the kernels has a space in its name."""
    recording = tmp_path / "calls.jsonl"
    lines = [{"cutegen_recording": 1, "cutegen": "0.1.0", "gpu": None, "pid": 1, "written_at": "now"}]
    for name in ("blocks", "again"):
        problem = f"dequantize_{name} 512x512"
        lines.append({"problem": problem, "phase": "forward", "count": 1, "how": "unknown", "source": ""})
    recording.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["--kernel", str(declaration), "--kernel", str(second), "--arch", "sm_90a", "--candidates", "1"]
    bundle = tmp_path / "a bundle.tar"
    assert main(["tune", "--recorded", str(recording), *words, "--export", str(bundle), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert "dequantize_blocks 512x512" in captured.out and "dequantize_again 512x512" in captured.out
    (line,) = [line for line in captured.err.splitlines() if "--import" in line]
    command = shlex.split(line.partition(": ")[2])
    assert command[-2:] == ["--import", "a bundle.tar"]
    assert [command[at + 1] for at, word in enumerate(command) if word == "--kernel"] == words[1:4:2]

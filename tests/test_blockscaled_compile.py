"""Block-scaled Blackwell kernels through the real compiler: they fit, and hold the instructions they should.

Compiled and inspected, untested on hardware. Needs the compiler but no GPU; takes 15 seconds.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from blackwell import B200, B300, RINGS, Kernel, barrier_arrivals, compiled, pair
from blockscaled import LAUNCHED, SPACE, changes, chosen, instruction_descriptor
from disassembly import disassembled
from fake_gpu import build_driver, run_with_driver

from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.cli.tune import main
from cutegen.families.gemm.problem import SCALE_BLOCKS, SCALE_ROWS, Problem
from cutegen.space import Launch

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
KERNELS = 16
"""Most kernels that this module compiles, so that it stays within its time."""
TRACER = Path(__file__).parent / "data" / "scales.py"


@pytest.fixture(scope="module")
def kernels(compiler: Builder) -> list[Kernel]:
    """The covering set, compiled; whatever fails to compile fails every test with its reason."""
    cases = {render(*case): case for case in chosen()}
    assert len(cases) <= KERNELS
    return compiled(cases, SPACE, compiler)


def number(kernel: Kernel, name: str) -> int:
    value = kernel.derived[name]
    assert type(value) is int
    return value


def test_the_set_holds_every_tile_and_cluster(kernels: list[Kernel]) -> None:
    """On both targets, for every kind of operands."""
    assert {kernel.arch for kernel in kernels} == {B200, B300}
    for knob in ("mma_tiler_mn", "cluster_shape_mn"):
        assert {kernel.config[knob] for kernel in kernels} == set(SPACE.domains[knob])
    assert {kernel.problem.ab_dtype for kernel in kernels} == {"mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"}
    assert {kernel.problem.out_dtype for kernel in kernels} == {"bf16", "fp16", "fp32"}


def test_a_kernel_needs_what_was_predicted(kernels: list[Kernel]) -> None:
    """Shared memory to the byte; nothing spills, and the assembler has nothing to note."""
    for kernel in kernels:
        found = kernel.artifact.resources
        assert found.smem_bytes == number(kernel, "smem_bytes"), str(kernel)
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0), str(kernel)
        assert found.notes == (), str(kernel)
        assert kernel.main.threads == number(kernel, "threads"), str(kernel)
        assert kernel.main.registers <= number(kernel, "max_registers"), str(kernel)
        assert len(found.kernels) == 1, str(kernel)


#: DLPack's codes and bits of what is handed over.
CODES = {
    "torch.uint8": (1, 8),
    "torch.float8_e4m3fn": (10, 8),
    "torch.float8_e5m2": (12, 8),
    "torch.float8_e8m0fnu": (14, 8),
    "torch.bfloat16": (4, 16),
}
CALL = """
from pathlib import Path
import tvm_ffi
from cutegen.build.loader import load_kernel
from fake_gpu import FakeTensor

def make(shape, strides, code, bits):
    tensor = FakeTensor(*shape, code=code, bits=bits)
    tensor._strides[:] = strides
    return tvm_ffi.from_dlpack(tensor)

given = [make(*each) if isinstance(each, tuple) else each for each in {given!r}]
load_kernel(Path({library!r}), {symbol!r})(*given)
"""


def handed_over(problem: Problem, launch: Launch, *, padded: bool) -> list[Any]:
    """What the measuring process calls a kernel with: of tensors shape, strides, code and bits."""
    torch = pytest.importorskip("torch")
    from host_lane import bound, filled, new_out

    return [
        (tuple(x.shape), x.stride(), *CODES[str(x.dtype)]) if isinstance(x, torch.Tensor) else x
        for x in bound(problem, filled(problem, awkward=padded), new_out(problem), launch)
    ]


def test_odd_problems_are_launched_as_planned(kernels: list[Kernel], tmp_path: Path) -> None:
    """The operands of the check are taken; grid, cluster and shared memory are what a driver records."""
    driver = build_driver(tmp_path)
    for line, words in LAUNCHED:
        problem = Problem.parse(line)
        config = SPACE.default(problem).replace(**changes(words))
        [kernel] = [k for k in kernels if (k.problem, k.config) == (problem, config)]
        launch = SPACE.launch(config, problem, 148)
        library, symbol = str(kernel.artifact.shared_object), kernel.artifact.symbol
        code = "".join(
            CALL.format(given=handed_over(problem, launch, padded=padded), library=library, symbol=symbol)
            for padded in (False, True)
        )
        _, log = run_with_driver(driver, code, tmp_path / symbol)
        [call, again] = [entry for entry in log if entry.startswith("cuLaunchKernelEx")]
        assert call.split(" smem ")[0] == again.split(" smem ")[0]
        (cm, cn), tile_n = pair(config["cluster_shape_mn"]), pair(config["mma_tiler_mn"])[1]
        clusters = -(-1000 // (128 * cm)) * -(-520 // (tile_n * cn))
        grid = f"{cm} {cn} {min(clusters, launch.scalars[0])}"
        assert f" grid {grid} block 192 1 1 smem {number(kernel, 'smem_bytes')} " in call, call
        assert f" attribute 4 {cm} {cn} 1 " in call, call
        assert (" attribute 6 1 " in call) == config["use_pdl"], call


def test_without_a_gpu_candidates_are_compiled_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured and nothing predicted, and the output says so."""
    line = [
        "gemm_blockscaled",
        "--arch",
        "sm_103a",
        "--shape",
        "512x1024x2048",
        "--dtype",
        "nvfp4",
        "--quiet",
    ]
    assert main([*line, "--candidates", "2", "--cache-dir", str(tmp_path)]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "nvfp4 kk on sm_103a, nothing measured: there is no performance model" in found
    assert "(2 candidates, " in found and "regs" in found


# --- the instructions ---


@pytest.fixture(scope="module")
def listings(kernels: list[Kernel], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, str]]:
    """The instructions of each kernel."""
    texts = disassembled([kernel.artifact for kernel in kernels], tmp_path_factory.mktemp("cubin"))
    return list(zip(kernels, texts, strict=True))


def test_the_mma_takes_scale_factors_from_tensor_memory(listings: list[tuple[Kernel, str]]) -> None:
    """Four instructions for each k tile, all of the kind of the operands; UTCOMMA is the one of 4 bits."""
    for kernel, listing in listings:
        found = re.findall(r"(UTC[A-Z]+MMA)(\S*) .*idesc\[UR\d+\], tmem\[UR\d+\]", listing)
        assert len(found) == 4, str(kernel)
        fp4, two = kernel.problem.ab_dtype == "nvfp4", kernel.config["use_2cta_instrs"]
        block = ".4X" if kernel.arch == B200 else ".BLOCK16"  # two names for 16 elements to a factor
        assert set(found) == {
            ("UTCOMMA" if fp4 else "UTCQMMA", (".2CTA" if two else "") + (block if fp4 else ""))
        }
        assert len(re.findall(r"\bUTC[A-Z]+MMA", listing)) == 4, str(kernel)


def test_the_mma_is_told_types_and_sizes(listings: list[tuple[Kernel, str]]) -> None:
    """Its descriptor but for the byte of mxfp8's factors, which follows from where they are."""
    for kernel, listing in listings:
        constants = {int(number, 16) for number in re.findall(r"\b0x[0-9a-f]{6,8}\b", listing)}
        wanted = instruction_descriptor(kernel)
        assert wanted in constants, f"{kernel}: {wanted:#x} {sorted(map(hex, constants))}"
        assert not {wanted ^ 1 << bit for bit in (7, 10, 15, 16, 18, 23, 27)} & constants, str(kernel)


def test_scale_factors_lie_behind_the_sums_in_tensor_memory(listings: list[tuple[Kernel, str]]) -> None:
    """Each copy fills four columns, together all that the space counts; as many are allocated as it says."""
    for kernel, listing in listings:
        copies = re.findall(r"UTCCP\.T\.S(\S*)\.4x32dp128bit tmem\[UR\d+\+0x([0-9a-f]+)\]", listing)
        begin = number(kernel, "acc_stages") * pair(kernel.config["mma_tiler_mn"])[1]
        columns = number(kernel, "sfa_columns") + number(kernel, "sfb_columns")
        wanted = list(range(begin, begin + columns, 4))
        assert sorted(int(at, 16) for _, at in copies) == wanted, str(kernel)
        assert {"2CTA" in flag for flag, _ in copies} == {kernel.config["use_2cta_instrs"]}, str(kernel)
        asked = re.findall(
            r"UMOV (UR\d+), (0x[0-9a-f]+) ;(?:\n.*){1,5}"
            r"UTCATOMSWS\S*FIND_AND_SET\S* UP\d, UR\d+, \1 ",
            listing,
        )
        assert {32 * int(parts, 16) for _, parts in asked} == {number(kernel, "tmem_columns")}, str(kernel)


def test_barriers_await_as_many_arrivals_as_the_space_counts(listings: list[tuple[Kernel, str]]) -> None:
    """One full and one empty barrier for each stage of each ring; the allocator of a pair has one more."""
    for kernel, listing in listings:
        wanted: Counter[int] = Counter()
        for stages, arrivals in RINGS[:2]:
            wanted[1] += number(kernel, stages)
            wanted[number(kernel, arrivals)] += number(kernel, stages)
        wanted[32] += bool(kernel.config["use_2cta_instrs"])
        assert +wanted == barrier_arrivals(listing), str(kernel)


def test_operands_and_scale_factors_are_loaded_and_shared(listings: list[tuple[Kernel, str]]) -> None:
    """A and its factors along a row, B along a column; B's factors are for both blocks of a pair as well."""
    for kernel, listing in listings:
        loads = re.findall(r"UTMALDG\.(\d)D(\S*)", listing)
        batched = kernel.problem.batch > 1
        a_shared, b_shared = kernel.sharing
        scales_shared = pair(kernel.config["cluster_shape_mn"])[0] > 1
        wanted = Counter({(2, a_shared): 1}) + Counter({(2, b_shared): 1})
        wanted += Counter({(3, a_shared): 1}) + Counter({(3, scales_shared): 1})
        found = Counter((int(rank) - batched, "MULTICAST" in flags) for rank, flags in loads)
        assert found == wanted, str(kernel)
        assert {"2CTA" in flags for _, flags in loads} == {kernel.config["use_2cta_instrs"]}, str(kernel)


def test_results_leave_by_tma_exactly_when_the_config_says_so(listings: list[tuple[Kernel, str]]) -> None:
    """And kernels wait for one another only with use_pdl; nothing touches local memory."""
    for kernel, listing in listings:
        assert ("UTMASTG" in listing) == kernel.staged, str(kernel)
        assert bool(re.search(r"\bSTG\.", listing)) != kernel.staged, str(kernel)
        assert ("ACQBULK" in listing) == ("PREEXIT" in listing) == kernel.config["use_pdl"], str(kernel)
        assert not re.search(r"\b(LDL|STL)\b", listing), str(kernel)


# --- what they are called with ---

CALLED = (
    "300x136x224 nvfp4 kk alpha",
    "2x300x136x224 nvfp4 kk",
    "300x137x224 mxfp8_e4m3 kk out=fp32",
    "2x300x136x224 mxfp8_e5m2 kk out=fp16 alpha",
)
TYPES = {
    "torch.uint8": "Uint8",
    "torch.float8_e4m3fn": "Float8E4M3FN",
    "torch.float8_e5m2": "Float8E5M2",
    "torch.float8_e8m0fnu": "Float8E8M0FNU",
    "torch.bfloat16": "BFloat16",
    "torch.float16": "Float16",
    "torch.float32": "Float32",
}


def test_kernels_are_called_with_what_they_are_compiled_for(tmp_path: Path) -> None:
    """Order, types, ranks, sizes that must agree, and which stride is 1; also for operands with padding."""
    torch = pytest.importorskip("torch")
    from host_lane import bound, filled, new_out

    problems = [Problem.parse(f"gemm_blockscaled {line}") for line in CALLED]
    paths = [tmp_path / f"kernel_{at}.py" for at in range(len(problems))]
    for path, problem in zip(paths, problems, strict=True):
        path.write_text(render(problem, SPACE.default(problem), B200).text)
    command = [sys.executable, str(TRACER.with_name("arguments.py")), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for problem, wanted in zip(problems, json.loads(done.stdout), strict=True):
        launch = SPACE.launch(SPACE.default(problem), problem, 148)
        assert wanted.pop() == "_FakeStream", "TVM-FFI hands over the stream itself"
        for padded in (False, True):
            given = bound(problem, filled(problem, awkward=padded), new_out(problem), launch)
            sizes: dict[int, int] = {}
            for argument, want in zip(given, wanted, strict=True):
                if not isinstance(argument, torch.Tensor):
                    assert {int: "Int32", float: "Float32"}[type(argument)] == want, problem
                    continue
                assert TYPES[str(argument.dtype)] == want["dtype"], problem
                assert len(argument.shape) == len(want["sizes"]), problem
                for size, name, step in zip(argument.shape, want["names"], want["sizes"], strict=True):
                    assert size == sizes.setdefault(name, size) and size % step == 0, problem
                for stride, step in zip(argument.stride(), want["strides"], strict=True):
                    assert stride % step == 0 if step else stride == 1, problem


# --- where things are ---

ROWS, K = 576, 256
TRACED = (
    ("mxfp8_e4m3", "mma_tiler_mn=256x64 cluster_shape_mn=2x1 use_tma_store=false"),
    ("nvfp4", "mma_tiler_mn=128x128 cluster_shape_mn=1x1"),
    ("nvfp4", "mma_tiler_mn=256x192 cluster_shape_mn=2x1"),
)


def test_scale_factors_and_sums_are_where_they_should_be(tmp_path: Path) -> None:
    """Each row and block has one byte of a swizzled tile; tiles of columns find the tile that theirs are in.

    Each sum of a tile leaves by one register of one thread.
    """
    paths = []
    for at, (dtype, words) in enumerate(TRACED):
        problem = Problem.parse(f"gemm_blockscaled 4096x4096x4096 {dtype} kk")
        paths.append(tmp_path / f"kernel_{at}.py")
        paths[-1].write_text(render(problem, SPACE.default(problem).replace(**changes(words)), B200).text)
    command = [sys.executable, str(TRACER), str(ROWS), str(K), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, found in zip(TRACED, json.loads(done.stdout), strict=True):
        blocks = K // found["block"]
        tiles_k = blocks // SCALE_BLOCKS

        def place(row: int, block: int, tiles_k: int = tiles_k) -> int:
            tile = row // SCALE_ROWS * tiles_k + block // SCALE_BLOCKS
            return tile * 512 + row % 32 * 16 + row % SCALE_ROWS // 32 * 4 + block % SCALE_BLOCKS

        assert found["scales"] == [
            [place(row, block) for block in range(blocks)] for row in range(0, ROWS, 7)
        ], case
        assert found["shared"], case
        rows, columns = found["tile"]
        first = [tile * columns // SCALE_ROWS * SCALE_ROWS for tile in range(ROWS // columns)]
        assert found["begins"] == [place(row, 0) for row in first], case
        amid = [(tile * columns - row) // 32 for tile, row in enumerate(first)]
        assert found.get("columns", [0] * len(first)) == amid, case
        where = sorted(map(tuple, found["places"]))
        wanted = [(m, n) for m in range(rows) for n in range(columns)]
        assert where == (wanted if case == TRACED[0] else []), case

"""Problems: what is accepted, what is refused and why, and the line form that parses back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegen.dtypes import DTYPE_BYTES, TMA_ALIGN_BYTES
from cutegen.errors import ProblemError
from cutegen.families.gemm.problem import (
    BLOCK_SCALED,
    BLOCK_SCALED_FAMILY,
    LAYOUTS,
    OLD_LAYOUTS,
    OUT_DTYPES,
    Epilogue,
    Problem,
    default_dtype,
    output_dtypes,
)
from tools.bringup_parts.random_problems import DTYPES, FAR, random_problem

PROBLEMS = st.randoms(use_true_random=False).map(
    lambda generator: random_problem(generator, FAR, (*DTYPES, *BLOCK_SCALED))
)


@given(PROBLEMS)
def test_the_line_of_a_problem_parses_back_to_it(problem: Problem) -> None:
    """One line without line breaks names the problem completely."""
    line = str(problem)
    assert "\n" not in line
    assert Problem.parse(line) == problem
    assert hash(Problem.parse(f"  {line}  ")) == hash(problem)


@pytest.mark.parametrize(("old", "new"), OLD_LAYOUTS.items())
def test_layouts_of_version_0_1_become_the_present_ones(old: str, new: str) -> None:
    """In lines and in arguments; the signature, which templates compare, keeps the old letters."""
    problem = Problem.parse(f"gemm 64x64x64 bf16 {old} act=relu")
    assert problem == Problem(64, 64, 64, layout=new, epilogue=Epilogue(activation="relu"))
    assert problem == Problem(64, 64, 64, layout=old, epilogue=Epilogue(activation="relu"))
    assert str(problem) == f"gemm 64x64x64 bf16 {new} act=relu"
    assert problem.old_line == f"gemm 64x64x64 bf16 {old} act=relu"
    assert problem.signature.layout == old
    assert "".join(LAYOUTS[new]) == new, "the name is the contiguous axis of A, then of B"


def test_names_of_torch_and_of_the_library_calls_are_accepted() -> None:
    """In lines too; they print as the short ones."""
    line = "gemm 16x16x16 float8_e4m3fn kk out_dtype=float32 activation=silu"
    assert str(Problem.parse(line)) == "gemm 16x16x16 e4m3 kk out=fp32 act=silu"
    assert Problem(8, 8, 8, ab_dtype="torch.bfloat16") == Problem(8, 8, 8)
    with pytest.raises(ProblemError, match="unsupported input dtype"):
        Problem(8, 8, 8, ab_dtype="float64")


def test_lines_read_as_users_write_them() -> None:
    """The plain case is four words; every option is one more."""
    assert str(Problem(4096, 2048, 512)) == "gemm 4096x2048x512 bf16 kk"
    epilogue = Epilogue(True, True, "n", "gelu", True)
    problem = Problem(5, 7, 16, 3, "e4m3", "fp32", promote=True, any_order=True, epilogue=epilogue)
    words = "gemm 3x5x7x16 e4m3 kk out=fp32 alpha beta scale bias=n act=gelu promote any_order"
    assert str(problem) == words
    assert str(Problem(8, 8, 8, unaligned_out=True)) == "gemm 8x8x8 bf16 kk unaligned"


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("", "''"),
        ("gemm 4096x4096x4096 bf16", "is not a problem"),
        ("gemm 4096x4096 bf16 kk", "'4096x4096'"),
        ("gemm 1x2x3x4x8 bf16 kk", "'1x2x3x4x8'"),
        ("gemm -8x8x8 bf16 kk", "'-8x8x8'"),
        ("gemm 8x8x8 bf16 kk fast", "'fast'"),
        ("gemm 8x8x8 bf16 kk alpha=2", "'alpha=2'"),
        (
            "gemm 8x8x8 bf16 kk act",
            "valid: out=..., bias=..., act=..., alpha, beta, scale, unaligned",
        ),
        ("gemm 8x8x8 bf16 kk act=tanh", "'tanh'"),
        ("gemm 8x8x8 bf16 kk bias=k", "'k'"),
        ("gemm 8x8x8 bf16 xx", "'xx'"),
        ("gemm 8x8x8 fp64 kk", "'fp64'"),
        ("gemm 8x8x8 bf16 kk out=int32", "'int32'"),
        ("gemm 0x8x8 bf16 kk", "m=0"),
        ("gemm 8x8x9 bf16 kk", "k=9"),
        ("gemm 99999999999x8x8 bf16 kk", "m=99999999999 must be an integer from 1 to 2147483647"),
        (f"gemm 8x{'9' * 5000}x8 bf16 kk", "a size has 5000 digits; valid: integers from 1 to 2147483647"),
        (f"gemm {'9' * 5000}x8x8x8 bf16 kk", "a size has 5000 digits"),
        ("gemm 8x8x\u0668 bf16 kk", "'8x8x\u0668' is not MxNxK"),
    ],
    ids=lambda text: text[:40],
)
def test_a_malformed_line_is_refused_and_the_wrong_word_named(line: str, wrong: str) -> None:
    """The message quotes what is wrong."""
    with pytest.raises(ProblemError) as caught:
        Problem.parse(line)
    assert wrong in str(caught.value)


@pytest.mark.parametrize("name", ["m", "n", "k", "batch"])
@pytest.mark.parametrize("value", [0, -8, 2**31, 8.0, True, "8", None])
def test_sizes_are_integers_from_one_to_the_32_bit_limit(name: str, value: object) -> None:
    """Anything else is refused by name and value."""
    sizes = {"m": 8, "n": 8, "k": 8, name: value}
    with pytest.raises(ProblemError, match=name):
        Problem(**sizes)  # type: ignore[arg-type]


@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from("mnk"), st.integers(1, 10**6))
def test_the_padding_that_a_refusal_proposes_is_accepted(layout: str, axis: str, extent: int) -> None:
    """A contiguous extent that is no multiple of 16 bytes is refused with the extent that would do."""
    sizes = {"m": 64, "n": 64, "k": 64, axis: extent}
    must = axis in LAYOUTS[layout] and extent * DTYPE_BYTES["bf16"] % TMA_ALIGN_BYTES
    if not must:
        assert Problem(**sizes, layout=layout).layout == layout
        return
    with pytest.raises(ProblemError, match=f"{axis}={extent}") as caught:
        Problem(**sizes, layout=layout)
    padded = int(str(caught.value).rsplit(maxsplit=1)[1])
    assert 0 < padded - extent < TMA_ALIGN_BYTES // DTYPE_BYTES["bf16"]
    Problem(**{**sizes, axis: padded}, layout=layout)


@pytest.mark.parametrize("dtype", sorted((*OUT_DTYPES, *BLOCK_SCALED)))
def test_every_input_type_has_a_default_output_and_refuses_foreign_ones(dtype: str) -> None:
    """A missing output type is the first of the valid ones; a refusal lists them all."""
    family = BLOCK_SCALED_FAMILY if dtype in BLOCK_SCALED else "gemm"
    assert Problem(64, 64, 64, ab_dtype=dtype, family=family).out_dtype == output_dtypes(dtype)[0]
    for out in DTYPE_BYTES:
        if out in output_dtypes(dtype):
            assert Problem(64, 64, 64, ab_dtype=dtype, out_dtype=out, family=family).out_dtype == out
        else:
            with pytest.raises(ProblemError, match=", ".join(output_dtypes(dtype))):
                Problem(64, 64, 64, ab_dtype=dtype, out_dtype=out, family=family)


def test_eight_bit_operands_are_contiguous_along_k() -> None:
    """Our kernels read no other order of 8-bit operands, so other layouts are refused."""
    for dtype in ("e4m3", "e5m2", "int8"):
        for layout in ("kn", "mn", "mk"):
            with pytest.raises(ProblemError, match="'kk'"):
                Problem(64, 64, 64, ab_dtype=dtype, layout=layout)


def test_only_fp8_sums_can_be_promoted() -> None:
    """Other types are summed exactly enough already."""
    assert Problem(64, 64, 64, ab_dtype="e5m2", promote=True).promote
    for dtype in ("bf16", "fp16", "tf32", "int8"):
        with pytest.raises(ProblemError, match="fp8"):
            Problem(64, 64, 64, ab_dtype=dtype, promote=True)


def test_tf32_problems_are_of_fp32_values_in_any_layout() -> None:
    """Four bytes each, so sizes are multiples of 4; the result is in fp32 unless another is named."""
    problem = Problem.parse("gemm 64x36x20 tf32 kn")
    assert (problem.out_dtype, problem.min_bytes) == ("fp32", 4 * (64 * 20 + 20 * 36 + 64 * 36))
    assert Problem(60, 36, 21, ab_dtype="tf32", layout="mn").layout == "mn"
    with pytest.raises(ProblemError, match=r"multiple of 4 \(16 bytes of tf32\); pad k to 24"):
        Problem(64, 36, 22, ab_dtype="tf32")


@pytest.mark.parametrize("k", [2**31 - 4095, 2**31 - 1])
def test_no_padding_is_suggested_beyond_what_kernels_compute(k: int) -> None:
    with pytest.raises(
        ProblemError, match=r"multiple of 8 \(16 bytes of bf16\); k may be 2147479552 at most$"
    ):
        Problem(8, 8, k)
    with pytest.raises(ProblemError, match=r"pad k to 2147479552$"):
        Problem(8, 8, 2**31 - 4097)


def test_an_integer_output_is_the_plain_product() -> None:
    """Factors, sums and activations are in floating point, so they need such an output."""
    assert Problem(64, 64, 64, ab_dtype="int8").out_dtype == "int32"
    for epilogue in (Epilogue(alpha=True), Epilogue(beta=True), Epilogue(bias="n"), Epilogue(scale=True)):
        with pytest.raises(ProblemError, match="plain integer GEMM"):
            Problem(64, 64, 64, ab_dtype="int8", epilogue=epilogue)
        assert Problem(64, 64, 64, ab_dtype="int8", out_dtype="bf16", epilogue=epilogue).epilogue == epilogue


@given(PROBLEMS)
def test_rows_that_cannot_be_aligned_are_never_called_aligned(problem: Problem) -> None:
    """n that is no multiple of 16 bytes sets unaligned_out by itself."""
    if problem.n * DTYPE_BYTES[problem.out_dtype] % TMA_ALIGN_BYTES:
        assert problem.unaligned_out
        assert replace(problem, unaligned_out=False).unaligned_out


def test_another_size_keeps_what_was_asked_for_and_drops_what_the_old_size_caused() -> None:
    """unaligned_out stays if the user set it, not if n alone caused it."""
    odd = Problem(64, 1001, 64)
    assert odd.unaligned_out and not odd.resized(64, 1000, 64).unaligned_out
    asked = Problem(64, 1000, 64, unaligned_out=True)
    assert asked.resized(32, 2000, 64, 2).unaligned_out
    assert asked.resized(32, 2000, 64, 2).batch == 2


@given(PROBLEMS, st.integers(0, 2**32))
def test_sizes_are_not_compiled_in(problem: Problem, seed: int) -> None:
    """Another size of the same kind has the same signature, so one artifact serves it."""
    step = Random(seed).randint(1, 50) * 32
    batch = problem.batch + 1 if problem.batch > 1 else 1
    other = problem.resized(step, step if problem.n % 16 == 0 else problem.n, step, batch)
    assert other.signature == problem.signature
    assert replace(problem, any_order=not problem.any_order).signature == problem.signature


def test_the_signature_holds_everything_else() -> None:
    """Whatever changes the kernel's text changes the signature."""
    base = Problem(64, 64, 64, ab_dtype="e4m3")
    others = [
        replace(base, batch=2),
        replace(base, ab_dtype="e5m2"),
        replace(base, out_dtype="fp32"),
        replace(base, unaligned_out=True),
        replace(base, promote=True),
        replace(base, epilogue=Epilogue(scale=True)),
        Problem(64, 64, 64, layout="kn"),
    ]
    signatures = [base.signature, *(other.signature for other in others)]
    assert len(set(signatures)) == len(signatures)


def test_a_signature_of_another_process_is_found_in_dictionaries() -> None:
    """Its hash is worked out anew, since strings hash otherwise there."""
    script = "import pickle, sys; from cutegen.families.gemm.problem import Problem; "
    script += "sys.stdout.buffer.write(pickle.dumps(Problem(16, 64, 64, layout='kn').signature))"
    own = Problem(32, 128, 64, layout="kn").signature
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found = pickle.loads(run.stdout)
        assert found == own and hash(found) == hash(own) and {own: 1}[found] == 1
    assert {replace(own, batched=True): 1}.get(own) is None


def test_work_is_counted_by_hand() -> None:
    """Two operations per multiply-add; each operand crosses memory once, C only with beta."""
    problem = Problem(2, 8, 16, batch=3)
    assert problem.flops == 2 * 3 * 2 * 8 * 16
    assert problem.min_bytes == 3 * 2 * (2 * 16 + 16 * 8 + 2 * 8)
    assert replace(problem, epilogue=Epilogue(beta=True)).min_bytes == problem.min_bytes + 3 * 2 * 2 * 8


def test_a_problem_cannot_change() -> None:
    """Problems are keys, so they are frozen."""
    with pytest.raises(FrozenInstanceError):
        Problem(8, 8, 8).m = 9  # type: ignore[misc]


# --- operands with scale factors along k ---


def test_block_scaled_dtypes_have_a_family_of_their_own() -> None:
    """Neither family multiplies what the other does; without a dtype each has its own."""
    line = "gemm_blockscaled 256x512x1024 nvfp4 kk out=fp32 alpha"
    assert str(Problem.parse(line)) == line
    with pytest.raises(
        ProblemError, match="gemm does not multiply nvfp4; gemm_blockscaled multiplies mxfp8_"
    ):
        Problem(256, 512, 1024, ab_dtype="nvfp4")
    with pytest.raises(ProblemError, match="gemm_blockscaled does not multiply bf16"):
        Problem(256, 512, 1024, family=BLOCK_SCALED_FAMILY)
    assert default_dtype("gemm") == "bf16"
    assert default_dtype(BLOCK_SCALED_FAMILY) == "mxfp8_e4m3"


@pytest.mark.parametrize("dtype", BLOCK_SCALED)
def test_k_holds_whole_blocks_and_whole_16_bytes(dtype: str) -> None:
    """32 elements for each dtype: 32 bytes and a block of mxfp8, 16 bytes and two blocks of nvfp4."""
    with pytest.raises(ProblemError, match=r"k=1040, which must be a multiple of 32 .*pad k to 1056"):
        Problem(256, 512, 1040, ab_dtype=dtype, family=BLOCK_SCALED_FAMILY)
    with pytest.raises(ProblemError, match="blocks lie along k"):
        Problem(256, 512, 1024, ab_dtype=dtype, layout="kn", family=BLOCK_SCALED_FAMILY)
    assert Problem(256, 512, 1056, ab_dtype=dtype, family=BLOCK_SCALED_FAMILY).k == 1056


def test_scale_factors_count_among_the_bytes_of_a_problem() -> None:
    """Tiles of 128 rows and 4 blocks, padded: 3 by 2 of mxfp8 for A here, 3 by 3 of nvfp4."""
    mxfp8 = Problem(300, 128, 160, ab_dtype="mxfp8_e5m2", family=BLOCK_SCALED_FAMILY)
    assert mxfp8.scale_factors == (3 * 2 * 512, 1 * 2 * 512)
    assert mxfp8.min_bytes == (300 + 128) * 160 + 8 * 512 + 300 * 128 * 2
    nvfp4 = Problem(300, 128, 160, batch=2, ab_dtype="nvfp4", family=BLOCK_SCALED_FAMILY)
    assert nvfp4.scale_factors == (3 * 3 * 512, 1 * 3 * 512)
    assert nvfp4.min_bytes == 2 * ((300 + 128) * 80 + 12 * 512 + 300 * 128 * 2)
    assert Problem(300, 128, 160).scale_factors == (0, 0)

"""The example that reads files of servers: what it writes is a recording, of the products that were meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_example import ROOT

from cutegen.records.recorded_calls import read_recordings

EXAMPLE = ROOT / "examples" / "shapes_of_servers.py"


def problems(tmp_path: Path, *files: Path) -> tuple[list[str], str]:
    """Return the problems that the example finds in files, and what it says."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, files)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    (tmp_path / "found.jsonl").write_text(done.stdout)
    found = read_recordings([tmp_path / "found.jsonl"])
    assert not found.notes
    return [str(problem) for problem in found.problems], done.stderr


@pytest.mark.parametrize("comma", [",", ", "])
def test_names_of_vllm_and_sglang_tell_n_k_and_dtype(tmp_path: Path, comma: str) -> None:
    name = f"N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128{comma}128].json"
    (tmp_path / name).write_text('{"1": {}, "4096": {}}')
    (tmp_path / "N=100,K=64,device_name=X.json").write_text('{"24": {}}')
    files = [tmp_path / name, tmp_path / "N=100,K=64,device_name=X.json"]
    assert problems(tmp_path, *files)[0] == [
        "gemm 1x2112x7168 e4m3 kk scale promote",
        "gemm 4096x2112x7168 e4m3 kk scale promote",
        "gemm 24x100x64 bf16 kk",
    ]


def test_products_of_tunable_change_their_operands(tmp_path: Path) -> None:
    """x @ w.T is TN of w and x; its gradients are NN and NT. Other dtypes and lines are no problems."""
    lines = (
        "Validator,PT_VERSION,2.13.0",
        "GemmTunableOp_BFloat16_TN,tn_4096_64_2048_ld_2048_2048_4096",
        "GemmTunableOp_BFloat16_NN,nn_2048_64_4096_ld_2048_4096_2048",
        "GemmTunableOp_Half_NT,nt_2048_4096_64_ld_2048_4096_2048",
        "GemmStridedBatchedTunableOp_BFloat16_TN,tn_64_32_128_B_8_ld_128_128_64",
        "GemmTunableOp_double_NN,nn_8_8_8_ld_8_8_8",
    )
    (tmp_path / "u.csv").write_text("\n".join(lines))
    assert problems(tmp_path, tmp_path / "u.csv")[0] == [
        "gemm 64x4096x2048 bf16 kk",
        "gemm 64x2048x4096 bf16 kn",
        "gemm 4096x2048x64 fp16 mn",
        "gemm 8x32x64x128 bf16 kk",
    ]


def test_what_no_kernel_computes_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("GemmTunableOp_BFloat16_TN,tn_4096_64_2047_ld_2047_2047_4096\n")
    found, said = problems(tmp_path, tmp_path / "u.csv")
    assert found == [] and "left out" in said

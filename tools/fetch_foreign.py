"""Fetch the kernels of others that examples/own_kernel/ declares, into a folder to put on PYTHONPATH.

    python tools/fetch_foreign.py foreign
    export PYTHONPATH=foreign

NVIDIA's examples come from CUTLASS on GitHub, FlashAttention's kernels in CuTe from their wheel on PyPI, both
at a fixed version and checked by digest. None of it is part of cutegen: see the licence in each file and
wheel. QuACK needs no fetching: ``pip install quack-kernels``.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.errors import StoreError
from cutegen.system.publish import publish

CUTLASS_COMMIT = "7107b05535f8977f5ecb9d01ee203205b1fd9bc4"
CUTLASS = f"https://raw.githubusercontent.com/NVIDIA/cutlass/{CUTLASS_COMMIT}"
_EXAMPLES = "examples/python/CuTeDSL/"
#: Files of CUTLASS below its examples, and the SHA-256 of each.
FILES = (
    (
        "cute/hopper/kernel/dense_gemm/dense_gemm_persistent.py",
        "65088a1fd7655ed46ad54fecd08e1461a334fb38f1b2d1da7cf252e465afc130",
    ),
    (
        "cute/hopper/kernel/attention/fmha.py",
        "01bcc2a091a33e85c350ece3c9e8535b81c1d4b69c4c88cf7a01cdccf0e1bfea",
    ),
    (
        "cute/ampere/kernel/elementwise/elementwise_add.py",
        "6071bfdcafd9356f2ffb72e26bc4430de8f0ddf0d1dd274614612656943658f5",
    ),
    (
        "cute/hopper/kernel/cta_norm/cta_norm.py",
        "a8be777556074337e2715ba861fbcdeab0a3f56f0f3304a534e8768318ad2eb2",
    ),
    (
        "helpers/__init__.py",
        "9cf1ae75e6473e5acf38b8ef7b498a14ff74fd54741a930708f6995fcacb7581",
    ),
    (
        "helpers/fmha_helpers.py",
        "cbe090eb5567b7cdbd8b4944cbd579084fd60379c463bcfb011e6d4b28ef20e1",
    ),
)
FLASH_ATTENTION = "flash-attn-4==4.0.0b36"
WHEEL_SHA256 = "b6f0e2a264334cb1b59289ddd309c7c76d3a8d184268316b43403e51ba8795d2"
_PATIENCE_S = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to; it is made if it is not there")
    parser.add_argument(
        "--cutlass", default=CUTLASS, metavar="URL", help="where CUTLASS is, file:///... for a checkout"
    )
    args = parser.parse_args(argv)
    return run_command(lambda: fetch(args.folder, args.cutlass))


def fetch(folder: Path, cutlass: str) -> int:
    """Fetch everything into ``folder``.

    Raises:
        StoreError: Something cannot be fetched, or is not what it should be.
    """
    for name, digest in FILES:
        content = _read(f"{cutlass}/{_EXAMPLES}{name}")
        _require(name, content, digest)
        publish(folder / name, content, "example of CUTLASS")
    _unpack_flash_attention(folder)
    print(f"{len(FILES)} files of CUTLASS and {FLASH_ATTENTION} are in {folder}; put it on PYTHONPATH")
    return EXIT_OK


def _read(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
            found: bytes = answer.read()
            return found
    except (urllib.error.URLError, OSError) as error:
        raise StoreError(f"{url} cannot be fetched: {error}") from error


def _require(name: str, content: bytes, digest: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise StoreError(f"{name} has the SHA-256 {found}; that of the version that was tuned is {digest}")


def _unpack_flash_attention(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", scratch, FLASH_ATTENTION], check=False, stdout=sys.stderr)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            raise StoreError(f"pip cannot download {FLASH_ATTENTION}; its message stands above")
        _require(wheels[0].name, wheels[0].read_bytes(), WHEEL_SHA256)
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder)


if __name__ == "__main__":
    sys.exit(main())

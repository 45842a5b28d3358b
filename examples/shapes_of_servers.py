"""Shapes that files of vLLM, SGLang and torch.cuda.tunable name, as a recording to tune from."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cutegen

#: torch's names of dtypes in these files.
DTYPES = {"BFloat16": "bf16", "Half": "fp16"}
UNTUNED = re.compile(
    r"Gemm(?:StridedBatched)?TunableOp_(\w+)_([NT])([NT]),[nt]{2}_(\d+)_(\d+)_(\d+)_(?:B_(\d+)_)?"
)


def of_server(path: Path) -> Iterator[str]:
    """A file of vLLM or SGLang: n, k and dtype in its name, and a config for each m in it."""
    named = dict(re.findall(r"(\w+)=(\[[^]]*\]|[^,]+)", path.stem))
    # Their fp8 kernels scale blocks of operands; cutegen's scale each operand as a whole.
    kind = "e4m3 kk scale promote" if "fp8" in named.get("dtype", "") else "bf16 kk"
    for m in json.loads(path.read_text()):
        yield f"gemm {m}x{named['N']}x{named['K']} {kind}"


def of_tunable(path: Path) -> Iterator[str]:
    """What torch writes with PYTORCH_TUNABLEOP_RECORD_UNTUNED=1: columns first, so a and b change places."""
    for found in map(UNTUNED.match, path.read_text().splitlines()):
        if found is not None and found[1] in DTYPES:
            dtype, first, second, n, m, k, batch = found.groups()
            layout = ("k" if second == "N" else "m") + ("k" if first == "T" else "n")
            yield f"gemm {batch + 'x' if batch else ''}{m}x{n}x{k} {DTYPES[dtype]} {layout}"


def recording(paths: list[Path]) -> Iterator[str]:
    """Yield the lines of a recording in which each problem is called once."""
    yield json.dumps({"cutegen_recording": 1, "gpu": None})
    for path in paths:
        for line in of_tunable(path) if path.suffix == ".csv" else of_server(path):
            try:
                problem = str(cutegen.Problem.parse(line))
            except cutegen.CutegenError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            yield json.dumps(
                {"problem": problem, "phase": "forward", "count": 1, "how": "unknown", "source": ""}
            )


paths = [Path(name) for name in sys.argv[1:]]
if not paths:  # without arguments: a file such as torch writes
    paths = [Path(tempfile.mkdtemp(), "untuned.csv")]
    paths[0].write_text("GemmTunableOp_BFloat16_TN,tn_4096_64_2048_ld_2048_2048_4096\n")
print("\n".join(recording(paths)))

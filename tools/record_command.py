"""Run a ``cutegen`` command as on an 80-column terminal, and write what it printed as a results file.

The cache folder is empty at first. Documents quote the file through tools/results_table.py.

    python tools/record_command.py --out docs/results/quick_start.json tune gemm --shape 4096x4096x4096

exit codes: that of the command; 2 bad usage; 3 an unusable file; 130 interrupted
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.exit_codes import run_command
from cutegen.errors import DeviceError
from cutegen.measure.device import present_device
from cutegen.system.temporary import TemporaryFolder
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import ROOT, git_commit, software
from tools.benchmark.results import write_json
from tools.benchmark.transcript import TRANSCRIPT

_COLUMNS = "80"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_out_argument(parser, required=True)
    add_commit_argument(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what stands behind the word cutegen")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("give the command to run, such as: tune gemm --shape 4096x4096x4096")
    return run_command(lambda: record(args.command, args.out, args.commit or git_commit()))


def record(command: Sequence[str], out: Path, commit: str) -> int:
    """Run ``cutegen`` with these arguments, write the file, and return the exit code."""
    try:
        device = present_device()
    except DeviceError:
        device = None
    with TemporaryFolder() as scratch:
        environment = {**os.environ, "CUTEGEN_CACHE_DIR": str(scratch.path / "cache"), "COLUMNS": _COLUMNS}
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "cutegen", *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        output = done.stdout.replace(str(scratch.path / "cache"), "~/.cache/cutegen")
    write_json(
        out,
        {
            "kind": TRANSCRIPT,
            "schema": 1,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit,
            "gpu": device.name if device else "",
            "driver": device.driver_version if device else "",
            "software": software(),
            "command": f"cutegen {shlex.join(command)}",
            "seconds": round(seconds, 1),
            "exit_code": done.returncode,
            "output": output,
        },
    )
    print(output, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

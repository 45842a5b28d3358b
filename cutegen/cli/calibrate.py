"""``python -m cutegen.calibrate``: measure the GPU at hand and fit the performance model to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cutegen.build.store import Store
from cutegen.cli.args import (
    Parser,
    add_busy_argument,
    add_cache_argument,
    add_json_argument,
    add_quiet_argument,
    add_workers_argument,
    file_path,
    positive_float,
    positive_int,
)
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.cli.progress_display import make_display
from cutegen.cli.wrapped_text import say, say_json
from cutegen.errors import UsageError
from cutegen.families.gemm.perf_model.fitting import Refit
from cutegen.measure.device import Device, present_device
from cutegen.records.calibrations import require_calibration
from cutegen.records.paths import calibration_path
from cutegen.records.trials import TrialStore
from cutegen.system.publish import publish, require_place
from cutegen.tuning.backends import Backends
from cutegen.tuning.calibration import FEWEST, Calibrated, CalibrationRun
from cutegen.tuning.session import Session
from cutegen.tuning.setting import Setting

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m cutegen.calibrate                           # 240 problems, some minutes
  python -m cutegen.calibrate --budget 60               # start no problem after a minute, then fit
  python -m cutegen.calibrate --out h100.json           # write a file, do not use it yet
  python -m cutegen.calibrate --use h100.json           # use a file that was made on such a GPU

The result is calibrations/<gpu name>.json in the cache folder. Untuned GEMMs and predictions on this GPU then
use it (on Hopper those in 16 bits). Delete the file to go back to the package's model.

exit codes:
  0    the calibration is in use, or written
  2    bad usage
  3    the environment: no GPU, another GPU or driver, too few measurements, an unusable file or cache
  130  interrupted; everything measured is stored and the same command continues
"""


def main(
    argv: Sequence[str] | None = None, *, device: Device | None = None, backends: Backends | None = None
) -> int:
    """Run the command and return its exit code; tests give a GPU and what to use instead of it."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args, device, backends))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.calibrate",
        description="Fit the performance model of GEMMs to the local GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--problems", type=positive_int, default=240, metavar="N", help="problems to measure (default 240)"
    )
    parser.add_argument(
        "--kernels", type=positive_int, default=14, metavar="N", help="kernels to time on each (default 14)"
    )
    parser.add_argument(
        "--budget", type=positive_float, metavar="SECONDS", help="start no problem later (default: no limit)"
    )
    parser.add_argument(
        "--out", type=file_path, metavar="FILE", help="write the calibration here, not into the cache folder"
    )
    parser.add_argument(
        "--use",
        type=file_path,
        metavar="FILE",
        help="measure nothing; check this file and copy it into the cache folder",
    )
    parser.add_argument("--again", action="store_true", help="measure again what is already stored")
    add_workers_argument(parser)
    add_busy_argument(parser)
    add_cache_argument(parser, "kernels, trials, calibration")
    add_json_argument(parser)
    add_quiet_argument(parser)
    return parser


def _run(args: argparse.Namespace, device: Device | None, backends: Backends | None) -> int:
    if args.use is not None and args.out is not None:
        raise UsageError("--use measures nothing, so there is nothing to write to --out; give one of them")
    if args.problems < FEWEST:
        raise UsageError(f"--problems {args.problems} are too few for a fit; valid: {FEWEST} and more")
    if args.kernels < 2:
        raise UsageError("--kernels 1 leaves nothing to choose; valid: 2 and more")
    if args.out is not None:
        require_place(args.out, "calibration")
    device = device or present_device()
    store = Store.at(args.cache_dir)
    if args.use is not None:
        return _use(args.use, calibration_path(store.root, device), device, as_json=args.json)
    setting = Setting.of(
        device.arch,
        device,
        cache_dir=args.cache_dir,
        workers=args.workers,
        busy=args.busy,
        backends=backends,
    )
    found = _measure(args, setting)
    path = args.out or calibration_path(store.root, device)
    found.write(path)
    _report(found, path, as_json=args.json)
    return EXIT_OK


def _use(path: Path, into: Path, device: Device, *, as_json: bool) -> int:
    """Put a file that holds here into the cache folder."""
    require_calibration(path, device)
    publish(into, path.read_bytes(), "calibration")
    if as_json:
        say_json({"path": str(into), "gpu": device.name})
    else:
        say(f"{path} is used on {device.name} from now on: {into}")
    return EXIT_OK


def _measure(args: argparse.Namespace, setting: Setting) -> Calibrated:
    with (
        TrialStore(setting.db) as trials,
        setting.children() as children,
        make_display(args.quiet) as display,
    ):
        display.begin("calibrate", 1, 1)
        session = Session(setting, children, trials, display.show, args.again)
        run = CalibrationRun(session, problems=args.problems, kernels=args.kernels)
        found = run.run(args.budget)
        display.hide()
    return found


def _report(found: Calibrated, path: Path, *, as_json: bool) -> None:
    judged = found.fit.judged
    if as_json:
        say_json(
            {
                "path": str(path),
                "gpu": found.device.name,
                "problems": found.problems,
                "points": found.points,
                "scales": dict(found.fit.scales),
                "regret": judged,
                "seconds": round(found.seconds, 3),
            }
        )
        return
    taken, fitted = judged[judged["taken"]], isinstance(found.fit, Refit)
    scales = ", ".join(f"{name} {value:.2f}" for name, value in found.fit.scales.items())
    say(
        f"{found.device.name}: {found.points} timings of {found.problems} problems in {found.seconds:.1f} s; "
        f"beside {'an H200' if fitted else 'what was assumed'}: {scales}"
    )
    say(
        f"the choice among kernels, {'on matrices left out of the fit, ' if fitted else ''}is "
        f"{100 * taken['first']:.1f} % behind the best timed, in the geometric mean; without this "
        f"calibration {100 * judged['shipped']['first']:.1f} %"
    )
    say(f"written: {path}")

"""``python -m cutegen.tune``: what a tuning run is asked, its progress and its output."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from cutegen import __version__
from cutegen.arch import Arch, find_arch
from cutegen.build.store import Store
from cutegen.cli.args import load_given_families, named_shapes, parse_set, refuse_options
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.cli.progress_display import Display, make_display
from cutegen.cli.report import AnyResult, document, result_lines, summary_lines
from cutegen.cli.space import refuse
from cutegen.cli.tune_arguments import make_parser as _parser  # called as in every command
from cutegen.cli.tune_recorded import Recording
from cutegen.cli.wrapped_text import line_width, say, say_json
from cutegen.digest import Json
from cutegen.errors import StoreError, UsageError
from cutegen.families.registry import families, find_space
from cutegen.families.shapes import NamedProblem, NamedRange, Shape
from cutegen.measure.device import Device, or_else, present_device
from cutegen.records.recorded_calls import files_of
from cutegen.runtime.dispatch import autotune_disabled
from cutegen.space import Space, Value
from cutegen.system.publish import require_place
from cutegen.tuning import AutoTuner, Failed, RangeRequest, Request, TuneResult
from cutegen.tuning.transfer import Imported, export_candidates, import_candidates

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if autotune_disabled():
        raise UsageError("CUTEGEN_DISABLE_AUTOTUNE is set, so nothing is tuned; unset it to tune")
    load_given_families(args, needed=False)
    _require_family(args)
    _require_table(args)
    _require_bundles(args)
    shapes = _asked(args)  # what is wrong with them is said before a GPU is missed
    device = None if args.arch else _device()
    imported = _import(args, device)
    recording = None if args.recorded is None else Recording.read(args, device)
    if recording is not None:
        shapes = recording.shapes(args)
    elif imported is not None and not shapes:
        shapes = _held(args, imported)
    _require_measured(args, shapes)
    display = make_display(args.quiet)
    with _tuner(args, device, imported, display) as tuner:
        if recording is not None and not args.json:
            say("\n".join(recording.begin_lines(tuner.setting, _width(args))), flush=True)
        requests = [_request(tuner, item, args, imported, alone=len(shapes) == 1) for item in shapes]
        results = _collect(tuner, shapes, requests, args, display)
        return _finish(tuner, results, args, recording)


def _require_family(args: argparse.Namespace) -> None:
    """Refuse a command that names no family and no file that does, or shapes although it has a recording."""
    told = args.recorded is not None or (args.bundle is not None and not args.shape and args.shapes is None)
    if args.family is None and not told:
        raise UsageError(
            f"no FAMILY given; known: {', '.join(families())}; or --kernel FILE.py, --recorded FILE, or "
            "--import FILE without shapes"
        )
    if args.recorded is not None and (args.shape or args.shapes or args.bundle):
        raise UsageError("--recorded says what to tune; leave out --shape, --shapes and --import")


def _require_bundles(args: argparse.Namespace) -> None:
    """Refuse a bundle that is not there, and a place where none can be written when all is tuned."""
    if args.bundle is not None and not args.bundle.is_file():
        what = "is no file" if args.bundle.exists() else "does not exist"
        what = "is a folder" if args.bundle.is_dir() else what
        raise StoreError(f"bundle {args.bundle} {what}; --export of another run writes one")
    if args.export is not None:
        require_place(args.export, "bundle")


def _asked(args: argparse.Namespace) -> tuple[Shape, ...]:
    """Return the shapes that the arguments name; none where a recording or a bundle says what is tuned."""
    for path in args.recorded or ():
        files_of(path)
    files = args.recorded or ([args.bundle] if args.bundle and not args.shape and args.shapes is None else [])
    if not files:
        return named_shapes(args)
    refuse_options(args, *files)
    return ()


def _require_table(args: argparse.Namespace) -> None:
    """Refuse what is said of the table where none is written."""
    if args.arch and args.fallback:
        raise UsageError(
            f"--fallback {args.fallback} is a field of the table, and with --arch none is written; leave out "
            "one of them"
        )
    if args.arch and args.table:
        raise UsageError(
            f"--table {args.table} would stay unwritten: with --arch nothing is measured, so there is no "
            "winner; leave out one of them"
        )


def _require_measured(args: argparse.Namespace, shapes: Sequence[Shape]) -> None:
    """Refuse ranges where they could not be measured from the start."""
    ranges = [shape.name for shape in shapes if isinstance(shape, NamedRange)]
    options = {"--arch": args.arch, "--import": args.bundle, "--export": args.export}
    given = [option for option, value in options.items() if value is not None]
    if ranges and given:
        raise UsageError(
            f"{given[0]} does not go with the range {ranges[0]}, which is tuned by measuring here; leave it "
            "out, or give single sizes"
        )


def _device() -> Device:
    with or_else("to compile and predict without a GPU give --arch, such as sm_90a"):
        return present_device()


def _import(args: argparse.Namespace, device: Device | None) -> Imported | None:
    if args.bundle is None:
        return None
    target = device.arch if device else find_arch(args.arch)

    def require(arch: Arch) -> None:
        if arch != target:
            raise UsageError(f"bundle {args.bundle} is for {arch}, not for {target}")

    store = Store.at(args.cache_dir)
    return import_candidates(args.bundle, store, require)


def _held(args: argparse.Namespace, imported: Imported) -> tuple[NamedProblem, ...]:
    """Return the problems of a bundle, those of one family if that is named."""
    found = tuple(NamedProblem(str(p), p) for p in imported.candidates if args.family in (None, p.family))
    if not found:
        held = ", ".join(sorted({problem.family for problem in imported.candidates}))
        raise UsageError(
            f"bundle {args.bundle} has no candidates of {args.family}; it has some of {held}: name one of "
            "these, or leave FAMILY out for all"
        )
    return found


def _tuner(
    args: argparse.Namespace, device: Device | None, imported: Imported | None, display: Display
) -> AutoTuner:
    return AutoTuner(
        args.arch,
        device=device,
        cache_dir=args.cache_dir,
        db=args.db,
        table=args.table,
        effort=args.effort,
        workers=args.workers,
        seed=args.seed,
        allow_torch=args.allow_torch,
        again=args.again,
        objective=args.objective,
        context=args.context,
        sources=args.sources,
        busy=args.busy,
        fallback=args.fallback,
        observe=display.show,
        toolchain=imported.toolchain if imported else None,
    )


def _request(
    tuner: AutoTuner,
    item: Shape,
    args: argparse.Namespace,
    imported: Imported | None,
    *,
    alone: bool,
) -> Request | RangeRequest:
    if isinstance(item, NamedRange):
        low = item.range.low
        fixed = parse_set(args.set, find_space(low.family, tuner.setting.arch), low)
        return tuner.range_request(item.range, args.candidates, fixed, args.budget)
    space = find_space(item.problem.family, tuner.setting.arch)
    fixed = parse_set(args.set, space, item.problem)
    if imported is None:
        if fixed or alone:
            _require_legal(space, item, fixed)
        # One of several that the target cannot compute has no winner; the others may.
        return tuner.request(item.problem, args.candidates, fixed, args.budget)
    if item.problem not in imported.candidates:
        known = "; ".join(map(str, imported.candidates))
        raise UsageError(f"bundle {args.bundle} has no candidates for {item.problem}; it has {known}")
    wanted = imported.candidates[item.problem]
    if fixed:
        wanted = tuple(c for c in wanted if all(c.get(knob) in values for knob, values in fixed.items()))
        if not wanted:
            words = " ".join(args.set)
            raise UsageError(f"bundle {args.bundle} has no candidate for {item.problem} with {words}")
    return replace(tuner.request(item.problem, wanted, fixed, args.budget), vary=True)


def _require_legal(space: Space, item: NamedProblem, fixed: Mapping[str, tuple[Value, ...]]) -> None:
    """Refuse what leaves no config, naming the rules, before anything is compiled."""
    if next(space.configs(item.problem, fixed), None) is None:
        refuse(space, item.problem, fixed)


def _collect(
    tuner: AutoTuner,
    shapes: Sequence[Shape],
    requests: Sequence[Request | RangeRequest],
    args: argparse.Namespace,
    display: Display,
) -> dict[str, AnyResult]:
    results: dict[str, AnyResult] = {}
    stream = tuner.run(requests, args.budget)
    try:
        with display:
            for at, item in enumerate(shapes, 1):
                display.begin(item.name, at, len(shapes))
                result = next(stream)
                display.hide()
                results[_unused(item, results)] = result
                if not args.json:
                    say("\n".join(result_lines(item.name, result, _width(args))), flush=True)
    except KeyboardInterrupt:
        if args.json and results:
            _print_json(tuner, results, interrupted=True)
        raise
    return results


def _width(args: argparse.Namespace) -> int | None:
    return None if args.wide else line_width()


def _unused(item: Shape, results: Mapping[str, object]) -> str:
    what = item.range if isinstance(item, NamedRange) else item.problem
    return item.name if item.name not in results else f"{item.name} ({what})"


def _finish(
    tuner: AutoTuner,
    results: Mapping[str, AnyResult],
    args: argparse.Namespace,
    recording: Recording | None,
) -> int:
    if args.json:
        _print_json(tuner, results, {} if recording is None else recording.to_json(tuner.setting))
    else:
        for line in summary_lines(results, _width(args)):
            say(line)
        if recording is not None:
            say("\n".join(recording.end_lines(tuner.setting)))
    _print_places(tuner, args, [r for r in results.values() if isinstance(r, TuneResult)])
    return EXIT_NO_WINNER if any(isinstance(r, Failed) for r in results.values()) else EXIT_OK


def _print_places(tuner: AutoTuner, args: argparse.Namespace, found: Sequence[TuneResult]) -> None:
    """Say where everything is and what the next command would be."""
    setting, lines = tuner.setting, []
    if found and not args.json:
        lines.append("columns: --legend; knobs: docs/knobs.md; all columns: --wide")
    if args.export is not None:
        count = export_candidates(args.export, setting, found)
        lines.append(f"exported {count} compiled kernels to {args.export}")
        lines.append(
            f"  next, on a machine with such a GPU: {_again(args)} --import {shlex.quote(args.export.name)}"
        )
    lines.append(f"trials in {setting.db}")
    if setting.table:
        lines.append(f"winners in {setting.table}")
        lines.append(
            f"  to deploy: python -m cutegen.pin{_folders(args)} --table {shlex.quote(str(setting.table))} "
            "--out deploy/"
        )
    elif args.table is None and setting.device is None:
        lines.append("no table is written: nothing was measured")
    say("\n".join(lines), error=True)


def _again(args: argparse.Namespace) -> str:
    alone = args.kernel is not None and len(args.kernel) == 1
    family = "" if alone or args.family is None else f" {args.family}"
    return f"python -m cutegen.tune{family}{_folders(args)}"


def _folders(args: argparse.Namespace) -> str:
    """Return the arguments that say which kernels there are beside those of the package."""
    given = [("--families", args.families), *(("--kernel", path) for path in args.kernel or ())]
    return "".join(f" {option} {shlex.quote(str(path))}" for option, path in given if path is not None)


def _print_json(
    tuner: AutoTuner,
    results: Mapping[str, AnyResult],
    more: Mapping[str, Json] = MappingProxyType({}),
    *,
    interrupted: bool = False,
) -> None:
    setting = tuner.setting
    about: dict[str, Json] = {
        "cutegen": __version__,
        "arch": setting.arch.name,
        "device": setting.device.to_json() if setting.device else None,
        "toolchain": setting.toolchain.to_json(),
        "table": str(setting.table) if setting.table else None,
        "db": str(setting.db),
        "interrupted": interrupted,
        **more,
    }
    say_json(document(results, about))

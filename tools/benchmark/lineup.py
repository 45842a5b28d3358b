"""Who takes part in a contest and under which conditions, from the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cutegen.build.parallelism import default_workers
from cutegen.build.store import Store, file_digest
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.families.shapes import read_shapes
from cutegen.family import Problem
from cutegen.measure.context import CONTEXTS, require_context
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from cutegen.records.entry import Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from tools.benchmark import environment
from tools.benchmark.bandwidth import Copy
from tools.benchmark.contest import Contestant
from tools.benchmark.environment import software
from tools.benchmark.max_autotune import MaxAutotune, inductor_environment
from tools.benchmark.operators import Operators
from tools.benchmark.ours import Ours, read_tuning_seconds
from tools.benchmark.quack import Quack, quack_environment
from tools.benchmark.results import COPY, Entry, Results
from tools.benchmark.vendor import Vendor

__all__ = ["PEERS", "conditions", "final_policies", "make_contestants", "set_environment", "taking_part"]

#: Who may be compared with cutegen.
PEERS = ("quack", "operators", Vendor.name, MaxAutotune.name, COPY)


def final_policies(args: argparse.Namespace) -> list[Policy]:
    """Return how the common rounds are timed, in each launch context that was asked for.

    In the first of them bursts follow.

    Raises:
        UsageError: There is no such context, or none was asked for.
    """
    names = list(dict.fromkeys(name for name in args.context.split(",") if name))
    if not names:
        raise UsageError(f"--context names none; valid: {', '.join(CONTEXTS)}")
    rounds = max(args.rounds, args.min_rounds)
    common = Policy(rounds=rounds, min_rounds=args.min_rounds, settle_s=args.settle, seed=args.seed)
    bursts = Policy.final().burst_rounds
    return [
        replace(common, context=require_context(name), burst_rounds=0 if at else bursts)
        for at, name in enumerate(names)
    ]


def make_contestants(args: argparse.Namespace, device: Device, *, measured: bool = True) -> list[Contestant]:
    """Return cutegen and the peers that were asked for.

    Args:
        args: The command line.
        device: The GPU.
        measured: Whether it is there; without, nothing is compiled and the table may be for another.

    Raises:
        UsageError: There is no such peer, or a file is malformed.
        TableError: The table is for another GPU or toolchain.
    """
    wanted = [name for name in args.peers.split(",") if name and name != "none"]
    unknown = sorted(set(wanted) - set(PEERS))
    if unknown:
        raise UsageError(f"unknown peer {', '.join(unknown)}; known: {', '.join(PEERS)}")
    store = _store(args)
    table = _table_path(args, store, device, measured)
    dispatcher = Dispatcher(
        None if table is None else Table.load(table),
        kernels=Kernels(store, build="allow" if measured else "never"),
        device=lambda index: device,
        fallback="none",
    )
    tuning_s = read_tuning_seconds(args.tuned) if args.tuned else {}
    found: list[Contestant] = [Ours(dispatcher, table=table, device=args.device, tuning_s=tuning_s)]
    workers = args.workers or default_workers()
    source = args.reuse.name if args.reuse else ""
    if "quack" in wanted:
        split_k = 0 if args.quack_split_k == "tune" else 1
        known = _reused(args, "quack")
        found.append(
            Quack(split_k=split_k, timed_calls=args.quack_timed_calls, known=known, known_from=source)
        )
    if "operators" in wanted:
        known = _reused(args, "operators")
        own = Store(_peers(store) / "operators")
        peer = Operators(own, device.arch, device.sm_count, workers=workers, known=known, known_from=source)
        found.append(peer)
    if Vendor.name in wanted:
        found.append(Vendor(final_policies(args)[0].context))
    if MaxAutotune.name in wanted:
        found.append(MaxAutotune())
    if COPY in wanted:
        found.append(Copy())
    return found


def taking_part(contestants: Sequence[Contestant], problem: Problem) -> list[Contestant]:
    """Return those that run in the contest on a problem; copies do in those that memory bounds."""
    return [c for c in contestants if not isinstance(c, Copy) or c.concerns(problem)]


def _table_path(args: argparse.Namespace, store: Store, device: Device, measured: bool) -> Path | None:
    """Return the table to use, None if there is none.

    Raises:
        UsageError: The one that was asked for does not exist.
        TableError: It is for another GPU or toolchain.
    """
    path: Path = args.table or default_table_path(store.root, device)
    if not path.exists():
        if args.table:
            raise UsageError(f"dispatch table {path} does not exist; write it with cutegen.tune --table")
        print(f"no dispatch table at {path}: the default configs are measured", file=sys.stderr)
        return None
    if measured:
        Table.load(path).require(Fingerprint.of(device))
    return path


def _reused(args: argparse.Namespace, peer: str) -> dict[Problem, Entry]:
    """Return the entries of ``peer`` in --reuse that are worth running again.

    Raises:
        UsageError: They are of another version of the peer.
    """
    if args.reuse is None:
        return {}
    earlier = Results.load(args.reuse)
    there, here = _versions(earlier.conditions["software"])[peer], _versions(software())[peer]
    if there != here:
        raise UsageError(
            f"{args.reuse} holds choices of {peer} {there}, but {here} is installed; tune it again"
        )
    rows = ((shape.problem, shape.entries.get(peer)) for shape in earlier.shapes)
    return {problem: entry for problem, entry in rows if entry is not None and entry.ok}


def _versions(of: Any) -> dict[str, str]:
    """Return the version of each peer."""
    packages = {"quack": "quack-kernels", "operators": "nvidia-cutlass-operators"}
    return {peer: of["packages"].get(package, "none") for peer, package in packages.items()}


def conditions(
    args: argparse.Namespace, device: Device, contestants: Sequence[Contestant]
) -> dict[str, Json]:
    """Return what must agree for two rows to belong in one table."""
    own = next(c for c in contestants if isinstance(c, Ours))
    tuned = (Quack, Operators, Vendor, MaxAutotune)
    peers = {c.name: c.settings for c in contestants if isinstance(c, tuned)}
    return environment.conditions(
        device,
        final_policies(args)[0],
        contexts=[policy.context for policy in final_policies(args)],
        peers=peers,
        reuse=args.reuse.name if args.reuse else "",
        table="" if own.table is None else file_digest(own.table),
        shapes={
            "file": args.shapes.name,
            "sha256": file_digest(args.shapes),
            "names": [shape.name for shape in read_shapes(args.shapes)],
        },
    )


def set_environment(args: argparse.Namespace) -> None:
    """Set what the measuring child reads: QuACK's variables, Inductor's and cutegen's cache folder."""
    store = _store(args)
    workers = args.workers or default_workers()
    os.environ.update(quack_environment(_peers(store) / "quack", workers))
    os.environ.update(inductor_environment(_peers(store) / "inductor"))
    os.environ["CUTEGEN_CACHE_DIR"] = str(store.root)


def _store(args: argparse.Namespace) -> Store:
    return Store.at(args.cache_dir)


def _peers(store: Store) -> Path:
    """Return the folder of what peers compile."""
    return store.root / "peers"

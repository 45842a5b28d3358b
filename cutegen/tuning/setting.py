"""Where a tuning run works and with what: target, GPU, cache, database, table, compiler, measuring child."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutegen.arch import Arch
from cutegen.build import Builder, Toolchain
from cutegen.build.parallelism import require_workers
from cutegen.build.store import Store
from cutegen.errors import TableError
from cutegen.family import Problem
from cutegen.measure.contention import Guard, require_busy
from cutegen.measure.device import Device, index_of
from cutegen.measure.watch import NvmlWatch
from cutegen.operator_api import Offers, find_offers
from cutegen.records.calibrations import calibrated_arch
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.range_entry import RangeEntry
from cutegen.records.table import Table, require_fallback
from cutegen.system.publish import require_file_name
from cutegen.tuning.backends import Backends, Bench, Children

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """Everything of a run that is not about one problem.

    Attributes:
        arch: The target.
        device: The GPU to measure on; None only compiles and predicts.
        store: Where artifacts are.
        db: The trial database.
        table: The dispatch table that winners are written to.
        own_table: Whether ``table`` is the cache's own. After a change of GPU or software it is set aside and
            begun anew; a table that the user named is refused then.
        fallback: Where PyTorch answers, to be written into the table; None leaves what the table says.
        toolchain: What compiled, or compiles, the candidates.
        workers: Most compilations at a time; None leaves it to the builder.
        busy: What to do while others use the GPU: one of :data:`cutegen.measure.BUSY_MODES`.
        backends: What to use instead of the usual builder, measuring child and so on.
    """

    arch: Arch
    device: Device | None
    store: Store
    db: Path
    table: Path | None
    own_table: bool
    fallback: str | None
    toolchain: Toolchain
    workers: int | None
    busy: str
    backends: Backends

    @classmethod
    def of(
        cls,
        arch: Arch,
        device: Device | None,
        *,
        cache_dir: Path | None = None,
        db: Path | None = None,
        table: Path | None = None,
        workers: int | None = None,
        toolchain: Toolchain | None = None,
        busy: str = "wait",
        fallback: str | None = None,
        backends: Backends | None = None,
    ) -> Setting:
        """Return the setting with the usual places for what is not given.

        Args:
            arch: The target.
            device: The GPU, None for none.
            cache_dir: Folder of artifacts, database and table; the user's cache folder by default.
            db: The trial database.
            table: The dispatch table.
            workers: Most compilations at a time.
            toolchain: Whose artifacts to use; the installed one by default.
            busy: What to do while others use the GPU: one of :data:`cutegen.measure.BUSY_MODES`.
            fallback: Where PyTorch answers, to be written into the table; None leaves what the table says.
            backends: What to use instead of the usual.

        Raises:
            UsageError: ``busy`` or ``fallback`` is unknown, or ``workers`` is less than 1.
            StoreError: No file can have one of these names.
        """
        require_busy(busy)
        require_workers(workers)
        for path in (db, table):
            if path is not None:
                require_file_name(path)
        store = Store.at(cache_dir)
        usual = default_table_path(store.root, device) if device else None
        return cls(
            arch=calibrated_arch(store.root, device) if device else arch,
            device=device,
            store=store,
            db=db or store.root / "trials.db",
            table=(table or usual) if device else None,
            own_table=table is None,
            fallback=None if fallback is None else require_fallback(fallback),
            toolchain=toolchain or Toolchain.current(),
            workers=workers,
            busy=busy,
            backends=backends or Backends(),
        )

    @property
    def sm_count(self) -> int:
        """SMs to plan for."""
        return self.device.sm_count if self.device else self.arch.nominal_sm_count

    def children(self) -> Children:
        """Return the children of a run; nothing is started yet."""
        given, device = self.backends, self.device
        compiler = given.compiler or (lambda: Builder(self.store, self.toolchain, self.workers))
        if device is None:
            return Children(compiler)
        watch = given.watch or (lambda: NvmlWatch(device.uuid))
        return Children(compiler, given.bench or (lambda: _bench(device)), lambda: Guard(watch(), self.busy))

    def offers(self, problem: Problem) -> Offers:
        """Return which kernels of NVIDIA's Operator API are candidates for ``problem``, and which are not."""
        return (self.backends.offers or (lambda p: find_offers(p, self.arch, self.store)))(problem)

    def load_table(self) -> Table | None:
        """Return the table if there is one for this GPU and software.

        The cache's own table is set aside under a dated name if it is malformed, or was made for another GPU
        or by other software; one that the user named is refused.

        Raises:
            TableError: The named table is malformed, or for another GPU or other software.
            StoreError: It cannot be read, or the cache's own cannot be set aside.
        """
        if self.device is None or self.table is None:
            return None
        fingerprint = Fingerprint.of(self.device)
        if self.own_table:
            return Table.claim(self.table, fingerprint)
        table = Table.find(self.table)
        reasons = () if table is None else table.mismatch(fingerprint)
        if reasons:
            raise TableError(
                f"dispatch table {self.table} holds elsewhere: {'; '.join(reasons)}; "
                "name another file, or put '*' into that field of its _metadata"
            )
        return table

    def save(
        self,
        *,
        entries: Sequence[Entry] = (),
        ranges: Sequence[RangeEntry] = (),
        fallback: str | None = None,
    ) -> None:
        """Write winners, and where PyTorch answers, into the table.

        The cache's own is set aside as by :meth:`load_table`: GPU or software may have changed since then.

        Raises:
            TableError: The named table is malformed, or for another GPU or other software.
            StoreError: It cannot be written.
        """
        if self.device is not None and self.table is not None:
            fingerprint = Fingerprint.of(self.device)
            Table.update(self.table, fingerprint, entries, ranges, fallback=fallback, anew=self.own_table)

    def save_fallback(self) -> None:
        """Write ``fallback`` into the table, if it was given; raises as :meth:`save`."""
        if self.fallback is not None:
            self.save(fallback=self.fallback)

    def entry(self, problem: Problem) -> Entry | None:
        """Return what the table says about exactly ``problem``; raises as :meth:`load_table`."""
        table = self.load_table()
        return None if table is None else table.entries.get(problem)


def _bench(device: Device) -> Bench:
    from cutegen.measure import Bench as MeasuringChild

    return MeasuringChild(device=index_of(device))

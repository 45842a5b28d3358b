"""Answers of the Operator API's manifest: asked once per package and kind of GEMM, kept in the store."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cutegen.arch import Arch
from cutegen.build import Toolchain
from cutegen.build.store import Store, StoredEntry
from cutegen.digest import Json, digest
from cutegen.errors import BuildError
from cutegen.families.gemm.operator_package import PACKAGE, require_package
from cutegen.families.gemm.problem import LAYOUTS, Problem
from cutegen.operator_api.manifest_child import Kind
from cutegen.system.interpreter import python_command, python_environment
from cutegen.system.temporary import TemporaryFolder

__all__ = ["Design", "Listing", "Refused", "ask_api", "find_listing", "kind_of", "listing_key"]

#: Seconds that the API gets to import torch and answer; it takes 5 on an idle core.
LIMIT_S = 180.0
#: Increased when the form or meaning of a stored answer changes.
_SCHEMA = 1

#: The design of an operator, by the API's names: ``operator`` (its class), ``tile_shape`` and so on.
Design = Mapping[str, Any]


@dataclass(frozen=True)
class Refused:
    """Operators that are no candidates, for one reason.

    Attributes:
        operator: The class of them.
        count: How many; 0 for all, without having asked the API.
        reason: Why not: the API's message, or the rule of the space.
    """

    operator: str
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} x {self.operator}: {self.reason}" if self.count else f"all: {self.reason}"


@dataclass(frozen=True)
class Listing:
    """The API's operators for one kind of GEMM on one target.

    Attributes:
        designs: The design of each operator that it offers, in its order.
        refused: The operators that its ``supports`` rejected, and why.
    """

    designs: tuple[Design, ...]
    refused: tuple[Refused, ...]

    @classmethod
    def from_json(cls, data: Any) -> Listing:
        """Return the listing that the child printed.

        Raises:
            BuildError: The data is not of that form.
        """
        try:
            counts = Counter(
                (str(item["operator"]), " ".join(str(item["reason"]).split())) for item in data["refused"]
            )
            designs = tuple({**design, "operator": str(design["operator"])} for design in data["designs"])
        except (KeyError, TypeError) as error:
            raise BuildError(f"no list of operators: {error!r}") from error
        refused = tuple(Refused(name, count, reason) for (name, reason), count in counts.items())
        return cls(designs, refused)


def kind_of(problem: Problem) -> Kind:
    """Return the properties of ``problem`` that the API selects by: dtypes, layouts and rank of a tensor."""
    a_axis, b_axis = LAYOUTS[problem.layout]
    return problem.ab_dtype, problem.out_dtype, a_axis, b_axis, 3 if problem.batch > 1 else 2


def listing_key(kind: Kind, arch: Arch) -> str:
    """Return the 32 hexadecimal digits under which the store keeps the answer for ``kind``.

    Raises:
        ResourceError: The package is not installed.
    """
    packages: dict[str, Json] = {"": require_package(), **dict(Toolchain.current().packages)}
    return digest({"listing": _SCHEMA, "kind": [*kind], "arch": arch.name, "packages": packages})


Ask = Callable[[Kind, Arch], Mapping[str, Any]]


def find_listing(problem: Problem, arch: Arch, store: Store, *, ask: Ask | None = None) -> Listing:
    """Return what the API has for GEMMs like ``problem``; asking it takes seconds, and is done once.

    Args:
        problem: What is to be computed.
        arch: The target.
        store: Where answers are kept, under a key of the installed versions.
        ask: Replaces :func:`ask_api`, for tests.

    Raises:
        BuildError: The API cannot answer; the message holds its last words.
        ResourceError: The package is not installed.
        StoreError: The store cannot be read or written.
    """
    kind = kind_of(problem)
    key = listing_key(kind, arch)
    known = _kept(store.find(arch.name, key))
    if known is None:
        with store.lock(arch.name, key) as lock:
            known = _kept(store.read(arch.name, key))
            if known is None:
                answer: Any = (ask or ask_api)(kind, arch)
                known = Listing.from_json(answer)
                store.stage(lock)
                store.publish(lock, {"listing": answer, "about": [*kind, require_package()]})
    return known


def _kept(entry: StoredEntry | None) -> Listing | None:
    """Return the listing of an entry; None if there is none or it is malformed, so that the API is asked."""
    try:
        return None if entry is None else Listing.from_json(entry.meta.get("listing"))
    except BuildError:
        return None


def ask_api(kind: Kind, arch: Arch) -> Mapping[str, Any]:
    """Return what the API lists for ``kind``, asked in a process that sees no GPU; takes seconds.

    Raises:
        BuildError: It cannot answer, or takes too long; the message holds its last words.
        ResourceError: This Python does not know its own executable.
        StoreError: There is no temporary folder.
    """
    target = arch.name.removeprefix("sm_")
    command = python_command("cutegen.operator_api.manifest_child", [target, json.dumps(kind)])
    environment = {**python_environment(), "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_ARCH": arch.name}
    try:
        # The DSL looks for files under predictable names, so it gets a private folder.
        with TemporaryFolder() as scratch:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
                cwd=scratch.path,
                env={**environment, "TMPDIR": str(scratch.path)},
            )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{PACKAGE} did not list its operators within {LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise BuildError(f"{PACKAGE} cannot list its operators: {last}", log=done.stderr)
    lines = done.stdout.splitlines() or [""]
    try:
        answer: dict[str, Json] = json.loads(lines[-1])  # what libraries print stands above it
    except ValueError:
        raise BuildError(f"{PACKAGE} did not list its operators but said: {lines[-1]!r}") from None
    return answer

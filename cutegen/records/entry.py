"""The parts of a dispatch table: entries, each a winner with its evidence, and the fingerprint of the GPU."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from cutegen import __version__
from cutegen.arch import Arch
from cutegen.build import Toolchain, is_artifact_key
from cutegen.digest import Json
from cutegen.errors import TableError
from cutegen.families.registry import SOURCES
from cutegen.family import Problem
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS
from cutegen.measure.device import Device
from cutegen.measure.policy import OBJECTIVES
from cutegen.space import Config
from cutegen.text import shown

__all__ = ["ANY", "Entry", "Fingerprint", "read_config", "require_number", "require_text"]

#: A fingerprint field of this value matches everything.
ANY = "*"
#: Most SMs that a table may name. Source: judgement; the largest GPUs have fewer than 200.
SM_LIMIT = 65_535


@dataclass(frozen=True)
class Fingerprint:
    """The GPU and software that a table holds for; ``"*"`` in a table's field matches any value.

    Attributes:
        gpu_name: As NVML reports it, such as ``NVIDIA H200``.
        compute_capability: With the compile target's suffix, such as ``9.0a``.
        sm_count: SMs.
        cuda_driver: CUDA version that the driver supports, such as ``13.0``, without the patch level, since
            otherwise every security update would invalidate the table.
        cuda_runtime: CUDA version that the compiler is built on, such as ``13``. Kernels use no other.
        cutlass_dsl: Version of nvidia-cutlass-dsl.
        cutegen: Base version of cutegen, without local or development parts.
    """

    gpu_name: str
    compute_capability: str
    sm_count: int | str
    cuda_driver: str
    cuda_runtime: str
    cutlass_dsl: str
    cutegen: str

    @classmethod
    def of(cls, device: Device, toolchain: Toolchain | None = None) -> Fingerprint:
        """Return the fingerprint of ``device`` with ``toolchain``, by default what is installed here.

        Without an installed compiler, the compiler's fields match anything: kernels are then prebuilt, under
        keys that include their toolchain.
        """
        return replace(
            cls.of_target(device.arch, toolchain),
            gpu_name=device.name,
            sm_count=device.sm_count,
            cuda_driver=device.cuda_driver_version,
        )

    @classmethod
    def of_target(cls, arch: Arch, toolchain: Toolchain | None = None) -> Fingerprint:
        """Return as :meth:`of` what is known of ``arch`` without its GPU, whose own fields match anything."""
        toolchain = toolchain or Toolchain.current()
        major, minor = arch.compute_capability
        suffix = re.sub(r"^sm_\d+", "", arch.name)
        base = re.match(r"\d+(\.\d+)*", __version__)
        return cls(
            gpu_name=ANY,
            compute_capability=f"{major}.{minor}{suffix}",
            sm_count=ANY,
            cuda_driver=ANY,
            cuda_runtime=toolchain.flavour.removeprefix("cu") or ANY,
            cutlass_dsl=toolchain.compiler_version or ANY,
            cutegen=base.group() if base else __version__,
        )

    def mismatch(self, present: Fingerprint) -> tuple[str, ...]:
        """Return a sentence for every field in which ``present`` is not what this fingerprint asks for."""
        pairs = ((f.name, getattr(self, f.name), getattr(present, f.name)) for f in fields(self))
        return tuple(
            f"{name} is {there!r} in the table but {here!r} here"
            for name, there, here in pairs
            if ANY not in (there, here) and there != here
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Json) -> Fingerprint:
        """Return the fingerprint that :meth:`to_json` described; unknown fields are left for newer versions.

        Raises:
            TableError: A field is missing, of the wrong type or out of range.
        """
        if not isinstance(data, dict):
            raise TableError("_metadata must be an object")
        for f in fields(cls):
            if f.name not in data:
                raise TableError(f"_metadata lacks {f.name}; give its value, or {ANY!r} to accept any")
            value = data[f.name]
            right = isinstance(value, str) if f.name != "sm_count" else type(value) is int or value == ANY
            if not right:
                raise TableError(f"_metadata field {f.name} is {shown(value)}, which is of the wrong type")
            if isinstance(value, int) and not 1 <= value <= SM_LIMIT:
                raise TableError(f"_metadata field {f.name} is {value}; valid: 1 to {SM_LIMIT}, or {ANY!r}")
        return cls(**{f.name: data[f.name] for f in fields(cls)})


@dataclass(frozen=True)
class Entry:
    """The winner of one problem and the evidence for it.

    Attributes:
        problem: What was measured.
        config: The winning config. If ``source`` is ``torch``, the fastest config of a kernel, or None.
        source: Whose kernel won: ``cutegen``, ``operators`` (NVIDIA's Operator API), or ``torch`` when the
            baseline did and was allowed to.
        artifact_key: The compiled kernel that was measured: 32 hexadecimal digits, or empty if unknown.
        time_us: Median microseconds of the winner.
        interval: Its 95 % interval, in microseconds.
        ratio_to_baseline: Cost of the baseline over the winner's: paired times, or what the objective says;
            None if not measured.
        ratio_to_default: The default config's cost over the winner's; None if not measured.
        trial_ids: Ids of the trials that are the evidence.
        objective: What the winner was chosen by: ``time``, ``energy`` or ``edp``.
        context: What ran before each launch that was timed: one of
            :data:`~cutegen.measure.context.CONTEXTS`. Tables of early development versions
            do not say; it was ``back_to_back``.
        energy_mj: Millijoules per launch of the winner; None if not measured.
        baseline: What ``ratio_to_baseline`` compares with, such as ``torch.mm``; empty in tables of early
            development versions.
        contended_by: Other processes that used the GPU while it was measured, in words; empty if none was
            seen.

    Raises:
        TableError: The source, the objective or the context is unknown, the source is not that of the config,
            or the artifact key is malformed.
    """

    problem: Problem
    config: Config | None
    source: str = "cutegen"
    artifact_key: str = ""
    time_us: float | None = None
    interval: tuple[float, float] | None = None
    ratio_to_baseline: float | None = None
    ratio_to_default: float | None = None
    trial_ids: tuple[str, ...] = ()
    objective: str = "time"
    energy_mj: float | None = None
    baseline: str = ""
    contended_by: str = ""
    context: str = BACK_TO_BACK

    def __post_init__(self) -> None:
        if self.source not in (*SOURCES, "torch"):
            raise TableError(f"source is {shown(self.source)}; valid: {', '.join(SOURCES)}, torch")
        if self.objective not in OBJECTIVES:
            raise TableError(f"objective is {shown(self.objective)}; valid: {', '.join(OBJECTIVES)}")
        if self.context not in CONTEXTS:
            raise TableError(f"context is {shown(self.context)}; valid: {', '.join(CONTEXTS)}")
        if self.artifact_key and not is_artifact_key(self.artifact_key):
            key = shown(self.artifact_key)
            raise TableError(f"artifact_key is {key}; valid: 32 lowercase hexadecimal digits, or ''")
        if self.source != "torch" and self.config is None:
            raise TableError(f"an entry won by {self.source} must have a config")
        if self.source != "torch" and self.config is not None and self.config.source != self.source:
            raise TableError(f"an entry won by {self.source} has a config of {shown(self.config.source)}")

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data, without the problem."""
        data: dict[str, Json] = {f.name: getattr(self, f.name) for f in fields(self)[2:]}
        for name in ("baseline", "contended_by"):
            if not data[name]:
                del data[name]
        config = None if self.config is None else self.config.to_json()
        return {"config": config, **data}

    @classmethod
    def from_json(cls, problem: Problem, data: Json) -> Entry:
        """Return the entry of ``problem`` that :meth:`to_json` described.

        Raises:
            TableError: A field is unknown or of the wrong type.
        """
        if not isinstance(data, dict):
            raise TableError("an entry must be an object")
        known = {f.name for f in fields(cls)} - {"problem"}
        unknown = sorted(set(data) - known - {"ratio_to_torch"})
        if unknown:
            raise TableError(f"unknown field {shown(unknown[0])}; valid: {', '.join(sorted(known))}")
        values: dict[str, Any] = dict(data)
        if "ratio_to_torch" in values:  # the name in early development versions
            values.setdefault("ratio_to_baseline", values.pop("ratio_to_torch"))
        config = read_config(values.pop("config", None))
        for name in ("time_us", "ratio_to_baseline", "ratio_to_default", "energy_mj"):
            require_number(name, values.get(name))
        for name in ("source", "artifact_key", "objective", "context", "baseline", "contended_by"):
            require_text(name, values.get(name, ""))
        values["interval"] = _interval(values.get("interval"))
        values["trial_ids"] = _texts("trial_ids", values.get("trial_ids", []))
        return cls(problem, config, **values)


def read_config(data: Json) -> Config | None:
    """Return the config of an entry; None where it has none.

    Raises:
        TableError: It is no object.
        ConfigError: A value is of no type that a knob may hold.
    """
    if data is not None and not isinstance(data, dict):
        raise TableError("config must be an object of knobs")
    return None if data is None else Config.from_json(data)


def require_text(name: str, value: object) -> None:
    """Do nothing if ``value`` is a text.

    Raises:
        TableError: It is something else.
    """
    if not isinstance(value, str):
        raise TableError(f"{name} is {shown(value)}, not text")


def require_number(name: str, value: object, *, optional: bool = True) -> None:
    """Do nothing if ``value`` is a positive number, or None where that is allowed.

    Raises:
        TableError: It is something else.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise TableError(f"{name} is {shown(value)}, not a positive number")


def _interval(value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2):
        raise TableError(f"interval is {shown(value)}, not two numbers")
    for end in value:
        require_number("interval", end)
    return value[0], value[1]


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        raise TableError(f"{name} is {shown(value)}, not a list of texts")
    return tuple(value)

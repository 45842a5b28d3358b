"""Modules of users in a child that compiles: opened, watched, and what they asked for (GPU library: the DSL).

Their code runs in this process only. Questions about the hardware are answered from the target, and the
answers are recorded, since they are compiled in. A module or variable that the kernel's key does not cover
could change without a new key, so the child refuses to compile code that uses one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from cutegen.arch import ARCHES, Arch, resident_clusters
from cutegen.digest import Json
from cutegen.errors import BuildError
from cutegen.families.user.closure import TOOLCHAIN_PACKAGES, Opening, file_identity

__all__ = ["Refused", "UserCode"]

#: Parts of messages of CUDA's libraries and of torch that mean that there is no driver or no GPU.
_NO_DRIVER = (
    "libcuda",
    "CUDA_ERROR",
    "cudaError",
    "No CUDA GPUs",
    "NVIDIA driver",
    "no CUDA-capable device",
    "not compiled with CUDA",
    "Cannot re-initialize CUDA",  # by a torch with CUDA, where a module of it had counted GPUs before
)


class Refused(Exception):
    """The user's code, or the compiler's front end on it, did not accept what it was given.

    Attributes:
        outcome: ``rejected`` for a choice that is refused; ``error`` for what no choice would mend.
    """

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass
class UserCode:
    """The modules of one kernel, open in this process.

    Args:
        opening: Where they are, and what they should be.
        arch: The target's name.

    Attributes:
        facts: What was answered to questions about the hardware, by name.
    """

    opening: Opening
    arch: str
    facts: dict[str, Json] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    _before: frozenset[str] = frozenset()
    _ended: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any], arch: str) -> UserCode:
        """Return what ``dataclasses.asdict`` of an opening, through JSON, describes."""
        pairs = tuple((path, digest) for path, digest in data["files"])
        return cls(
            Opening(
                tuple(data["folders"]),
                bool(data["torch"]),
                pairs,
                tuple(data["packages"]),
                tuple(data["environment"]),
                int(data["sm_count"]),
            ),
            arch,
        )

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Open the modules and run the block, in which exceptions are refusals until :meth:`end`.

        Raises:
            Refused: The block raised.
        """
        self._begin()
        try:
            yield
        except Exception as error:  # tracing runs the user's code, which may raise anything
            if self._ended or isinstance(error, BuildError):
                raise
            raise self._refusal(error) from error
        except SystemExit as error:
            raise Refused(
                "error", f"{self._place(error)}ends the program: SystemExit({error.code!r})"
            ) from error

    def end(self) -> None:
        """Call when the user's code is done: check that it loaded and read only what the key covers.

        Raises:
            BuildError: A file changed meanwhile.
            Refused: A module was loaded, or a variable read, that is not part of the kernel's name.
        """
        self._ended = True
        self._require_known()

    def _begin(self) -> None:
        sys.path[:0] = self.opening.folders
        self._before = frozenset(sys.modules)
        self._watch_environment()
        self._answer_for_the_target()
        self._answer_for_the_hardware()

    def _answer_for_the_target(self) -> None:
        """Set the target in the DSL: constructors of users' kernels ask for it before compilation starts."""
        from cutlass.base_dsl import BaseDSL

        dsl: Any = BaseDSL._get_dsl()
        dsl.envar.arch = self.arch

    def _watch_environment(self) -> None:
        read, files = self._read, {path for path, _ in self.opening.files}

        class Watched(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, name: Any) -> Any:
                if _asker(sys._getframe(1)) in files:
                    read.add(str(name))
                return super().__getitem__(name)

        os.environ.__class__ = Watched

    def _answer_for_the_hardware(self) -> None:
        from cutlass.utils import hardware_info

        arch, count, facts = ARCHES.get(self.arch), self.opening.sm_count, self.facts

        def sm_count(self: Any) -> int:
            facts["sm_count"] = count
            return count

        def clusters(self: Any, cluster_size: int, *more: Any, **named: Any) -> int:
            facts["sm_count"] = count
            return resident_clusters(count, cluster_size)

        found: Any = hardware_info.HardwareInfo
        found.__init__ = lambda self, *arguments, **named: None
        found.get_device_multiprocessor_count = sm_count
        found.get_max_active_clusters = clusters
        if self.opening.torch and arch is not None:
            _answer_for_torch(arch)

    def _require_known(self) -> None:
        unnamed = sorted(self._read - set(self.opening.environment))
        if unnamed:
            raise Refused(
                "error",
                f"the kernel reads the environment variable {unnamed[0]} by a name that is not written out "
                f"in its modules, so a change of it would go unseen; declare environment=({unnamed[0]!r},)",
            )
        known, known_packages = dict(self.opening.files), {*self.opening.packages, *TOOLCHAIN_PACKAGES}
        for name in sorted(sys.modules.keys() - self._before):
            path = getattr(sys.modules[name], "__file__", None)
            top = name.partition(".")[0]
            if not path or name.startswith("cutegen_source_") or top in known_packages:
                continue
            if path in known and file_identity(Path(path)) != known[path]:
                raise BuildError(f"{path} changed while its kernel was compiled; start again")
            if path not in known and _is_users(path):
                raise Refused(
                    "error",
                    f"the kernel loads the module {name} ({path}), which no import statement names, so a "
                    f"change of it would go unseen; declare modules=({name!r},)",
                )

    def _refusal(self, error: Exception) -> Refused:
        """Return what ``error`` means: the choice is refused, or nothing would help."""
        own = self._own(error)
        words = _first_line(own)
        if isinstance(own, ImportError):
            return Refused("error", f"{self._place(own)}{_import_advice(own)}")
        if any(word in str(cause) for cause in _chain(error) for word in _NO_DRIVER):
            return Refused(
                "error",
                f"{self._place(own)}asks the driver while it is compiled, where there is no GPU: {words}",
            )
        plain = isinstance(own, (ValueError, AssertionError, NotImplementedError)) and words
        message = words if plain else f"{type(own).__name__}: {words}" if words else type(own).__name__
        said_by_author = plain and _last_file(own) in {path for path, _ in self.opening.files}
        return Refused("rejected", message if said_by_author else self._place(own) + message)

    def _own(self, error: BaseException) -> BaseException:
        """Return the innermost exception that a user's line raised; ``error`` itself if there is none."""
        files = {path for path, _ in self.opening.files}
        raised = [e for e in _chain(error) if e.__traceback__ and _last_file(e) in files]
        return raised[-1] if raised else error

    def _place(self, error: BaseException) -> str:
        """Return file and line of the user's code that led to ``error``."""
        files = {path for path, _ in self.opening.files}
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
        return f"{Path(lines[-1].filename).name}, line {lines[-1].lineno}: " if lines else ""


def _asker(frame: FrameType | None) -> str:
    """Return the file of the code that asks for a variable, behind the library's own."""
    library = str(Path(os.__file__).parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" in file or not file.startswith(("<frozen", library)):
            return file
        frame = frame.f_back
    return ""


def _answer_for_torch(arch: Arch) -> None:
    """Let torch name the target's compute capability, which is part of the kernel's name."""
    import torch

    torch.cuda.get_device_capability = lambda *_: arch.compute_capability


def _is_users(path: str) -> bool:
    """Whether a file is neither Python's nor an installed package's."""
    parts = Path(path).parts
    inside = path.startswith((sys.base_prefix, sys.prefix)) and "lib" in parts
    return not inside and "site-packages" not in parts and "dist-packages" not in parts


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what led to it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _last_file(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _import_advice(error: ImportError) -> str:
    name = (error.name or "").partition(".")[0]
    if name == "torch" and "torch" in sys.modules and sys.modules["torch"] is None:
        return "imports torch while it is compiled; declare modules=('torch',)"
    if isinstance(error, ModuleNotFoundError) and name:
        return f"imports {name}, which is not installed here; install it, or pass it on PYTHONPATH"
    if "relative import" in str(error):
        return (
            f"cannot be imported: {error}; name the module with its package, as entry='package.module:name', "
            "with the declaration beside the package, or the package's folder on PYTHONPATH"
        )
    return f"cannot be imported: {error}"

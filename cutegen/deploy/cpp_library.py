"""The pinned GEMMs as one library for C++ programs: an operator in torch's stable ABI, its kernels linked in.

Compiled by the C++ compiler at hand against the headers of the installed torch. Where it runs, the library
needs libtorch 2.10 or later, and neither Python nor tvm-ffi.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cutegen.build.host_compiler import CXX_COMPILERS, find_program, run_program
from cutegen.build.link import Linker
from cutegen.deploy.launch import DTYPES
from cutegen.deploy.manifest import FIELDS, OPERATOR
from cutegen.errors import BuildError, PinError
from cutegen.families.gemm.problem import ACTIVATIONS

__all__ = ["build_library", "tables_text"]

_SOURCE = Path(__file__).with_name("cpp_ops.cpp")
#: The oldest torch that the library runs with, as the headers number versions: 2.10, which first gives an
#: operator the address of a tensor's data. Source: torch/csrc/stable/tensor_struct.h.
_OLDEST = (2, 10)
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")
#: For the one compilation against the headers of torch.
_TIME_LIMIT_S = 300.0
_SIZES = ("m", "n", "k", "batch")
#: The kind of a GEMM as one number: values of so many bits each. The order of ``key_of`` in cpp_ops.cpp.
_KIND_BITS = (4, 4, 1, 1, 1, 1, 1, 2, 4, 1, 2)
_AXES = {"tn": (1, 0), "nn": (1, 1), "nt": (0, 1), "tt": (0, 0)}
#: torch's number of each dtype. Source: torch/headeronly/core/ScalarType.h, which keeps them stable.
_SCALAR_TYPES = {
    "bfloat16": 15,
    "float16": 5,
    "float32": 6,
    "int32": 3,
    "int8": 1,
    "float8_e4m3fn": 24,
    "float8_e5m2": 23,
}
_SHORT = [short for short, *_ in DTYPES.values()]
_PINNED_SHOWN = 8


def build_library(objects: Mapping[str, Path], tables: str, *, on_cpu: bool = False) -> bytes:
    """Return the library.

    Args:
        objects: The object file of each kernel, by symbol.
        tables: What is pinned, as :func:`tables_text` wrote it.
        on_cpu: For tests: tensors must be on the CPU, and nothing is asked of a GPU.

    Raises:
        PinError: There is no C++ compiler, no torch with the headers, or something does not compile.
    """
    compiler = find_program(CXX_COMPILERS)
    if compiler is None:
        raise PinError(f"no C++ compiler; install one of {', '.join(CXX_COMPILERS)}, or pin without --cpp")
    include = _torch_headers()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "tables.h").write_text(tables, encoding="utf-8")
            (folder / "empty.cpp").write_bytes(b"")
            (folder / "hidden.map").write_bytes(b"{ local: *; };")  # torch learns of it when it is loaded
            linker = Linker(folder)
            parts = [linker.part(path, symbol, folder / f"{symbol}.o") for symbol, path in objects.items()]
            version = f"-DTORCH_TARGET_VERSION=0x{_OLDEST[0]:02x}{_OLDEST[1]:02x}000000000000"
            flags = [*_FLAGS, version, f"-DON_CPU={int(on_cpu)}", f"-I{folder}", f"-I{include}"]
            run_program([compiler, *flags, "-c", str(_SOURCE), "-o", str(folder / "ops.o")], _TIME_LIMIT_S)
            # What stands for libtorch here has its name and nothing else: a program has loaded the real one.
            stub, library = folder / "libtorch_cpu.so", folder / "ops.so"
            shared = [compiler, "-shared", "-fPIC"]
            run_program([*shared, "-Wl,-soname,libtorch_cpu.so", str(folder / "empty.cpp"), "-o", str(stub)])
            hidden = f"-Wl,--version-script={folder / 'hidden.map'}"
            named = ["-Wl,-Bsymbolic", hidden, "-Wl,--no-as-needed", f"-L{folder}", "-ltorch_cpu", "-ldl"]
            run_program([*shared, str(folder / "ops.o"), *map(str, parts), *named, "-o", str(library)])
            return library.read_bytes()
    except BuildError as error:
        raise PinError(f"the library of C++ operators cannot be built: {error}") from error


def _torch_headers() -> Path:
    spec = importlib.util.find_spec("torch")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(root) / "include/torch/csrc/stable/library.h").is_file():
            return Path(root) / "include"
    oldest = ".".join(map(str, _OLDEST))
    raise PinError(f"--cpp needs the headers of torch {oldest} or later, and there are none here")


# --- what is pinned, as C++ ---


def tables_text(manifest: Mapping[str, Any]) -> str:
    """Return the header that says what is pinned, from the manifest of a folder."""
    records, ranges = manifest["kernels"], manifest["ranges"]
    tables = _Tables()
    exact = [f"{{{_sizes(r['key'])}, {_kind(r['key'])}u, {tables.launch(r, r)}}}" for r in records]
    for record in ranges:
        tables.range(record)
    gpu = {name: "" if value == "*" else str(value) for name, value in manifest["gpu"].items()}
    names = [str(record["problem"]) for record in (*records, *ranges)]
    more = "; ..." if len(names) > _PINNED_SHOWN else ""
    torch_number = {f"torch.{name}": number for name, number in _SCALAR_TYPES.items()}
    dtypes = [
        f"{{{_text(short)}, {torch_number[name]}, {code}, {bits}, {_SCALAR_TYPES[result]}}}"
        for name, (short, code, bits, result) in DTYPES.items()
    ]
    lines = [f'extern "C" int __tvm_ffi_{s}(void *, const Any *, int32_t, Any *);' for s in tables.symbols]
    kernels = [f"{{{_text(s)}, __tvm_ffi_{s}}}" for s in tables.symbols]
    lines += [
        *_array("Dtype", "DTYPES", dtypes),
        *_array("const char *", "ACTIVATIONS", map(_text, ACTIVATIONS)),
        *_array("const char *", "CPU_FLAGS", map(_text, manifest["cpu_flags"])),
        *_array("Kernel", "KERNELS", kernels),
        *_array("int64_t", "SCALARS", map(str, tables.scalars)),
        *_array("Record", "RECORDS", exact),
        *_array("Step", "STEPS", tables.steps),
        *_array("Range", "RANGES", tables.ranges),
        f"const char *const GPU_NAME = {_text(gpu['gpu_name'])};",
        f"const char *const CAPABILITY = {_text(gpu['compute_capability'])};",
        f"const int SM_COUNT = {int(gpu['sm_count'] or 0)};",
        f"const bool OUTSIDE_TORCH = {_flag(manifest['outside'] == 'torch')};",
        f"const char *const PINNED = {_text('; '.join(names[:_PINNED_SHOWN]) + more)};",
        f"const char *const SCHEMA = {_text(OPERATOR)};",
    ]
    return "\n".join(lines) + "\n"


class _Tables:
    """Rows of the tables that records share."""

    def __init__(self) -> None:
        self.symbols: list[str] = []
        self.scalars: list[int] = []
        self.steps: list[str] = []
        self.ranges: list[str] = []

    def launch(self, kernel: Mapping[str, Any] | None, how: Mapping[str, Any]) -> str:
        """Return how a kernel is launched; without one nothing answers, and without a symbol torch does."""
        if kernel is None:
            return "{-2, 0, false, 0, 0}"
        symbol, at = kernel["symbol"], -1
        if symbol:
            if symbol not in self.symbols:
                self.symbols.append(symbol)
            at = self.symbols.index(symbol)
        first, count = len(self.scalars), len(how["scalars"])
        self.scalars += how["scalars"]
        return f"{{{at}, {how['workspace_bytes']}, {_flag(how['zeroed'])}, {first}, {count}}}"

    def range(self, record: Mapping[str, Any]) -> None:
        first = len(self.steps)
        for last, at, workspace_bytes, zeroed, scalars in record["steps"]:
            how = {"workspace_bytes": workspace_bytes, "zeroed": zeroed, "scalars": scalars}
            self.steps.append(
                f"{{{last}, {self.launch(None if at is None else record['kernels'][at], how)}}}"
            )
        key, size = record["key"], record["size"]
        what = f"{{{_sizes(key)}, {_kind(key)}u, {_SIZES.index(size)}, {record['first']}, "
        self.ranges.append(f"{what}{record['multiple_of']}, {first}, {len(self.steps) - first}}}")


def _sizes(key: Sequence[Any]) -> str:
    named = dict(zip(FIELDS, key, strict=True))
    return "{" + ", ".join(str(named[size] or 0) for size in _SIZES) + "}"


def _kind(key: Sequence[Any]) -> int:
    named = dict(zip(FIELDS, key, strict=True))
    a_axis, b_axis = _AXES[named["layout"]]
    values = (
        *(_SHORT.index(named["ab_dtype"]), _SHORT.index(named["out_dtype"]), a_axis, b_axis),
        *(named["unaligned_out"], named["alpha"], named["beta"], ("", "n", "m").index(named["bias"])),
        *(ACTIVATIONS.index(named["activation"]), named["scale"]),
        2 * bool(named["promote"]) + bool(named["any_order"]),
    )
    kind = 0
    for value, bits in zip(values, _KIND_BITS, strict=True):
        kind = kind << bits | int(value)
    return kind


def _array(kind: str, name: str, rows: Iterable[str]) -> list[str]:
    return [f"const std::vector<{kind}> {name} = {{", *(f"    {row}," for row in rows), "};"]


def _text(value: str) -> str:
    return json.dumps(value)


def _flag(value: bool) -> str:
    return "true" if value else "false"

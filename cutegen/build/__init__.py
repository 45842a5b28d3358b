"""Source to artifact in worker processes, cached: the compiler is only started for what is not there yet."""

from cutegen.build.artifact import Artifact, Failure, KernelResources, Resources, Result, from_entry
from cutegen.build.builder import Builder
from cutegen.build.bundle import export_bundle, import_bundle
from cutegen.build.toolchain import Toolchain, artifact_key, host_runs, symbol_of

__all__ = [
    "Artifact",
    "Builder",
    "Failure",
    "KernelResources",
    "Resources",
    "Result",
    "Toolchain",
    "artifact_key",
    "export_bundle",
    "from_entry",
    "host_runs",
    "import_bundle",
    "symbol_of",
]

"""compute-sanitizer, as tools/run_gpu_tests.py starts it, sees what a kernel does beyond its tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hopper import NEEDS_HOPPER

from cutegen.build import Artifact, Builder
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import BuildError
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config
from tools.benchmark.environment import ROOT
from tools.gpu_test_parts.sanitizer import Sanitizer

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
TEXT = (Path(__file__).parent.parent / "data" / "two_kernels.py").read_text()
CALLS = """
import sys
from pathlib import Path
import torch
from cutegen.build.loader import load_kernel

kernel = load_kernel(Path(sys.argv[1]), sys.argv[2])
x = torch.arange(100_003, dtype=torch.float32, device="cuda")
kernel(x, torch.empty_like(x), 2.0)
torch.cuda.synchronize()
print("done")
"""


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> Sanitizer:
    """The sanitizer, if it is there and watches this GPU."""
    folder = tmp_path_factory.mktemp("nothing")
    try:
        found = Sanitizer.find()
    except BuildError as error:
        pytest.skip(str(error))
    told = watch(found, folder, "import torch; torch.zeros(1, device='cuda')")[1]
    if "not supported" in told:
        pytest.skip("compute-sanitizer does not support the GPU here")
    return found


def watch(sanitizer: Sanitizer, folder: Path, program: str, *words: str) -> tuple[str, str]:
    """What a program printed, and what the sanitizer told of it."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*sanitizer.prefix(folder), sys.executable, "-c", program, *words],
        env={**os.environ, **sanitizer.environment, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout, sanitizer.errors(folder)


def test_an_access_beyond_a_tensor_is_found(sanitizer: Sanitizer, tmp_path: Path) -> None:
    """Five elements behind the end, where torch would have rounded up; of a sound kernel it says nothing."""
    beyond = TEXT.replace("if i < y.shape[0]:", "if i < y.shape[0] + 5:", 1)
    signature, config = Problem(64, 64, 64).signature, Config({"tile_k": 64})
    sources = {text: Source(text, "sm_90a", signature, config) for text in (TEXT, beyond)}
    with Builder(Store(tmp_path / "store")) as builder:
        built = dict(builder.build(sources.values()))
    told = {}
    for number, (text, source) in enumerate(sources.items()):
        artifact = built[source]
        assert isinstance(artifact, Artifact), artifact
        folder = tmp_path / str(number)
        folder.mkdir()
        told[text] = watch(sanitizer, folder, CALLS, str(artifact.shared_object), artifact.symbol)
    assert told[TEXT] == ("done\n", "")
    assert "Invalid __global__" in told[beyond][1]

"""What the check says of a declared kernel with several outputs or with scratch memory, without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_kernels import SPLIT, SUMS, write_kernel
from own_registry import without_user_families

torch = pytest.importorskip("torch", reason="checks run on torch tensors")

from host_lane import candidate, new_engine  # noqa: E402

from cutegen.arch import find_arch  # noqa: E402
from cutegen.build import Artifact, Builder  # noqa: E402
from cutegen.build.render import render  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.cli.main import main  # noqa: E402
from cutegen.errors import CheckError  # noqa: E402
from cutegen.families import registry  # noqa: E402

ARCH = find_arch("sm_90a")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here is not known to other tests."""
    without_user_families(monkeypatch)


def sums(mistake: str) -> Callable[..., None]:
    """Return what computes the rows of SUMS as its kernel does, but for a mistake."""

    def kernel(x: Any, y: Any, rstd: Any = None, *integers: Any) -> None:
        factor = x.double().square().mean(-1).rsqrt()
        y.copy_(x * factor[:, None])
        if rstd is not None and mistake != "no factors":
            rstd.copy_(factor * (1.001 if mistake == "factors" else 1))
        if mistake == "rows":
            y[0, 0] += 0.5

    return kernel


@pytest.mark.parametrize(
    ("mistake", "output", "said"),
    [
        ("", "", ""),
        ("factors", "rstd", r"rstd\[\d+\] is"),
        ("no factors", "rstd", r"rstd: 5 of 5 elements .*never written"),
        ("rows", "y", r"y\[0, 0\] is"),
    ],
)
def test_the_output_that_is_wrong_is_named_among_several(
    mistake: str, output: str, said: str, tmp_path: Path
) -> None:
    family = registry.load_kernel(write_kernel(tmp_path / "own", SUMS))
    problem = family.parse("own_sums 5x64 fp32 sums")
    engine = new_engine(load=lambda library, symbol: sums(mistake))
    engine.open(problem, 0)
    verdict = engine.check(candidate(problem, scalars=()), problem)
    assert verdict.ok == (not mistake)
    if mistake:
        assert verdict.output == output and re.search(said, verdict.reason), verdict


@pytest.mark.dsl
def test_an_output_that_is_not_asked_for_is_another_kernel(tmp_path: Path) -> None:
    """Both compile; the one without it is passed None, and takes an argument less."""
    family = registry.load_kernel(write_kernel(tmp_path / "own", SUMS))
    problems = [family.parse(f"own_sums 5x64 fp32{word}") for word in ("", " sums")]
    assert problems[0].signature != problems[1].signature
    assert [[a.name for a in family.arguments(p)] for p in problems] == [["x", "y"], ["x", "y", "rstd"]]
    space = registry.find_space(family.name, ARCH)
    sources = [render(problem, space.default(problem), ARCH) for problem in problems]
    with Builder(Store(tmp_path / "store"), workers=2) as builder:
        built = dict(builder.build(sources))
    assert all(isinstance(result, Artifact) for result in built.values()), built
    assert "rstd=None" in sources[0].text and "rstd=rstd" in sources[1].text


@pytest.mark.parametrize("leaves", ["zeros", "numbers"])
def test_scratch_that_must_stay_zero_is_looked_at(leaves: str, tmp_path: Path) -> None:
    text = SPLIT["declaration.py"].replace("@kernel.workspace()", "@kernel.workspace(zeroed=True)")
    family = registry.load_kernel(write_kernel(tmp_path / "own", {**SPLIT, "declaration.py": text}))
    problem = family.parse("split_sum 5x1000 fp32")
    space = registry.find_space(family.name, ARCH)
    launch = space.launch(space.default(problem).replace(split=8), problem, 132)
    assert launch.zeroed and launch.workspace_bytes == 4 * 5 * 8

    def kernel(x: Any, y: Any, parts: int, partial: Any) -> None:
        partial.view(5, parts).add_(torch.stack([p.sum(-1) for p in x.tensor_split(parts, -1)], -1))
        y.copy_(partial.view(5, parts).sum(-1))
        if leaves == "zeros":
            partial.zero_()

    engine = new_engine(load=lambda library, symbol: kernel)
    engine.open(problem, 0)
    subject = candidate(
        problem, scalars=launch.scalars, workspace_bytes=launch.workspace_bytes, zeroed=launch.zeroed
    )
    if leaves == "zeros":
        assert engine.check(subject, problem).ok
        return
    with pytest.raises(CheckError, match="left numbers in its workspace of 160 bytes, which must be zero"):
        engine.check(subject, problem, repeats=0)


@pytest.mark.dsl
def test_scratch_is_shown_beside_each_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    declaration = write_kernel(tmp_path / "own", SPLIT)
    words = ["tune", "--kernel", str(declaration), "--arch", "sm_90a", "--shape", "256x4096", "--quiet"]
    assert main([*words, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    found = {row["config"]["split"]: row["workspace_bytes"] for row in result["candidates"]}
    assert len(found) >= 4 and found == {split: 4 * 256 * split for split in found}
    assert main(words) == 0
    assert "scratch KB" in capsys.readouterr().out

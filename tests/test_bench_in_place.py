"""The benchmark of families in place: what is called with what, and who can be timed so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cutegen.families.registry import find_family, parse_problem
from cutegen.family import Inputs
from cutegen.measure import Candidate
from cutegen.space import Launch
from tests.host_lane import CPU, FACTS, HostLane
from tools import bench_family
from tools.benchmark import family_child
from tools.benchmark.family_child import PEERS, call_names, in_place

PROBLEM = parse_problem("rope 5x4x2x16x8x1 fp32")


class Turn:
    """The reference of rotary embeddings, called as a kernel is."""

    def __init__(self, line: str) -> None:
        problem = parse_problem(line)
        self.names = [a.name for a in find_family(problem.family).arguments(problem)]
        self.problem = problem
        self.calls = 0

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        given = dict(zip(self.names, arguments, strict=True))
        inputs = Inputs({name: tensor for name, tensor in given.items() if not name.endswith("_out")})
        outputs = {name: tensor for name, tensor in given.items() if name.endswith("_out")}
        compute = find_family("rope").stand_in(self.problem)
        assert compute is not None
        compute(inputs, outputs)


def test_a_kernel_in_place_turns_what_it_is_given_and_keeps_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Turn(str(PROBLEM))
    monkeypatch.setattr("cutegen.build.loader.load_kernel", lambda library, symbol: kernel)
    monkeypatch.setattr("cutegen.measure.torch_engine.poison", lambda output: None)
    engine = family_child._BareEngine(CPU, FACTS, HostLane(), family_child._load, _meter())
    apart = Candidate("cutegen", Path("kernel.so"), "turn", Launch((), 0), PROBLEM)
    engine.open(PROBLEM, 0)
    session: Any = engine._session
    before = [{k: v.clone() for k, v in inputs.tensors.items()} for inputs in session.inputs]
    for outputs in session.outputs:
        for output in outputs.values():
            output.fill_(7.0)
    prepared = engine.prepare(in_place(apart))
    engine.measure(prepared, 3)
    assert kernel.calls >= 4 * prepared.launches
    for inputs, outputs, old in zip(session.inputs, session.outputs, before, strict=True):
        for name in ("q", "k"):
            new = inputs.tensors[name]
            assert not torch.equal(new, old[name])
            torch.testing.assert_close(new.norm(dim=-1), old[name].norm(dim=-1), rtol=1e-3, atol=1e-3)
            assert bool((outputs[f"{name}_out"] == 7.0).all())
        assert torch.equal(inputs.tensors["cos"], old["cos"])


def _meter() -> Any:
    from cutegen.measure.nvml import ClockMeter

    return ClockMeter("none")


@pytest.mark.parametrize(
    ("line", "peers"),
    [
        ("rope 8x4x2x64x32x1 bf16", True),
        ("rope 8x4x2x64x32x99 bf16 table=positions", False),
        ("rope 8x4x2x64x32x1 bf16 norm", False),
        ("rope 8x4x2x50x13x1 bf16", False),
    ],
)
def test_quack_turns_what_it_takes(line: str, peers: bool) -> None:
    problem = parse_problem(line)
    assert ("quack rotary" in call_names(problem)) == peers
    assert "quack rotary in place" not in call_names(problem)
    assert ("quack rotary in place" in call_names(problem, in_place=True)) == peers
    assert {name for name in call_names(problem, in_place=True) if "quack" in name} <= {*PEERS}


@pytest.mark.parametrize("family", ["softmax", "layernorm"])
@pytest.mark.parametrize(
    ("row", "known"), [("4096 bf16", True), ("4099 bf16", False), ("4100 bf16", False), ("4100 fp32", True)]
)
def test_quack_reads_rows_of_whole_vectors(family: str, row: str, known: bool) -> None:
    assert (f"quack {family}" in call_names(parse_problem(f"{family} 64x{row}"))) == known


@pytest.mark.parametrize(
    ("row", "known"), [("50257 bf16", False), ("50258 bf16", True), ("50257 fp32", True)]
)
def test_quack_reads_logits_of_four_bytes(row: str, known: bool) -> None:
    assert ("quack cross_entropy" in call_names(parse_problem(f"cross_entropy 64x{row}"))) == known


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("gated --in-place", "gated cannot be timed in place"),
        ("rope --set pdl=early", "--set needs --candidates"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: str, reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shapes = f"--shapes tools/shapes/{words.split()[0]}.toml --out {tmp_path / 'out.json'}"
    assert bench_family.main(f"{words} {shapes}".split()) == 2
    assert reason in capsys.readouterr().err

"""What the Operator API offers: which answers become candidates, why others do not, when it is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_operators import LISTED, OFFERED, design, operator, pretend_installed

from cutegen.arch import Arch, find_arch
from cutegen.build.store import Store
from cutegen.errors import BuildError, ResourceError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.operator_api import Listing, answers, ask_api, find_offers, offers_of
from cutegen.system import interpreter

SM90, SM100 = find_arch("sm_90a"), find_arch("sm_100a")
PROBLEM = Problem(256, 512, 1024)


class Api:
    """Answers what is listed, and counts the questions."""

    def __init__(self, answer: Mapping[str, Any] = LISTED) -> None:
        self.answer = answer
        self.asked: list[tuple[object, str]] = []

    def __call__(self, kind: object, arch: Arch) -> Mapping[str, Any]:
        self.asked.append((kind, arch.name))
        return self.answer


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs the real one."""
    pretend_installed(monkeypatch)


def test_what_is_listed_and_can_be_launched_is_offered_in_order(tmp_path: Path) -> None:
    """As configs of the operators' space, each legal."""
    offers = find_offers(PROBLEM, SM90, Store(tmp_path), ask=Api())
    assert offers.configs == OFFERED
    space = find_space("gemm", SM90, "operators")
    assert all(space.explain(PROBLEM, config) == () for config in offers.configs)


def test_every_other_operator_is_refused_with_its_reason(tmp_path: Path) -> None:
    """The API's own words first, equal ones counted; then what cutegen has no adapter or no value for."""
    refused = find_offers(PROBLEM, SM90, Store(tmp_path), ask=Api()).refused
    assert [str(item) for item in refused[:2]] == [
        "2 x OldOperator: needs another target",
        "1 x SomeOtherOperator: cutegen has an adapter for Sm90StaticPersistentGemmOperator only",
    ]
    assert (refused[2].count, refused[2].operator) == (1, "Sm90StaticPersistentGemmOperator")
    assert "tile_shape_mn=128x96 is not in its domain" in refused[2].reason
    assert len(refused) == 3


def test_a_blackwell_design_is_read_by_our_names() -> None:
    """MMA tile, pair and scheduler; a design that breaks a rule is refused by that rule."""
    base = {"use_2cta_mma": True, "use_tma_store": True, "tile_scheduler": "clc"}
    name = "PersistentDenseGemmOperator"
    designs = [{**design(256, 128, (2, 1), name), **base}, {**design(64, 128, (2, 1), name), **base}]
    offers = offers_of(Listing(tuple(designs), ()), PROBLEM, find_space("gemm", SM100, "operators"))
    assert [str(config) for config in offers.configs] == [
        f"source=operators operator={name} mma_tiler_mn=256x128 use_2cta_instrs=true "
        "cluster_shape_mn=2x1 use_tma_store=true tile_scheduler=clc"
    ]
    (refused,) = offers.refused
    assert refused.reason.startswith("rows_fit_the_instruction: ")


def test_the_api_is_not_asked_about_what_no_operator_does(tmp_path: Path) -> None:
    """The rule that the problem breaks is the reason."""
    api = Api()
    offers = find_offers(Problem.parse("gemm 256x512x1024 bf16 kk bias=n"), SM90, Store(tmp_path), ask=api)
    assert offers.configs == () and api.asked == []
    assert [str(item).split(": ")[:2] for item in offers.refused] == [["all", "product_is_plain"]]


def test_the_api_is_asked_once_for_each_kind_of_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes do not matter; dtype, layout, batches, the target and the package do."""
    api, store = Api(), Store(tmp_path)
    for problem in (PROBLEM, Problem(64, 64, 64), replace(PROBLEM, any_order=True)):
        find_offers(problem, SM90, store, ask=api)
    assert api.asked == [(("bf16", "bf16", "k", "k", 2), "sm_90a")]
    for problem in (
        replace(PROBLEM, batch=2),
        replace(PROBLEM, layout="mn"),
        Problem.parse("gemm 8x8x8 fp16 kk"),
    ):
        find_offers(problem, SM90, store, ask=api)
    find_offers(PROBLEM, SM100, store, ask=api)
    pretend_installed(monkeypatch, "another")
    find_offers(PROBLEM, SM90, store, ask=api)
    assert len(api.asked) == 6
    assert find_offers(PROBLEM, SM90, store, ask=api).configs == OFFERED and len(api.asked) == 6


def test_a_damaged_answer_in_the_store_is_asked_for_again(tmp_path: Path) -> None:
    """As any entry of the store."""
    api, store = Api(), Store(tmp_path)
    find_offers(PROBLEM, SM90, store, ask=api)
    (meta,) = tmp_path.glob("v1/sm_90a/*/*/meta.json")
    meta.write_text("{")
    assert find_offers(PROBLEM, SM90, store, ask=api).configs == OFFERED
    assert len(api.asked) == 2


def test_a_failed_question_is_an_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of it; the next run asks again."""

    def fail(kind: object, arch: Arch) -> Mapping[str, Any]:
        raise BuildError("no")

    with pytest.raises(BuildError):
        find_offers(PROBLEM, SM90, Store(tmp_path), ask=fail)
    assert find_offers(PROBLEM, SM90, Store(tmp_path), ask=Api()).configs == OFFERED
    monkeypatch.setattr(interpreter, "_BOOT", "raise ValueError('its last words')")
    with pytest.raises(BuildError, match="cannot list its operators: ValueError: its last words"):
        ask_api(("bf16", "bf16", "k", "k", 2), SM90)
    monkeypatch.setattr(interpreter, "_BOOT", "print('{a warning}')")
    with pytest.raises(BuildError, match=r"but said: '{a warning}'"):
        ask_api(("bf16", "bf16", "k", "k", 2), SM90)
    monkeypatch.setattr(interpreter, "_BOOT", "print('{a warning}'); print('{\"designs\": []}')")
    assert ask_api(("bf16", "bf16", "k", "k", 2), SM90) == {"designs": []}
    monkeypatch.setattr(interpreter, "_BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr(answers, "LIMIT_S", 0.2)
    with pytest.raises(BuildError, match=r"within 0\.2 s"):
        ask_api(("bf16", "bf16", "k", "k", 2), SM90)


def test_a_missing_package_is_told_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the error that names the extra."""

    def missing() -> str:
        raise ResourceError("pip install it")

    monkeypatch.setattr(answers, "require_package", missing)
    api = Api()
    with pytest.raises(ResourceError, match="pip install it"):
        find_offers(PROBLEM, SM90, Store(tmp_path), ask=api)
    assert api.asked == []


def test_operators_that_are_listed_twice_are_one_candidate() -> None:
    """Their texts would be the same."""
    twice = Listing((design(64, 64), design(64, 64)), ())
    assert offers_of(twice, PROBLEM, find_space("gemm", SM90, "operators")).configs == (operator("64x64"),)


def test_the_api_works_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look for files in the temporary directory under names that other users can foresee."""
    boot = "import json, os; print(json.dumps([os.getcwd(), os.environ['TMPDIR']]))"
    monkeypatch.setattr(interpreter, "_BOOT", boot)
    here, temporary = ask_api(("bf16", "bf16", "k", "k", 2), SM90)
    assert here == temporary and not Path(here).exists()


@pytest.mark.parametrize("changes", [{"designs": 5}, {"designs": [{}]}, {"refused": [{"operator": "x"}]}])
def test_an_answer_of_another_form_is_neither_kept_nor_believed(
    tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    """From the API it is an error; from the store, it is asked for again."""
    store = Store(tmp_path)
    with pytest.raises(BuildError, match="no list of operators"):
        find_offers(PROBLEM, SM90, store, ask=Api({**LISTED, **changes}))
    assert store.keys("sm_90a") == ()
    find_offers(PROBLEM, SM90, store, ask=Api())
    (meta,) = tmp_path.glob("v1/sm_90a/*/*/meta.json")
    data = json.loads(meta.read_text())
    meta.write_text(json.dumps({**data, "listing": {**data["listing"], **changes}}))
    assert find_offers(PROBLEM, SM90, store, ask=Api()).configs == OFFERED


@pytest.mark.parametrize("shape", [[], ["a", "b", "c"], [128], "128x64", None])
def test_a_design_without_a_proper_tile_is_refused(shape: object) -> None:
    """By the space, as one whose knob is missing."""
    odd = Listing(({**design(64, 64), "tile_shape": shape},), ())
    offers = offers_of(odd, PROBLEM, find_space("gemm", SM90, "operators"))
    assert offers.configs == () and "tile_shape_mn" in offers.refused[0].reason

"""Laws of dispatch: which config answers, how that is said, and when nothing may be compiled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import H200, FakeGpu

from cutegen.arch import find_arch
from cutegen.build import Toolchain
from cutegen.errors import ArchError, ConfigError, DeviceError, LaunchError, StoreError, TableError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import ANY, Entry, Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Dispatcher
from cutegen.search.defaults import default_config
from cutegen.space import Config, Value

SPACE = find_space("gemm", find_arch("sm_90a"))
PROBLEM = Problem(1024, 1024, 1024)


@pytest.fixture
def gpu(tmp_path: Path) -> FakeGpu:
    return FakeGpu(tmp_path)


def other_than_default(problem: Problem = PROBLEM) -> Config:
    default = SPACE.default(problem)
    return next(c for c in SPACE.configs(problem, {"swizzle_size": [4]}) if c != default)


def here(**changes: Any) -> Fingerprint:
    return replace(Fingerprint.of(H200, Toolchain.current()), **changes)


def table(*entries: Entry, **changes: Any) -> Table:
    return Table(here(**changes), entries)


def test_answer_says_which_rule_found_it(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, bucket, nearest or default; the line names the measured problem unless it is the one asked."""
    monkeypatch.setattr(GEMM, "is_fitted", lambda *_: False)  # so that neighbours answer, however good
    config = other_than_default()
    dispatcher = gpu.dispatcher(table(Entry(PROBLEM, config)))
    for problem, how in (
        (PROBLEM, "exact"),
        (Problem(1000, 1000, 1000), "bucket"),
        (Problem(2048, 1024, 1024), "nearest"),
        (replace(PROBLEM, epilogue=Epilogue(activation="relu")), "nearest"),
        (Problem(16384, 16384, 1024), "default"),
        (replace(PROBLEM, ab_dtype="fp16", out_dtype="fp16"), "default"),
    ):
        answer = dispatcher.explain(problem)
        assert answer.how == how, problem
        assert (answer.config == config) == (how != "default")
        assert SPACE.explain(problem, answer.config or {}) == ()
    assert str(dispatcher.explain(Problem(1000, 1000, 1000))) == (
        f"gemm 1000x1000x1000 bf16 kk: bucket (measured for {PROBLEM}): {config}"
    )
    assert not gpu.compiled


def test_a_neighbours_winner_competes_with_the_default(gpu: FakeGpu) -> None:
    """By fitted times; one that was chosen for another objective, or measured right there, does not."""
    entry, near = Entry(PROBLEM, other_than_default()), Problem(1000, 1000, 1000)
    answer = gpu.dispatcher(table(entry)).explain(near)
    assert (answer.how, answer.config) == ("default", default_config(SPACE, near, H200.sm_count))
    assert answer.skipped[-1] == f"{PROBLEM}: the default is expected to be faster here"
    assert gpu.dispatcher(table(entry)).explain(PROBLEM).how == "exact"
    assert gpu.dispatcher(table(replace(entry, objective="energy"))).explain(near).how == "bucket"
    good = replace(entry, config=default_config(SPACE, near, H200.sm_count))
    assert gpu.dispatcher(table(good)).explain(near).how == "bucket"


def test_an_answer_that_was_not_tuned_for_time_says_so(gpu: FakeGpu) -> None:
    """A table tuned for energy answers as such."""
    dispatcher = gpu.dispatcher(table(Entry(PROBLEM, SPACE.default(PROBLEM), objective="energy")))
    assert str(dispatcher.explain(PROBLEM)).startswith(f"{PROBLEM}: exact (tuned for energy): tile_shape_mn=")
    near = Problem(1000, 1000, 1000)
    assert f"bucket (measured for {PROBLEM}, tuned for energy): " in str(dispatcher.explain(near))


def test_no_table_means_default(gpu: FakeGpu) -> None:
    """Without a table every answer is the default."""
    answer = gpu.dispatcher().explain(PROBLEM)
    assert (answer.how, answer.config, answer.entry) == ("default", default_config(SPACE, PROBLEM), None)


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("0", False), ("", False)])
def test_autotune_can_be_disabled(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, value: str, disabled: bool
) -> None:
    """CUTEGEN_DISABLE_AUTOTUNE=1 makes every lookup answer the default."""
    monkeypatch.setenv("CUTEGEN_DISABLE_AUTOTUNE", value)
    answer = gpu.dispatcher(table(Entry(PROBLEM, other_than_default()))).explain(PROBLEM)
    assert answer.how == ("default" if disabled else "exact")


FOREIGN = {
    "gpu_name": "NVIDIA B200",
    "compute_capability": "10.0a",
    "sm_count": 148,
    "cuda_driver": "12.4",
    "cuda_runtime": "11",
    "cutlass_dsl": "4.7.0",
    "cutegen": "9.9.9",
}


@pytest.mark.parametrize("field", FOREIGN)
def test_foreign_tables_are_ignored_by_name(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    """Any field that differs ignores the table with one warning that names it; "*" accepts any value."""
    entry = Entry(PROBLEM, other_than_default())
    dispatcher = gpu.dispatcher(table(entry, **{field: FOREIGN[field]}))
    for _ in range(2):
        assert dispatcher.explain(PROBLEM).how == "default"
    assert [field in record.message for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING
    assert gpu.dispatcher(table(entry, **{field: ANY})).explain(PROBLEM).how == "exact"


def test_torch_may_win_plain_products_only(gpu: FakeGpu) -> None:
    """An entry that torch won answers None for plain products; a fused one stays ours."""
    config = other_than_default()
    fused = replace(PROBLEM, epilogue=Epilogue(activation="relu"))
    wide = replace(PROBLEM, out_dtype="fp32")
    entries = [Entry(problem, config, source="torch") for problem in (PROBLEM, fused, wide)]
    dispatcher = gpu.dispatcher(table(*entries))
    assert dispatcher.explain(PROBLEM).config is None
    assert str(dispatcher.explain(PROBLEM)) == f"{PROBLEM}: exact: torch"
    assert dispatcher.kernel(PROBLEM) is None
    assert dispatcher.explain(fused).config == dispatcher.explain(wide).config == config
    lone = gpu.dispatcher(table(Entry(fused, None, source="torch")))
    assert lone.explain(fused).how == "default"


OTHERS: dict[str, Callable[[dict[str, Value]], object]] = {
    "lacks a knob": lambda knobs: knobs.pop("use_pdl"),
    "unknown knob": lambda knobs: knobs.update(warps=4),
    "unknown value": lambda knobs: knobs.update(tile_k=3),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("source", ["cutegen", "torch"])
def test_configs_of_another_version_do_not_answer(
    gpu: FakeGpu, change: Callable[[dict[str, Value]], object], source: str
) -> None:
    """A table may be edited, or be from before a knob was added; such entries answer nothing."""
    knobs = dict(other_than_default())
    change(knobs)
    problem = replace(PROBLEM, out_dtype="fp32")  # not one that torch itself would compute
    dispatcher = gpu.dispatcher(table(Entry(problem, Config(knobs), source=source)))
    assert dispatcher.explain(problem).how == "default"
    assert dispatcher.kernel(problem) is not None


def test_default_table_is_found_in_the_cache_folder(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """What tuning left for this GPU is used without asking; a broken file is a warning, not an end."""
    path = default_table_path(gpu.store.root, H200)
    assert path.name == "nvidia_h200.json"
    table(Entry(PROBLEM, other_than_default())).save(path)
    assert gpu.dispatcher().explain(PROBLEM).how == "exact"
    path.write_text("{")
    assert gpu.dispatcher().explain(PROBLEM).how == "default"
    assert "ignoring the dispatch table in the cache folder" in caplog.text


BAD_TABLES: dict[str, Callable[[bytes], bytes]] = {
    "integer of 5000 digits": lambda text: text.replace(b'"schema": 1', b'"schema": ' + b"9" * 5000),
    "size of 5000 digits": lambda text: text.replace(b"1024x1024x1024", b"9" * 5000 + b"x8x8"),
    "float too large": lambda text: text.replace(b'"time_us": null', b'"time_us": 1e999'),
    "deeply nested": lambda text: b"[" * 100_000,
    "not UTF-8": lambda text: text.replace(b"H200", b"H200\xff"),
    "malformed artifact key": lambda text: text.replace(b'"artifact_key": ""', b'"artifact_key": "../../x"'),
    "entry not an object": lambda text: text.replace(
        b'"entries": {', b'"entries": {"gemm 8x8x8 bf16 kk": 1, '
    ),
    "duplicate key": lambda text: text.replace(b'"entries"', b'"entries": {}, "entries"'),
    "terminal escape": lambda text: text.replace(b'"split_k"', b'"\\u001b[31m": {}, "split_k"'),
}


@pytest.mark.parametrize("damage", BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_of_the_cache_costs_one_warning(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    """Calls on every GPU go on with the default config; a table that the caller names is an error."""
    path = default_table_path(gpu.store.root, H200)
    table(Entry(PROBLEM, other_than_default())).save(path)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert path.read_bytes() != good
    dispatcher = gpu.dispatcher()
    for index in (0, 1):
        choice = dispatcher.kernel(PROBLEM, index)
        assert choice is not None and choice.answer.how == "default"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(path) in record.getMessage()
    assert record.getMessage().isprintable()
    with pytest.raises(TableError, match=r"nvidia_h200\.json"):
        dispatcher.with_table(path)


CODE = '"\nimport os; os.system("touch injected")\n"'
INJECTED: dict[str, Callable[[dict[str, Value]], object]] = {
    "value": lambda knobs: knobs.update(reduction=f"fixed{CODE}"),
    "knob": lambda knobs: knobs.update({f"x{CODE}": 1}),
    "boolean for an integer": lambda knobs: knobs.update(split_k=True),
    "path for a source": lambda knobs: knobs.update(source="../../x"),
}


@pytest.mark.parametrize("change", INJECTED.values(), ids=INJECTED)
def test_text_of_a_table_never_reaches_a_kernel(
    gpu: FakeGpu, change: Callable[[dict[str, Value]], object]
) -> None:
    """What is not in the space is not rendered: a table's config does not answer, a given one is an error."""
    knobs = dict(other_than_default())
    change(knobs)
    path = default_table_path(gpu.store.root, H200)
    table(Entry(PROBLEM, Config(dict(other_than_default())))).save(path)
    document = json.loads(path.read_text())
    document["entries"][str(PROBLEM)]["config"] = Config(knobs).to_json()
    path.write_text(json.dumps(document))
    choice = gpu.dispatcher().kernel(PROBLEM)
    assert choice is not None and choice.answer.how == "default"
    with pytest.raises(ConfigError):
        gpu.dispatcher().kernel(PROBLEM, config=Config(knobs))
    assert gpu.compiled and not any("os.system" in source.text for source in gpu.compiled)


def test_a_table_that_cannot_be_read_costs_one_warning(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in its place; the same holds where permissions deny it."""
    path = default_table_path(gpu.store.root, H200)
    path.mkdir(parents=True)
    dispatcher = gpu.dispatcher()
    assert [dispatcher.explain(PROBLEM, index).how for index in (0, 1)] == ["default", "default"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    loop = default_table_path(gpu.store.root / "other", H200)
    loop.parent.parent.mkdir()
    loop.parent.symlink_to(loop.parent)
    assert FakeGpu(gpu.store.root / "other").dispatcher().explain(PROBLEM).how == "default"


def test_an_entry_of_a_source_without_kernels_here_does_not_answer(gpu: FakeGpu) -> None:
    """No operators compute block-scaled products; an entry that names them is passed over."""
    b200 = replace(H200, name="NVIDIA B200", compute_capability=(10, 0), sm_count=148)
    problem = Problem(1024, 1024, 1024, ab_dtype="nvfp4", family="gemm_blockscaled")
    entry = Entry(problem, Config({"source": "operators"}), source="operators")
    given = Table(Fingerprint.of(b200, Toolchain.current()), [entry])
    dispatcher = Dispatcher(given, kernels=gpu.kernels(), device=lambda index: b200, device_type="cpu")
    assert dispatcher.explain(problem).how == "default"


def test_explicit_table_must_be_one(gpu: FakeGpu, tmp_path: Path) -> None:
    """A table that the caller names is an error if it is missing or malformed."""
    dispatcher = gpu.dispatcher()
    with pytest.raises(StoreError, match=r"nowhere\.json does not exist"):
        dispatcher.with_table(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(TableError, match=r"bad\.json"):
        dispatcher.with_table(tmp_path / "bad.json")
    table(Entry(PROBLEM, other_than_default())).save(tmp_path / "good.json")
    assert dispatcher.with_table(tmp_path / "good.json").explain(PROBLEM).how == "exact"


def test_kernel_carries_function_scalars_and_reason(gpu: FakeGpu) -> None:
    """What a launch needs, from the config that answered, for the multiprocessors of this GPU."""
    config = other_than_default()
    choice = gpu.dispatcher(table(Entry(PROBLEM, config))).kernel(PROBLEM)
    assert choice is not None
    assert choice.answer.how == "exact"
    assert choice.launch == SPACE.launch(config, PROBLEM, H200.sm_count)
    given = gpu.dispatcher().kernel(PROBLEM, config=config)
    assert given is not None and given.answer.how == "given"
    with pytest.raises(ConfigError, match="split_k_stores_partial_sums"):
        gpu.dispatcher().kernel(PROBLEM, config=config.replace(split_k=2, use_tma_store=True))


def one_kernel(*problems: Problem) -> bool:
    """Whether the same kernel answers all of these by default."""
    return len({SPACE.compile_view(default_config(SPACE, p, H200.sm_count)) for p in problems}) == 1


def test_nothing_new_during_capture(gpu: FakeGpu) -> None:
    """While a graph is captured only kernels that already ran on that GPU are had."""
    dispatcher = gpu.dispatcher()
    with pytest.raises(LaunchError, match=r"a CUDA graph is being captured, .* once before the capture"):
        dispatcher.kernel(PROBLEM, capturing=True)
    assert not gpu.compiled and not gpu.loaded
    found = dispatcher.kernel(PROBLEM)
    with pytest.raises(LaunchError, match="has not run yet"):
        dispatcher.kernel(PROBLEM, capturing=True)  # loaded, but not launched yet
    assert found is not None and found.first is not None
    found.first.happened()
    again = dispatcher.kernel(PROBLEM, capturing=True)
    assert again is not None and again.first is None
    kin = (Problem(1024, 1024, k) for k in range(1032, 8192, 8))
    alike = next(kin for kin in kin if one_kernel(kin, PROBLEM))
    assert dispatcher.kernel(alike, capturing=True) is not None  # the same artifact
    with pytest.raises(LaunchError, match="has not run yet"):
        dispatcher.kernel(PROBLEM, 1, capturing=True)


def test_missing_or_unknown_gpu_is_said(gpu: FakeGpu) -> None:
    """No GPU and a GPU without a target are errors of their own kind."""

    def nothing(index: int) -> Any:
        raise DeviceError("no GPU of index 0; this process sees 0")

    with pytest.raises(DeviceError, match="this process sees 0"):
        Dispatcher(kernels=gpu.kernels(), device=nothing).explain(PROBLEM)
    old = replace(H200, name="NVIDIA A100", compute_capability=(8, 0))
    with pytest.raises(ArchError, match=r"no target for compute capability 8\.0"):
        Dispatcher(kernels=gpu.kernels(), device=lambda _: old).explain(PROBLEM)

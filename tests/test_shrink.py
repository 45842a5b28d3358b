"""``python -m cutegen.shrink``: files, records and a pretended GPU as sources, and who uses the list."""

from __future__ import annotations

import json
import lzma
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fake_engine import DEVICE
from fake_tuning import TOOLCHAIN, FakeBench, FakeCompiler

from cutegen.arch import find_arch
from cutegen.build.store import Store
from cutegen.cli import shrink as cli
from cutegen.errors import ResourceError
from cutegen.families.registry import find_space, parse_problem
from cutegen.families.resources import resource_root
from cutegen.search import short_list
from cutegen.search.defaults import default_config, default_set
from cutegen.search.short_list import DEFAULT as DEFAULT_WORD
from cutegen.search.short_list import MOST, find_short_list
from cutegen.search.strategies import rank
from cutegen.space import Config
from cutegen.tuning.backends import Backends
from cutegen.tuning.request import deciding_files
from cutegen.tuning.shrinking import Times, relative, shrink

ARCH = find_arch("sm_90a")
SPACE = find_space("rope", ARCH)
LONG, SHORT = (parse_problem(f"rope {m}x32x8x128x64x1 bf16") for m in (8192, 1024))
SHAPES = ["--shape", "8192x32x8x128x64x1", "--shape", "1024x32x8x128x64x1"]
DEFAULT = SPACE.default(LONG)
WIDE, SEVERAL = DEFAULT.replace(threads=512), DEFAULT.replace(heads_per_thread=2)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No list is known, and the toolchain is the pretended one."""
    monkeypatch.setattr("cutegen.tuning.setting.Toolchain.current", lambda: TOOLCHAIN)
    monkeypatch.setattr(short_list, "short_list_file", lambda family: None)
    short_list._read.cache_clear()
    yield
    short_list._read.cache_clear()


def behaviour(config: Config) -> str:
    """Wide CTAs with two heads per thread are fastest; with programmatic launches all is wrong."""
    if config["pdl"] == "early":
        return "wrong_result"
    return str(10.0 + 2 * (config["threads"] != 512) + 0.5 * abs(config.integer("heads_per_thread") - 2))


class Gpu:
    """A pretended GPU, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bench = folder, FakeBench()
        self.compiler = FakeCompiler(Store(folder), behaviour, batch=50)

    def run(self, *words: str, measures: bool = True) -> int:
        """Run the command on it, or without it."""
        backends = Backends(compiler=lambda: self.compiler, bench=lambda: self.bench)
        where = ["--cache-dir", str(self.folder), "--quiet"]
        device = DEVICE if measures else None
        return cli.main(["rope", *where, *words], device=device, backends=backends)


def results(path: Path, rows: Mapping[str, Mapping[Config, float]], gpu: str = "NVIDIA H200") -> Path:
    """A results file with these times."""
    listed = [{"problem": p, "tried": {str(c): us for c, us in each.items()}} for p, each in rows.items()]
    about = {"gpu": gpu, "commit": "0" * 40, "measured_at": "2026-11-23T01:20:00+00:00"}
    path.write_text(json.dumps({**about, "rows": listed}))
    return path


def test_the_list_is_what_takes_most_off_and_the_default_stays() -> None:
    """Gains below half a percent count for nothing; what was not timed on a shape does not cover it."""
    both = {DEFAULT: 1.0, WIDE: 0.8, SEVERAL: 0.9}
    times: dict[Any, Times] = {
        LONG: (DEFAULT, both),
        SHORT: (DEFAULT, {DEFAULT: 1.0, SEVERAL: 0.7, WIDE: 0.996}),
    }
    found = shrink(times, 8)
    assert found.configs == (SEVERAL, WIDE)
    assert [each.choice for each in found.shapes] == [WIDE, SEVERAL]
    assert found.mean[0] == 0 and found.worst[1] == pytest.approx(1 / 0.7 - 1)
    fewer = shrink(times, 2)
    assert fewer.configs == (SEVERAL,) and fewer.shapes[0].regret == pytest.approx(0.9 / 0.8 - 1)
    assert shrink({LONG: (DEFAULT, {DEFAULT: 1.0, WIDE: 0.997})}, 8).configs == ()


def test_what_is_missing_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong kernels do not count; a second run, without a GPU, answers from the records."""
    gpu = Gpu(tmp_path)
    assert gpu.run(*SHAPES, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["configs"][0] == "default" and len(found["configs"]) == 2
    assert all(Config.parse(row["choice"]) == WIDE.replace(heads_per_thread=2) for row in found["shapes"])
    assert found["regret"] == 0 and found["default_regret"] == pytest.approx(0.25)
    assert len(gpu.bench.timed) == 2
    again = Gpu(tmp_path)
    assert again.run(*SHAPES, "--json", "--arch", "sm_90a", measures=False) == 0
    assert json.loads(capsys.readouterr().out) == found and not again.bench.timed
    assert again.run(*SHAPES) == 0 and not again.bench.timed  # what was wrong is not asked again
    assert "the default alone 25.0 %" in capsys.readouterr().out


def test_configs_are_compared_where_they_overlap_alike() -> None:
    """Overlap takes half a microsecond here; one config was timed with it alone, one both ways."""
    early = {config: config.replace(pdl="early") for config in (DEFAULT, WIDE, SEVERAL)}
    other = DEFAULT.replace(threads=128)
    times = {DEFAULT: 10.0, early[DEFAULT]: 10.5, early[WIDE]: 8.4, SEVERAL: 9.0, early[SEVERAL]: 9.45}
    found = relative(LONG, {str(c): us for c, us in times.items()}, DEFAULT, ARCH)
    assert found == pytest.approx({DEFAULT: 1.0, WIDE: 0.8, SEVERAL: 0.9})
    alone = {str(DEFAULT): 10.0, str(other.replace(pdl="early")): 8.0}
    assert relative(LONG, alone, DEFAULT, ARCH) == {DEFAULT: 1.0}


def test_results_are_enough_and_the_list_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list leads a search, answers where nothing was tuned, near what was measured, and is warmed up."""
    old = results(tmp_path / "old.json", {str(LONG): {DEFAULT: 9.0, WIDE: 1.0}})
    new = {str(LONG): {DEFAULT: 10.0, SEVERAL: 8.0, WIDE: 12.0}, str(SHORT): {DEFAULT: 5.0, WIDE: 5.0}}
    newer, path = results(tmp_path / "new.json", new), tmp_path / "short_list.json"
    words = [*SHAPES, "--arch", "sm_90a", "--results", str(old), str(newer), "--out", str(path)]
    assert Gpu(tmp_path).run(*words, measures=False) == 0
    assert f"written: {path}" in capsys.readouterr().out
    document = json.loads(path.read_text())["lists"]["sm_90a"]
    assert document["configs"] == ["default", str(SEVERAL)]
    assert [row["choice"] for row in document["shapes"]] == [1, 0]
    assert [source["results"] for source in document["made_of"]["sources"]] == ["old.json", "new.json"]
    monkeypatch.setattr(short_list, "short_list_file", lambda family: path)
    monkeypatch.setattr("cutegen.tuning.request.short_list_file", lambda family: path)
    short_list._read.cache_clear()
    assert rank(SPACE, LONG, 132, 3)[:2] == [DEFAULT, SEVERAL]
    assert rank(SPACE, LONG, 132, 3, {"heads_per_thread": [1]})[0] == DEFAULT
    near, far, one = (LONG.with_sizes(m=m) for m in (6000, 65536, 1))
    found = [default_config(SPACE, p) for p in (LONG, near, far, SHORT, one)]
    assert found == [SEVERAL, SEVERAL, DEFAULT, DEFAULT, SPACE.default(one)]
    assert default_config(SPACE, parse_problem("rope 8192x32x8x128x64x1 fp16")) == DEFAULT
    assert {config for _, config in default_set(SPACE, LONG)} >= {DEFAULT, SEVERAL}
    assert path in deciding_files("rope", ARCH, ("cutegen",))
    assert find_short_list(find_space("rope", find_arch("sm_100a"))) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*SHAPES, "--arch", "sm_90a"], "2 of 2 shapes have no times of their default and another config"),
        ([*SHAPES, "--most", "9"], "--most 9 is not possible; valid: 2 to 8"),
        ([*SHAPES, "--kernels", "1"], "valid: 2 and more"),
        (["--arch", "sm_90a"], "no shape given"),
        ([*SHAPES, "--arch", "sm_90a", "--results", "none.json"], "none.json"),
        ([*SHAPES, "--arch", "sm_90a", "--results", "bad.json"], "is none of tools/bench_family.py"),
        ([*SHAPES, "--arch", "sm_90a", "--results", "one.json", "two.json"], "NVIDIA B200 and NVIDIA H200"),
        (
            [*SHAPES, "--arch", "sm_90a", "--results", "one.json", "--out", "bad.json"],
            "no short list of rope",
        ),
    ],
)
def test_what_cannot_be_asked_is_named(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[]")
    times = {str(p): {DEFAULT: 2.0, WIDE: 1.0} for p in (LONG, SHORT)}
    results(tmp_path / "one.json", times)
    results(tmp_path / "two.json", times, gpu="NVIDIA B200")
    assert Gpu(tmp_path).run(*words, measures=False) == 2
    assert says in capsys.readouterr().err


def test_a_place_for_no_list_is_named_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, says in ((tmp_path, "is a folder; name a file"), (Path("/dev/null/list.json"), "is no folder")):
        assert Gpu(tmp_path).run(*SHAPES, "--out", str(out), measures=False) == 3
        assert f"short list {out} cannot be written" in (said := capsys.readouterr().err) and says in said


def test_a_family_with_a_model_has_no_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gemm", "--shape", "64x1024x1024", "--arch", "sm_90a"]) == 2
    assert "performance model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "its format is 2"),
        ({"lists": {"sm_90a": {"configs": [], "shapes": []}}}, "not enough values"),
        ({"lists": {"sm_90a": {"configs": ["x=1"], "shapes": []}}}, "must begin with default"),
        (
            {
                "lists": {
                    "sm_90a": {"configs": ["default", "x=1"], "shapes": [{"problem": str(LONG), "choice": 1}]}
                }
            },
            "unknown knob 'x'",
        ),
        ({"lists": []}, "AttributeError"),
    ],
)
def test_a_file_that_is_no_list_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "short_list.json"
    path.write_text(json.dumps({"format": 1, "family": "rope", "lists": {}, **change}))
    monkeypatch.setattr(short_list, "short_list_file", lambda family: path)
    with pytest.raises(ResourceError, match=says):
        find_short_list(SPACE)


#: What was tried on an H200, by family: the form of results files.
TRIED = Path(__file__).parent / "data" / "tried_on_h200.json.xz"
SHIPPED = sorted(path.parent.name for path in resource_root("spaces").glob("*/short_list.json"))


@pytest.mark.parametrize("family", SHIPPED)
def test_a_shipped_list_follows_from_what_was_tried(family: str) -> None:
    """And its configs, 8 at most, are within 1.5 % of the best wherever they were timed."""
    rows = json.loads(lzma.decompress(TRIED.read_bytes()))[family]["rows"]
    space, times = find_space(family, ARCH), {}
    for row in rows:
        problem = parse_problem(row["problem"])
        default = space.default(problem)
        times[problem] = default, relative(problem, row["tried"], default, ARCH)
    found = shrink(times, MOST)
    path = resource_root("spaces") / family / "short_list.json"
    shipped = json.loads(path.read_text())["lists"]["sm_90a"]
    assert shipped["configs"] == [DEFAULT_WORD, *map(str, found.configs)]
    assert [row["problem"] for row in shipped["shapes"]] == [str(problem) for problem in times]
    assert found.worst[0] < 0.015 and len(shipped["configs"]) <= MOST


DOCUMENTS = Path(__file__).parents[1] / "docs"


def over_all(parts: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean and the largest of what is lost, in percent."""
    mean = math.exp(math.fsum(math.log1p(part) for part in parts) / len(parts)) - 1
    return 100 * mean, 100 * max(parts)


@pytest.mark.parametrize("family", SHIPPED)
def test_documents_say_what_a_list_loses(family: str) -> None:
    lists = json.loads((resource_root("spaces") / family / "short_list.json").read_text())["lists"]
    for arch, found in lists.items():
        lost = [over_all([row[key] for row in found["shapes"]]) for key in ("regret", "default_regret")]
        columns = [f"{mean:.2f} % | {worst:.1f} %" for mean, worst in lost]
        count = f"{len(found['configs'])} | {len(found['shapes'])}"
        line = f"| `{family}` | {arch} | {count} | {' | '.join(columns)} |"
        assert line in (DOCUMENTS / "tuning.md").read_text(), line


@pytest.mark.parametrize(
    "family", ["gated_gemm", "gemm_blocks", "grouped_gemm", "grouped_gemm_masked", "grouped_gemm_blocks"]
)
def test_documents_say_why_products_have_no_list(family: str) -> None:
    """Of their results no config was timed on as many rows as a list is made of, and defaults lose this."""
    rows = json.loads((DOCUMENTS / "results" / f"{family}.json").read_text())["rows"]
    assert max(len(row["tried"]) for row in rows) <= 12
    times = [(row["entries"].get("cutegen default"), row["entries"]["cutegen"]) for row in rows]
    lost = [max(0.0, d["median_us"] / own["median_us"] - 1) if d else 0.0 for d, own in times]
    mean, worst = (math.ceil(10 * percent) / 10 for percent in over_all(lost))  # never in our favour
    said = " ".join((DOCUMENTS / "tuning.md").read_text().split())
    assert re.search(
        rf"{mean:.1f} % (in the geometric mean )?and {worst:.1f} % (at worst )?for `{family}`", said
    )


@pytest.mark.parametrize("family", ["gated_gemm", "gemm_blocks", "grouped_gemm"])
def test_documents_say_how_few_rows_have_configs_in_common(family: str) -> None:
    rows = json.loads((DOCUMENTS / "results" / f"{family}.json").read_text())["rows"]
    counts = Counter(chain.from_iterable(row["tried"] for row in rows))
    assert 2 * max(counts.values()) < len(rows)
    said = " ".join((DOCUMENTS / "tuning.md").read_text().split())
    assert re.search(rf"`{family}` \({len(counts)}( configs)? on {len(rows)}( rows)?\)", said)


def test_the_example_for_machines_without_a_gpu_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What --help shows; its results file may be measured again and lack a shape then."""
    words = cli._parser().epilog.split("python -m cutegen.shrink activation ")[1].split("#")[0]
    assert cli.main(["activation", *words.replace("\\", "").split()]) == 0
    assert "default" in capsys.readouterr().out

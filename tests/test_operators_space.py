"""Operators as configs: what their space takes and refuses, how they are rendered, what they launch with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_operators import HOPPER, PACKAGE, operator, pretend_installed

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.errors import ConfigError, ProblemError, ResourceError
from cutegen.families.gemm import operator_package as operator_api
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space, find_template, space_of
from cutegen.search.defaults import default_config, strategy_of
from cutegen.space import Config, Launch, Space

SM90, SM100 = find_arch("sm_90a"), find_arch("sm_100a")
SPACE, BLACKWELL = find_space("gemm", SM90, "operators"), find_space("gemm", SM100, "operators")
PROBLEM = Problem(256, 512, 1024)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing remembered of what is installed, before and after."""
    operator_api.require_package.cache_clear()
    yield
    operator_api.require_package.cache_clear()


# --- the space ---


@pytest.mark.parametrize("space", [SPACE, BLACKWELL])
def test_no_model_chooses_among_operators(space: Space) -> None:
    """It knows cutegen's kernels only."""
    assert strategy_of(space) is None
    assert default_config(space, PROBLEM) == next(space.configs(PROBLEM))


@pytest.mark.parametrize(("space", "count"), [(SPACE, 24), (BLACKWELL, 400)])
def test_every_config_goes_to_text_and_back_and_names_its_source(space: object, count: int) -> None:
    """As text and as JSON; its own space is found again from what it says."""
    configs = list(space.configs(PROBLEM))  # type: ignore[attr-defined]
    assert len(set(configs)) == count
    for config in configs:
        assert config.source == "operators"
        assert Config.parse(str(config)) == config == Config.from_json(config.to_json())
        assert space_of(config, "gemm", space.arch) is space  # type: ignore[attr-defined]


def test_our_own_configs_name_no_source_and_are_ours() -> None:
    """What was written before there were sources keeps its meaning."""
    own = find_space("gemm", SM90)
    config = own.default(PROBLEM)
    assert "source" not in config and config.source == "cutegen"
    assert space_of(config, "gemm", SM90) is own is not SPACE


def test_an_unknown_source_is_refused_with_the_known_ones() -> None:
    """Wherever a config's text comes from."""
    config = Config.parse("source=elsewhere tile_shape_mn=64x64")
    with pytest.raises(ConfigError, match="source=elsewhere is nobody's; valid: cutegen, operators"):
        space_of(config, "gemm", SM90)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("gemm 256x512x1024 bf16 kk bias=n", "product_is_plain"),
        ("gemm 256x512x1024 bf16 kk alpha", "product_is_plain"),
        ("gemm 256x512x1024 e4m3 kk scale", "product_is_plain"),
        ("gemm 256x511x1024 bf16 kk", "output_rows_are_aligned"),
        ("gemm 256x512x1024 e4m3 kk promote", "sums_are_not_promoted"),
        ("gemm 256x512x1024 int8 kk out=bf16", "integer_sums_stay_exact"),
        ("gemm 256x512x1024 tf32 kk", "operands_are_tensors"),
    ],
)
@pytest.mark.parametrize("space", [SPACE, BLACKWELL])
def test_a_problem_that_operators_cannot_express_is_refused_by_rule(
    space: object, line: str, rule: str
) -> None:
    """Nothing is listed for it, and the reason is that of the rule."""
    problem = Problem.parse(line)
    assert next(space.configs(problem), None) is None  # type: ignore[attr-defined]
    assert [v.rule for v in space.explain(problem, {})] == [rule]  # type: ignore[attr-defined]
    with pytest.raises(ProblemError, match=rule):
        space.default(problem)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        "gemm 256x512x1024 bf16 mn out=fp32",
        "gemm 3x256x512x1024 fp16 mk",
        "gemm 256x512x1024 e4m3 kk",
        "gemm 256x512x1024 int8 kk",
    ],
)
def test_plain_products_of_every_kind_are_taken(line: str) -> None:
    """Batches, all layouts, fp8 without promotion, int8."""
    assert SPACE.explain(Problem.parse(line), operator("64x64")) == ()


def test_blackwell_tiles_and_clusters_match_the_pair() -> None:
    """256 rows need two blocks, 64 forbid them, and a pair lies along m."""
    words = "source=operators operator=PersistentDenseGemmOperator use_tma_store=true tile_scheduler=clc "
    for rest, rules in (
        ("mma_tiler_mn=256x64 use_2cta_instrs=false cluster_shape_mn=1x1", ["rows_fit_the_instruction"]),
        ("mma_tiler_mn=64x64 use_2cta_instrs=true cluster_shape_mn=2x1", ["rows_fit_the_instruction"]),
        ("mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=1x2", ["pairs_lie_along_m"]),
        ("mma_tiler_mn=256x64 use_2cta_instrs=true cluster_shape_mn=2x1", []),
    ):
        assert [v.rule for v in BLACKWELL.explain(PROBLEM, Config.parse(words + rest))] == rules


@pytest.mark.parametrize(("cluster", "clusters"), [("1x1", 132), ("2x1", 66), ("1x2", 66), ("2x2", 30)])
def test_a_launch_takes_the_number_of_clusters_and_no_memory(cluster: str, clusters: int) -> None:
    """As many as an H200 holds at once: clusters of four leave some multiprocessors idle."""
    assert SPACE.launch(operator("64x64", cluster), PROBLEM, 132) == Launch((clusters,), 0)


# --- the text ---


def test_the_text_depends_on_what_is_compiled_in_and_on_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on sizes; another package, tile, cluster, dtype, layout or rank is another kernel."""
    pretend_installed(monkeypatch)
    base = render(PROBLEM, operator("64x64"), SM90)
    assert render(Problem(512, 512, 512), operator("64x64"), SM90) == base
    lines = ("fp16 kk", "bf16 kn", "bf16 mn", "bf16 kk out=fp32")
    others = [render(Problem.parse(f"gemm 256x512x1024 {line}"), operator("64x64"), SM90) for line in lines]
    others += [render(Problem(256, 512, 1024, 2), operator("64x64"), SM90)]
    others += [render(PROBLEM, operator(*which), SM90) for which in (("64x128",), ("64x64", "2x1"))]
    pretend_installed(monkeypatch, "another")
    others.append(render(PROBLEM, operator("64x64"), SM90))
    assert len({source.text for source in (base, *others)}) == len(others) + 1


@pytest.mark.parametrize(("arch", "space"), [(SM90, SPACE), (SM100, BLACKWELL)])
def test_the_text_is_python_that_takes_our_arguments(
    arch: object, space: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a, b, d, the number of clusters and the stream; it names package and operator and imports no torch."""
    pretend_installed(monkeypatch)
    for config in list(space.configs(PROBLEM))[::7]:  # type: ignore[attr-defined]
        text = render(PROBLEM, config, arch).text  # type: ignore[arg-type]
        tree = ast.parse(text)
        (launch,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "launch"]
        assert [a.arg for a in launch.args.args] == ["a", "b", "d", "clusters", "stream"]
        assert f'PACKAGE = "{PACKAGE}"' in text and str(config["operator"]) in text
        modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert all(name.startswith(("cutlass", "importlib", "types")) for name in modules)
        assert not any(line != line.rstrip() for line in text.splitlines())


def test_an_operator_without_a_template_is_not_rendered() -> None:
    """The message says for which source."""
    with pytest.raises(ResourceError, match="no template of 'gemm_blockscaled' from operators for sm_90a"):
        find_template("gemm_blockscaled", SM90, "operators")


# --- the package ---


def test_a_missing_package_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """Whoever needs its files learns what to install."""
    monkeypatch.setattr(operator_api, "PACKAGE", "no-such-package-of-operators")
    with pytest.raises(ResourceError, match=r"pip install 'cutegen\[operators\]'"):
        render(PROBLEM, operator("64x64"), SM90)


def test_the_package_is_named_by_version_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """A kernel that changes under the same version is another package; one without kernels is none."""
    about = tmp_path / "nvidia_cutlass_operators-9.9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-operators\nVersion: 9.9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ResourceError, match=r"9\.9\.9 has no kernels"):
        operator_api.require_package()
    folder = tmp_path / "cutlass/operators/providers/cutedsl/gemm/implementations"
    folder.mkdir(parents=True)
    names = []
    for text in ("one", "two"):
        (folder / "impl.py").write_text(text)
        operator_api.require_package.cache_clear()
        names.append(operator_api.require_package())
    assert len(set(names)) == 2 and all(name.startswith("nvidia-cutlass-operators 9.9.9 (") for name in names)


def test_the_extra_asks_for_the_version_that_constraints_pin() -> None:
    """pip install 'cutegen[operators]' -c constraints.txt gives what was tested."""
    root = Path(__file__).parent.parent
    assert f'operators = ["{operator_api.PACKAGE}>=' in (root / "pyproject.toml").read_text()
    assert f"\n{operator_api.PACKAGE}==0.3.0\n" in (root / "constraints.txt").read_text()
    assert HOPPER in str(SPACE.domains["operator"])

"""Rendered kernels: text that stands alone, reads well, and is the same whenever the kernel is the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutegen.arch import find_arch
from cutegen.build.render import Source, render, template_files
from cutegen.errors import ConfigError, RenderError, ResourceError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.space import Config
from tools.bringup_parts.random_problems import random_config, random_pairs, random_problem

ROOT = Path(__file__).resolve().parent.parent
ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PLAIN = Problem(512, 4096, 4096)
KINDS = [
    {"stream_k": [True]},
    {"reduction": ["arrival"]},
    {"split_k": [3]},
    {"split_k": [1]},
    {"pingpong": [True]},
    {"use_tma_store": [True]},
    {},
]


def broad_sample() -> Iterator[tuple[Problem, Config]]:
    """Kernels of every kind: each kind of parallelism, on problems of every dtype, layout and epilogue."""
    generator = Random(11)
    for _ in range(30):
        problem = random_problem(generator)
        if generator.random() < 0.3:  # sizes that leave a small last wave
            problem = replace(problem.resized(640, 4096, 4096, problem.batch), any_order=True)
        for kind in KINDS:
            config = random_config(SPACE, problem, generator, kind)
            if config is not None:
                yield problem, config


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return [render(problem, config, ARCH) for problem, config in broad_sample()]


@pytest.fixture(scope="module")
def trees(sources: list[Source]) -> list[ast.Module]:
    return [ast.parse(source.text) for source in sources]


def test_the_sample_is_broad(sources: list[Source]) -> None:
    """Every value of every compiled knob but the tiles, and every part of an epilogue, is rendered."""
    for knob in ("tile_k", "cluster_shape_mn", "mma_warpgroups", "pingpong", "swap_ab", "use_tma_store"):
        assert {source.config[knob] for source in sources} == set(SPACE.domains[knob]), knob
    for knob in ("use_pdl", "stream_k", "reduction"):
        assert {source.config[knob] for source in sources} == set(SPACE.domains[knob]), knob
    epilogues = [source.signature.epilogue for source in sources]
    for field in ("alpha", "beta", "scale", "bias", "activation"):
        assert {getattr(e, field) for e in epilogues} >= {type(getattr(epilogues[0], field))()}
    assert {e.activation for e in epilogues} == {"", "relu", "gelu", "gelu_tanh", "silu"}
    assert {s.signature.layout for s in sources} == {"tn", "nn", "nt", "tt"}


# --- the text stands alone ---


def test_a_kernel_imports_only_the_compiler_and_the_standard_library(trees: list[ast.Module]) -> None:
    """So that it can be read, profiled and shipped without cutegen."""
    allowed = {"cutlass", "cuda"} | set(sys.stdlib_module_names)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and (node.module or "").split(".")[0] in allowed


def test_a_kernel_defines_what_the_builder_needs(trees: list[ast.Module]) -> None:
    """launch, KERNELS and fake_arguments; launch takes as many arguments as fake_arguments makes."""
    for tree in trees:
        body = tree.body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        assert {"launch", "fake_arguments"} <= functions.keys()
        kernels = next(
            n for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "KERNELS"
        )
        named = [element.id for element in kernels.value.elts]  # type: ignore[attr-defined]
        decorated = [
            name
            for name, function in functions.items()
            if any(ast.unparse(d) == "cute.kernel" for d in function.decorator_list)
        ]
        assert named == decorated
        made = next(n for n in reversed(functions["fake_arguments"].body) if isinstance(n, ast.Return))
        assert isinstance(made.value, ast.Tuple)
        assert len(made.value.elts) == len(functions["launch"].args.args)


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_launch_takes_what_the_calling_convention_says(generator: Random) -> None:
    """In order: tensors, workspace where there is one, the launch's scalars, alpha and beta, the stream."""
    problem = random_problem(generator)
    config = random_config(SPACE, problem, generator)
    assert config is not None
    launch = SPACE.launch(config, problem, 132)
    epilogue = problem.epilogue
    tensors = ["a", "b", "d"]
    tensors += ["c"] if epilogue.beta else []
    tensors += ["bias"] if epilogue.bias else []
    tensors += ["scale_a", "scale_b"] if epilogue.scale else []
    tensors += ["workspace"] if launch.workspace_bytes else []
    factors = [name for name in ("alpha", "beta") if getattr(epilogue, name)]
    tree = ast.parse(render(problem, config, ARCH).text)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "launch")
    taken = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation}
    names = list(taken)
    assert names[: len(tensors)] == tensors
    assert names[len(names) - len(factors) - 1 :] == [*factors, "stream"]
    scalars = names[len(tensors) : len(names) - len(factors) - 1]
    assert len(scalars) == len(launch.scalars)
    assert {taken[name] for name in tensors} == {"cute.Tensor"}
    assert {taken[name] for name in scalars} == {"cutlass.Int32"}


# --- the text reads well ---


def test_a_kernel_has_no_traces_of_the_template(sources: list[Source]) -> None:
    """No braces of Jinja, no trailing blanks, no long runs of empty lines, one newline at the end."""
    for source in sources:
        assert not re.search(r"\{\{\s|\s\}\}|\{%|%\}|\{#", source.text)
        assert not re.search(r"[ \t]\n|\n{4}", source.text)
        assert source.text.endswith("\n") and not source.text.endswith("\n\n")


def test_a_plain_product_has_no_trace_of_an_epilogue() -> None:
    """Parts that a kernel does not use are left out, words and all."""
    for config in SPACE.configs(
        PLAIN,
        {
            "tile_shape_mn": [(128, 128), (64, 24)],
            "swizzle_size": [1],
            "raster_along_m": [False],
            "use_pdl": [True],
            "split_k": [1, 2],
        },
    ):
        text = render(PLAIN, config, ARCH).text
        words = set(re.findall(r"[a-z_]+", text))
        assert not words & {
            "alpha",
            "beta",
            "bias",
            "activate",
            "load_c",
            "load_bias",
            "m_c",
            "scale_a",
            "batch",
        }
        assert ("workspace" in words) == (config["split_k"] != 1 or config["stream_k"] is True)
        assert ("tma_d" in words) == config["use_tma_store"]


def test_the_first_lines_say_what_is_computed_and_with_which_config() -> None:
    """The docstring is a formula, the types and the knobs that are compiled in."""
    problem = Problem(
        512, 512, 512, ab_dtype="e4m3", out_dtype="fp16", epilogue=Epilogue(True, True, "n", "gelu", True)
    )
    source = render(problem, SPACE.default(problem), ARCH)
    docstring = ast.get_docstring(ast.parse(source.text)) or ""
    assert "act(alpha * scale_a * scale_b * A @ B + beta * C + bias) on sm_90a" in docstring
    assert "e4m3 operands, fp32 accumulation, fp16 output, layout tn" in docstring
    assert str(source.config) in " ".join(docstring.split())


# --- the text is the identity ---


def test_rendering_again_gives_the_same_text(sources: list[Source]) -> None:
    """In this process and in another one, whatever the seed of Python's hashing."""
    first = next(broad_sample())
    again = render(*first, ARCH)
    assert again == sources[0] and again.digest == sources[0].digest
    code = """
import sys
from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.build.render import render
from cutegen.space import Config
print(render(Problem.parse(sys.argv[1]), Config.parse(sys.argv[2]), find_arch("sm_90a")).digest)
"""
    problem, config = first
    arguments = [sys.executable, "-c", code, str(problem), str(config)]
    environment = {"PYTHONHASHSEED": "3", "PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == again.digest


def test_configs_that_differ_in_run_time_knobs_only_are_one_kernel() -> None:
    """Equal compiled views render alike, so they share an artifact; problems of another size share it too."""
    for problem, config in random_pairs(SPACE, seed=12, count=40):
        text = render(problem, config, ARCH).text
        for knob in SPACE.run_time_knobs:
            for value in SPACE.domains[knob]:
                other = config.replace(**{knob: value})
                if SPACE.explain(problem, other) or SPACE.compile_view(other) != SPACE.compile_view(config):
                    continue
                assert render(problem, other, ARCH).text == text


def test_a_problem_of_another_size_is_the_same_kernel() -> None:
    """Sizes are symbolic."""
    config = SPACE.default(PLAIN)
    other = PLAIN.resized(1000, 2048, 8192)
    assert render(PLAIN, config, ARCH).text == render(other, config, ARCH).text


def test_different_compiled_knobs_are_different_kernels(sources: list[Source]) -> None:
    """Texts are equal only for equal signatures and compiled views."""
    named = {(source.signature, source.config) for source in sources}
    assert len({source.text for source in sources}) == len(named)


# --- what is refused ---


def test_an_illegal_config_is_not_rendered() -> None:
    """The refusal names the rule."""
    with pytest.raises(ConfigError, match="pingpong_has_one_warpgroup_per_tile"):
        render(
            PLAIN,
            SPACE.default(PLAIN).replace(pingpong=True, mma_warpgroups=2, tile_shape_mn=(128, 64)),
            ARCH,
        )


def test_a_target_without_a_template_is_refused() -> None:
    """The message names family and target."""
    turing = replace(ARCH, name="sm_75", family="sm75")
    with pytest.raises(ResourceError, match="sm_75"):
        render(PLAIN, SPACE.default(PLAIN), turing)


def test_a_template_that_asks_for_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing value is an error, never an empty word in the text."""
    import jinja2

    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string("{{ nobody }}")
    monkeypatch.setattr("cutegen.build.render._template", lambda path: template)
    with pytest.raises(RenderError, match="nobody"):
        render(PLAIN, SPACE.default(PLAIN), ARCH)


def test_a_template_that_refers_to_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The message names both, and where the missing one was looked for."""
    template = tmp_path / "kernel.py.j2"
    template.write_text('{% include "gemm/_operands.j2" %}{% include "_mine.j2" %}')
    with pytest.raises(RenderError, match=r"kernel\.py\.j2 refers to _mine\.j2; there is neither .*_mine"):
        template_files(template)
    (tmp_path / "_mine.j2").write_text("")
    assert {file.name for file in template_files(template)} == {template.name, "_mine.j2", "_operands.j2"}


def test_a_parameter_without_a_type_is_refused(tmp_path: Path) -> None:
    """It would else be missing in a signature, whose call passes it."""
    import jinja2

    from cutegen.build.render import _template

    path = tmp_path / "kernel.py.j2"
    path.write_text('{% from "gemm/_parameters.j2" import parameters %}{{ parameters(["m_d", "nonsense"]) }}')
    with pytest.raises(jinja2.UndefinedError, match="the type of nonsense"):
        _template(path).render()


def test_derived_values_cannot_shadow_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two meanings of one name are the author's mistake."""
    clash = replace(SPACE, derive=lambda config, problem, arch: {"tile_k": 1})
    monkeypatch.setattr("cutegen.build.render.space_of", lambda config, family, arch: clash)
    with pytest.raises(RenderError, match="tile_k"):
        render(PLAIN, SPACE.default(PLAIN), ARCH)

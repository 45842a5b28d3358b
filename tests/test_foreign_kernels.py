"""Kernels of others, as examples/own_kernel/ declares them: references, defaults, compilation without a GPU.

QuACK is in the ``dev`` extra. What tools/fetch_foreign.py fetches is compiled where it is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from host_lane import new_engine

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder, Failure
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families import registry
from cutegen.families.registry import find_space, load_kernel, parse_problem
from cutegen.families.shapes import read_shapes
from cutegen.families.user.family import UserFamily
from cutegen.family import Inputs
from cutegen.measure import Candidate
from cutegen.search.defaults import default_config
from cutegen.space import Launch
from tools import fetch_foreign
from tools.bench_foreign import DECLARATIONS, KERNELS, SHAPES

ARCH = find_arch("sm_90a")
#: Of each declaration the package or folder that it needs, and a problem to compile.
NEEDS = {
    "quack_rmsnorm": ("quack", "512x4096 bf16 rstd"),
    "quack_softmax": ("quack", "512x4096 bf16"),
    "nvidia_gemm": ("helpers.fmha_helpers", "512x512x512 bf16"),
    "nvidia_fmha": ("helpers.fmha_helpers", "2x512x512x8x2x128 bf16 causal"),
    "flash_attention": ("flash_attn", "2x512x512x8x2x64 bf16 causal"),
    "flash_attention_varlen": ("flash_attn", "512x4x8x2x128 bf16 causal"),
    "quack_cross_entropy": ("quack", "512x4096 bf16 gradient"),
    "quack_topk": ("quack", "512x1024x32 fp32"),
    "nvidia_add": ("helpers.fmha_helpers", "512x512 bf16"),
}


@pytest.fixture(autouse=True)
def nothing_stays_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here is not known to other tests."""
    monkeypatch.setattr(registry, "_registered", dict(registry._all()))


def family(name: str) -> UserFamily:
    return load_kernel(DECLARATIONS / f"{name}.py")


def needs(module: str) -> pytest.MarkDecorator:
    top = importlib.util.find_spec(module.partition(".")[0])
    there = top is not None and importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not there, reason=f"needs {module}: see tools/fetch_foreign.py")


@pytest.mark.parametrize("name", NEEDS)
def test_authors_defaults_are_valid_on_every_example_and_shape(name: str) -> None:
    problems = [*family(name).typical()]
    if name in KERNELS:
        problems += [shape.problem for shape in read_shapes(SHAPES / f"{name}.toml", name)]
    space = find_space(name, ARCH)
    assert problems
    for problem in problems:
        assert not space.explain(problem, default_config(space, problem)), problem


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """PyTorch's attention of tensors in which heads come behind positions."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return found.transpose(1, 2)


def wanted(line: str) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """Draw inputs for a problem and return them beside what its reference says."""
    problem = parse_problem(line)
    declared = load_kernel(DECLARATIONS / f"{problem.family}.py")
    inputs = declared.inputs(problem, torch.Generator().manual_seed(3))
    first = next(iter(inputs.tensors.values()))
    return inputs, dict(declared.wanted(problem, inputs, 0, first.shape[0]))


@pytest.mark.parametrize("name", ["flash_attention", "nvidia_fmha"])
@pytest.mark.parametrize("causal", [False, True])
def test_references_of_attention_are_pytorchs(name: str, causal: bool) -> None:
    family(name)
    inputs, found = wanted(f"{name} 2x50x50x6x2x16 bf16{' causal' if causal else ''}")
    q, k, v = (inputs.tensors[key].double() for key in "qkv")
    mask = torch.ones(50, 50, dtype=torch.bool).tril() if causal else None
    torch.testing.assert_close(
        found["o"], attention(q, k, v, inputs.scalars["scale"], mask), rtol=1e-12, atol=1e-12
    )
    if "lse" in found:
        scores = torch.einsum("bshd,bthd->bsht", q, k.repeat_interleave(3, 2)) * inputs.scalars["scale"]
        scores = scores if mask is None else scores.masked_fill(~mask[:, None], float("-inf"))
        torch.testing.assert_close(found["lse"], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_flash_attention_ends_its_mask_at_the_last_key() -> None:
    family("flash_attention")
    inputs, found = wanted("flash_attention 1x20x70x4x4x16 bf16 causal")
    q, k, v = (inputs.tensors[key].double() for key in "qkv")
    mask = torch.ones(20, 70, dtype=torch.bool).tril(50)
    torch.testing.assert_close(
        found["o"], attention(q, k, v, inputs.scalars["scale"], mask), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_different_lengths_do_not_see_each_other(causal: bool) -> None:
    family("flash_attention_varlen")
    inputs, found = wanted(f"flash_attention_varlen 90x5x4x2x16 bf16{' causal' if causal else ''}")
    ends = inputs.tensors["cu_seqlens"].tolist()
    assert ends[0] == ends[1] == 0 and ends[-1] == 90 and len({*ends}) == 4
    q, k, v = (inputs.tensors[key].double() for key in "qkv")
    for low, high in pairwise(ends):
        length = high - low
        mask = torch.ones(length, length, dtype=torch.bool).tril() if causal else None
        parts = (tensor[None, low:high] for tensor in (q, k, v))
        want = attention(*parts, inputs.scalars["scale"], mask)[0]
        torch.testing.assert_close(found["o"][low:high], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", ["", " causal"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_attention_may_round_weights_but_not_lose_keys(dtype: str, causal: str) -> None:
    declared = family("flash_attention")
    problem = parse_problem(f"flash_attention 1x512x512x2x2x64 {dtype}{causal}")
    inputs = declared.inputs(problem, torch.Generator().manual_seed(5))
    want = declared.wanted(problem, inputs, 0, 1)["o"]
    q, k, v = (inputs.tensors[key].double().transpose(1, 2) for key in "qkv")
    scores = q @ k.mT * inputs.scalars["scale"]
    if causal:
        scores.masked_fill_(torch.ones(512, 512, dtype=torch.bool).triu(1), float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    short = inputs.tensors["q"].dtype
    allowed = declared.allowed(problem, "o", want)

    def off(weights: torch.Tensor) -> torch.Tensor:
        out = ((weights.to(short).double() @ v) / total).transpose(1, 2).to(short).double()
        return (out - want).abs() > allowed

    assert not off(weights).any()
    weights[..., 64:128] = 0
    assert off(weights)[:, 128:].float().mean() > 0.2


def test_products_that_lose_a_part_of_k_are_wrong() -> None:
    declared = family("nvidia_gemm")
    problem = parse_problem("nvidia_gemm 64x64x4096 fp16")
    inputs = declared.inputs(problem, torch.Generator().manual_seed(5))
    want = declared.wanted(problem, inputs, 0, 64)["c"]
    allowed = declared.allowed(problem, "c", want)
    a, b = (inputs.tensors[key] for key in "ab")
    assert ((a.float() @ b.float().T).half().double() - want).abs().le(allowed).all()
    assert ((a[:, 64:].double() @ b[:, 64:].double().T) - want).abs().gt(allowed).float().mean() > 0.5


#: Small problems of each declaration for an engine without a GPU, and the baseline that it finds there.
ON_CPU = {
    "quack_rmsnorm 20x128 bf16 rstd": "torch",
    "quack_softmax 20x128 fp32": "torch",
    "nvidia_gemm 40x48x64 fp16": "torch.mm",
    "nvidia_fmha 2x40x40x4x2x16 fp16 causal": "sdpa",
    "flash_attention 2x40x72x4x2x16 bf16": "sdpa",
    "flash_attention_varlen 64x5x4x2x16 bf16": "sdpa, one by one",
    "quack_cross_entropy 20x128 bf16 gradient": "torch",
    "quack_topk 20x128x8 fp32": "torch",
    "nvidia_add 20x48 bf16": "torch",
}


@pytest.mark.parametrize("line", ON_CPU)
def test_right_kernels_pass_the_check_and_baselines_that_do_not_run_are_left_out(line: str) -> None:
    """What computes the reference in fp64 is right on the problem and on its tails, with rows apart."""
    declared = family(line.partition(" ")[0])
    problem = parse_problem(line)

    def load(library: Path, symbol: str) -> Any:
        called = parse_problem(symbol)
        arguments = declared.arguments(called)

        def kernel(*given: Any) -> None:
            values = {a.name: value for a, value in zip(arguments, given, strict=True)}
            scalars = {a.name: values[a.name] for a in arguments if a.kind == "scalar"}
            tensors = {a.name: values[a.name] for a in arguments if a.kind == "in"}
            rows = next(iter(tensors.values())).shape[0]
            for name, found in declared.wanted(called, Inputs(tensors, scalars), 0, rows).items():
                if name in values:
                    values[name].copy_(found.clone())

        return kernel

    engine = new_engine(load=load)
    assert engine.open(problem, 0)["reference"] == ON_CPU[line]
    for each in (problem, *declared.tails(problem)):
        subject = Candidate("right", Path("none"), str(each), Launch((), 0), problem, each, Launch((), 0))
        verdict = engine.check(subject, each)
        assert verdict.ok and verdict.compared == 1, verdict


QUACKS_OWN = """
import json, cutlass, quack.rmsnorm
from quack.rmsnorm_config import RmsNormFwdConfig
from quack.softmax import Softmax
found = []
for name, dtype in (("bf16", cutlass.BFloat16), ("fp32", cutlass.Float32)):
    for n in (64, 128, 1024, 3072, 4096, 6144, 8192, 16384, 32768, 65536, 131072):
        norm = RmsNormFwdConfig.from_analytical_heuristic(n, dtype.width, arch_major=9)
        soft = Softmax(dtype, n)
        soft._set_cluster_n()
        found.append([
            name, n,
            [norm.num_threads, norm.threads_per_row, norm.cluster_n, norm.reload_from or "none"],
            [soft._num_threads(), soft._threads_per_row(), soft.cluster_n],
        ])
print(json.dumps(found))
"""


@pytest.mark.dsl
@needs("quack")
@needs("triton")
def test_defaults_are_what_quack_runs() -> None:
    done = subprocess.run([sys.executable, "-c", QUACKS_OWN], capture_output=True, text=True, check=True)
    for dtype, n, norm, soft in json.loads(done.stdout.splitlines()[-1]):
        own = _default("quack_rmsnorm", n, dtype)
        assert [own[key] for key in ("threads", "per_row", "cluster", "reload")] == norm, n
        own = _default("quack_softmax", n, dtype)
        assert [own[key] for key in ("threads", "per_row", "cluster")] == soft, n


def _default(name: str, n: int, dtype: str) -> Any:
    problem = family(name).parse(f"{name} 512x{n} {dtype}")
    return default_config(find_space(name, ARCH), problem)


FLASH_ATTENTIONS_OWN = """
import json
from flash_attn.cute.interface import _tile_size_fwd_sm90 as choose
print(json.dumps([
    [size, causal, *vars(choose(size, size, causal, False)).values()]
    for size in (64, 80, 96, 128, 160, 192, 256) for causal in (False, True)
]))
"""


@pytest.mark.dsl
@needs("flash_attn")
@needs("triton")
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_varlen"])
def test_defaults_are_what_flash_attention_runs(name: str) -> None:
    family(name)
    shape = "512x512x512" if name == "flash_attention" else "512x3"
    for size, causal, tile_m, tile_n, in_registers, overlap, *_ in _flash_attentions_own():
        problem = parse_problem(f"{name} {shape}x8x2x{size} bf16{' causal' if causal else ''}")
        own = default_config(find_space(name, ARCH), problem)
        found = (own["tile_m"], own["tile_n"], own["weights"] == "registers", own["overlap"])
        assert found == (tile_m, tile_n, in_registers, overlap), (size, causal)


@cache
def _flash_attentions_own() -> list[Any]:
    command = [sys.executable, "-c", FLASH_ATTENTIONS_OWN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


#: Other sizes of heads, which are other kernels.
HEADS = (
    ("flash_attention", "2x512x512x8x2x128 bf16 causal"),
    ("flash_attention", "2x512x512x8x8x256 bf16"),
    ("nvidia_fmha", "2x512x512x8x2x64 bf16"),
    ("nvidia_fmha", "2x512x512x8x8x256 bf16 causal"),
)


@pytest.mark.dsl
@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(name, words, marks=needs(NEEDS[name][0]))
        for name, words in (*((name, words) for name, (_, words) in NEEDS.items()), *HEADS)
    ],
)
def test_authors_defaults_compile_without_a_gpu(name: str, words: str, compiler: Builder) -> None:
    family(name)
    problem = parse_problem(f"{name} {words}")
    space = find_space(name, ARCH)
    source = render(problem, default_config(space, problem), ARCH)
    ((_, result),) = compiler.build([source])
    assert isinstance(result, Artifact), result
    assert result.resources.spill_store_bytes == 0


@pytest.mark.dsl
@needs("helpers.fmha_helpers")
def test_tiles_that_nvidias_gemm_refuses_are_rejected_in_its_words(tmp_path: Path) -> None:
    """Beside legal ones, which compile without spills; a refusal costs no compilation."""
    text = (DECLARATIONS / "nvidia_gemm.py").read_text(encoding="utf-8")
    text = text.replace("_TILES = [", "_TILES = [(256, 128), (256, 256), ").replace(
        '"nvidia_gemm",', '"wide_gemm",'
    )
    declaration = tmp_path / "wide_gemm.py"
    declaration.write_text(text, encoding="utf-8")
    wide = load_kernel(declaration)
    problem, space = wide.parse("wide_gemm 4096x4096x4096 bf16"), find_space("wide_gemm", ARCH)
    tiles = ((256, 128), (256, 256), (64, 256), (128, 128))
    default = default_config(space, problem)
    wanted = [default.replace(tile_m=m, tile_n=n, cluster_m=c) for m, n in tiles for c in (1, 2)]
    sources = {render(problem, config, ARCH).text: config for config in wanted}
    with Builder(Store(tmp_path / "store"), workers=2) as builder:
        built = list(builder.build(render(problem, config, ARCH) for config in wanted))
    assert len(built) == len(wanted) == 8
    for source, result in built:
        if sources[source.text]["tile_m"] == 256:
            assert isinstance(result, Failure) and result.outcome == "rejected", result
            assert result.message == "CTA tile shape M must be 64/128"
        else:
            assert isinstance(result, Artifact), result
            assert 0 < result.resources.registers <= 255 and result.resources.spill_store_bytes == 0


def test_what_is_fetched_must_be_what_was_tuned(tmp_path: Path) -> None:
    source = tmp_path / "cutlass" / "examples" / "python" / "CuTeDSL"
    name, _ = fetch_foreign.FILES[0]
    (source / name).parent.mkdir(parents=True)
    (source / name).write_text("another version\n", encoding="utf-8")
    with pytest.raises(fetch_foreign.StoreError, match=rf"{name} has the SHA-256 \w+; that of the version"):
        fetch_foreign.fetch(tmp_path / "out", (tmp_path / "cutlass").as_uri())
    with pytest.raises(fetch_foreign.StoreError, match="cannot be fetched"):
        fetch_foreign.fetch(tmp_path / "out", (tmp_path / "elsewhere").as_uri())
    assert not (tmp_path / "out").exists()

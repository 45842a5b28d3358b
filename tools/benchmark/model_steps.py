"""Steps of a Llama-shaped model as functions to be timed: prefill, decoding, training, and their GEMMs."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
from llama import SIZES, Llama

from cutegen.errors import CheckError
from cutegen.families.registry import parse_problem
from cutegen.torch_ops.gated_modules import GatedCall, gated_call
from cutegen.torch_ops.warm_sources import read_source

__all__ = [
    "Captured",
    "Step",
    "apart",
    "compiled_blocks",
    "decode",
    "decode_inputs",
    "gated_products",
    "gemms",
    "make_model",
    "memory_of_mixed_steps",
    "prefill",
    "problems",
    "problems_between",
    "require_close",
    "timed",
    "training",
]

#: Does the work once; returns what can be compared, or nothing.
Step = Callable[[], Any]
#: Largest difference of two results, in norm: bf16 rounds by 2^-9, several times in each of 32 layers.
_TOLERANCE = 0.1


def make_model(size: str, layers: int, device: str) -> Llama:
    """Return a model in bf16 with random weights.

    Args:
        size: A name of :data:`llama.SIZES`.
        layers: How many; 0 for as many as the size says.
        device: Where.
    """
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Llama(size, layers)
    finally:
        torch.set_default_dtype(before)


def decode(model: Llama, size: str, texts: int, context: int) -> Step:
    """Return a step that computes one token of each text, the last of ``context`` places."""
    inputs = decode_inputs(model, size, texts, context)
    return torch.no_grad()(lambda: model(*inputs))


def decode_inputs(model: Llama, size: str, texts: int, context: int) -> tuple[Any, Any, Any]:
    """Return what such a step calls the model with."""
    device = model.head.weight.device
    width, _, heads, groups = SIZES[size][:4]
    shape = (len(model.blocks), 2, texts, groups, context, width // heads)
    caches = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    tokens = _tokens(model, texts, 1)
    return tokens, torch.tensor([context - 1], device=device), caches


def _tokens(model: Llama, texts: int, length: int) -> Any:
    """Return tokens that differ: equal ones make equal rows, which take less power than those of texts."""
    device, generator = model.head.weight.device, torch.Generator().manual_seed(1)
    return torch.randint(model.embed.num_embeddings, (texts, length), generator=generator).to(device)


def prefill(model: Llama, length: int) -> Step:
    """Return a step that reads one text of so many tokens, and computes the next."""
    tokens, at = _tokens(model, 1, length), torch.arange(length, device=model.head.weight.device)
    return torch.no_grad()(lambda: model(tokens, at))


def training(model: Llama, length: int) -> Step:
    """Return a step that computes the gradients of all layers; embedding and head have no part in it."""
    device = model.head.weight.device
    model.embed.requires_grad_(False)
    tokens, at = _tokens(model, 1, length), torch.arange(length, device=device)

    first: Any = model.blocks[0]
    shape, generator = (1, length, model.embed.embedding_dim), torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        hidden: Any = model(tokens, at, head=False)
        hidden.backward(gradient)  # no square of what a norm returns: its sum does not depend on anything
        found: torch.Tensor = first.qkv.weight.grad
        return found

    return step


def shapes(model: Llama, step: Step) -> list[tuple[int, Any]]:
    """Return rows and weight of each linear layer, in the order in which a step calls them."""
    found: list[tuple[int, Any]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, given: found.append((given[0].numel() // given[0].shape[-1], module.weight))
        )
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def gemms(model: Llama, step: Step, linear: Callable[..., Any]) -> Step:
    """Return a step that only computes the products of the linear layers, in their order."""
    inputs: dict[tuple[int, int], Any] = {}
    calls = []
    for rows, weight in shapes(model, step):
        key = rows, weight.shape[1]
        if key not in inputs:
            inputs[key] = torch.randn(key, device=weight.device).to(weight.dtype)
        calls.append((inputs[key], weight))

    @torch.no_grad()
    def run() -> None:
        for x, weight in calls:
            linear(x, weight)

    return run


def problems(model: Llama, step: Step, *, backward: bool = False) -> dict[str, int]:
    """Return the lines of the GEMMs of a step, with how often each is called."""
    found: dict[str, int] = {}
    for rows, weight in shapes(model, step):
        n, k = weight.shape
        lines = [f"gemm {rows}x{n}x{k} bf16 kk"]
        if backward:
            lines += [f"gemm {rows}x{k}x{n} bf16 kn", f"gemm {n}x{k}x{rows} bf16 mn"]
        for text in lines:
            found[text] = found.get(text, 0) + 1
    return found


def problems_between(model: Llama, step: Step, *, backward: bool = False) -> list[str]:
    """Return the lines of the norms and gates of a step."""
    rows = max(rows for rows, _ in shapes(model, step))
    found = [str(p) for p in read_source(model, rows, None).problems if p.family != "gemm"]
    if backward:
        found += [line.replace("gated ", "gated_backward ") for line in found if line.startswith("gated ")]
        found += [f"{line} pre" for line in found if line.startswith("gated_gemm ")]
    return found


def gated_products(model: Llama, step: Step) -> list[str]:
    """Return the lines of the gated products of a step, as :func:`problems` does those of all products."""
    rows, found = max(rows for rows, _ in shapes(model, step)), dict[str, None]()
    for module in model.modules():
        call = gated_call(module)
        if isinstance(call, GatedCall) and not call.up:
            weight: Any = module.get_submodule(call.gate).weight
            columns, k = weight.shape
            line = f"gated_gemm {rows}x{columns // 2}x{k} bf16 activation={call.activation}"
            found[str(parse_problem(line))] = None
    return list(found)


class Captured:
    """A step in a CUDA graph; where there is no GPU, the step itself."""

    def __init__(self, step: Step) -> None:
        self._step = step  # what it refers to is what the graph reads
        self._graph: Any = None
        self.result = step()
        if not torch.cuda.is_available():
            return
        cuda: Any = torch.cuda
        with cuda.stream(cuda.Stream()):
            step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = step()

    def __call__(self) -> Any:
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self.result


def compiled_blocks(model: Llama, backend: Any) -> None:
    """Compile the blocks of a model, all alike, by a backend; None undoes it."""
    for block in model.blocks:
        if backend is None:
            block._compiled_call_impl = None
        else:
            block.compile(backend=backend, dynamic=False)


def memory_of_mixed_steps(model: Llama, backend: Any, steps: int = 1000) -> dict[str, Any]:
    """Return the bytes that torch holds after a tenth of so many steps, and after all of them.

    Texts of four lengths take turns under ``mode="reduce-overhead"``, which keeps a CUDA graph for each.
    """
    device, lengths = model.head.weight.device, (16, 64, 128, 256)
    tokens = [_tokens(model, 1, length) for length in lengths]
    places = [torch.arange(length, device=device) for length in lengths]
    compiler: Any = torch.compiler
    run: Any = torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=True)

    def held() -> list[int]:
        if not torch.cuda.is_available():
            return [0, 0]
        torch.cuda.synchronize()
        return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]

    early: list[int] = []
    with torch.no_grad():
        for at in range(steps):
            compiler.cudagraph_mark_step_begin()
            run(tokens[at % len(lengths)], places[at % len(lengths)])
            if at == steps // 10:
                early = held()
    names = ("allocated", "reserved")
    found = {"early": dict(zip(names, early, strict=True)), "late": dict(zip(names, held(), strict=True))}
    return {"steps": steps, "lengths": list(lengths), "layers": len(model.blocks), **found}


def require_close(found: Any, want: Any, what: str) -> None:
    """Compare two results.

    Raises:
        CheckError: They differ by more than rounding explains.
    """
    difference = apart(found, want)
    if not difference <= _TOLERANCE:
        raise CheckError(
            f"{what}: cutegen and torch differ by {difference:.3g} in norm; allowed: {_TOLERANCE}"
        )


def apart(found: Any, want: Any) -> float:
    """Return the norm of a difference over that of ``want``."""
    return float((found.double() - want.double()).norm() / want.double().norm())


def timed(
    steps: Mapping[str, Step], rounds: int, settle_s: float, seed: int = 0
) -> dict[str, Sequence[float]]:
    """Return microseconds of each step, one sample a round; in a round, all run in random order.

    Args:
        steps: By name.
        rounds: Samples of each.
        settle_s: Seconds in which they take turns before.
        seed: Of the order.
    """
    rng, names = random.Random(seed), list(steps)
    found: dict[str, list[float]] = {name: [] for name in names}
    until = time.monotonic() + settle_s
    while True:
        for step in steps.values():
            _time_us(step)
        if time.monotonic() >= until:
            break
    for _ in range(rounds):
        rng.shuffle(names)
        for name in names:
            found[name].append(_time_us(steps[name]))
    return dict(found)


def _time_us(step: Step) -> float:
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        step()
        return 1e6 * (time.perf_counter() - begun)
    cuda: Any = torch.cuda
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))

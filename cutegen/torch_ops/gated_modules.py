"""Gated MLPs, known by what their forward traces to: the gate is part of the GEMM before it, or a kernel.

Where the layers before the gate are swapped and nothing else, one kernel computes them and the gate. Others
are called as modules, so that their hooks, adapters, shards and parametrisations stay what they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.dtypes import short_dtype
from cutegen.families.gated.family import GATED
from cutegen.families.gated_gemm.family import GATED_GEMM
from cutegen.families.gemm.stand_in import activation as activation_of
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops.gated_gemm import gated_gemm, has_kernels, prepare
from cutegen.torch_ops.gates import gated
from cutegen.torch_ops.linear_modules import plain_weight
from cutegen.torch_ops.swaps import Call, answered, has_hooks, shadow, tried

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, Node

__all__ = ["GatedCall", "gated_call", "gated_problems"]

_DEVICE = "cuda"
_STEP = 8  # elements of 2 bytes by which rows are aligned


@dataclass(frozen=True)
class GatedCall(Call):
    """How a swapped gated MLP computes.

    Attributes:
        activation: A name that :func:`cutegen.gated` knows.
        gate: Name of the layer whose result is activated.
        up: Name of the layer whose result it is multiplied by; empty if ``gate`` computes both, side by side.
        down: Name of the layer behind.
        quiet: Names of modules without parameters, such as the activation, that are not called.
        classes: What these were when the module was swapped.
    """

    activation: str
    gate: str
    up: str
    down: str
    quiet: tuple[str, ...] = ()
    classes: tuple[type, ...] = ()
    compiled: ClassVar[str] = "a gated MLP under torch.compile, which fuses its activation"
    prepare = staticmethod(prepare)

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (x,) = args
        if self.quiet and (reason := self._changed(module)):
            fallbacks.count(f"a gated MLP: {reason}")
            return forward(x)
        return module.get_submodule(self.down)(self._hidden(module, x))

    def _changed(self, module: Any) -> str:
        """Return why a module that is not called must be now; else nothing."""
        for name, known in zip(self.quiet, self.classes, strict=True):
            part = module._modules.get(name)
            if type(part) is not known or "forward" in vars(part):
                return "its activation is another one than when it was swapped"
            if has_hooks(part):
                return "its activation has hooks"
        return ""

    def _hidden(self, module: Any, x: Any) -> Any:
        """Return what the layer behind the gate is called with."""
        layers = [module.get_submodule(name) for name in (self.gate, self.up) if name]
        weights = _weights(x, layers)
        if weights is None:
            return self._in_steps(x, *layers)
        return answered(
            _product, lambda: self._in_steps(x, *layers), "a gated GEMM", x, *weights, self.activation
        )

    def _in_steps(self, x: Any, gate: Any, up: Any = None) -> Any:
        return self._gated(gate(x), None if up is None else up(x))

    def _gated(self, gate: Any, up: Any) -> Any:
        if gate.device.type != _DEVICE:
            fallbacks.count(f"a gated MLP: the input is on {gate.device.type}")
            return _by_torch(gate, up, self.activation)
        if up is not None and up.dtype != gate.dtype:
            fallbacks.count(f"a gated MLP: gate and up differ in dtype: {gate.dtype}, {up.dtype}")
            return _by_torch(gate, up, self.activation)
        name = self.activation
        return answered(gated, lambda: _by_torch(gate, up, name), "a gated MLP", gate, up, name)


def _weights(x: Any, layers: list[Any]) -> tuple[Any, Any] | None:
    """Return the weight of gates and that of what they gate, None if one holds both.

    None where no kernel computes all of it, or layers must be called.
    """
    import torch

    if x.device.type != _DEVICE or x.dtype not in (torch.bfloat16, torch.float16) or not x.numel():
        return None
    weights = [plain_weight(layer) for layer in layers]
    if any(weight is None or weight.dtype != x.dtype for weight in weights):
        return None
    if torch.is_autocast_enabled(_DEVICE) or not has_kernels(x.device):
        return None
    return weights[0], weights[1] if len(weights) > 1 else None


def _product(x: Any, w: Any, up: Any, activation: str) -> Any:
    return gated_gemm(x, w, activation, up=up)


def _by_torch(gate: Any, up: Any, activation: str) -> Any:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return activation_of(activation)(gate) * up


def gated_call(module: torch.nn.Module) -> GatedCall | str | None:
    """Return how a gated MLP may call cutegen, why it may not, or None if it does not look like one.

    One of the sizes of a gated MLP is traced; a forward that computes anything else beside is refused.
    """
    layers = {name: child for name, child in module.named_children() if _has_parameters(child)}
    quiet = tuple(name for name, _ in module.named_children() if name not in layers)
    if module._parameters or module._buffers or not _fits(list(map(_sizes, layers.values()))):
        return None
    if any(has_hooks(module.get_submodule(name)) for name in quiet):
        return "its activation has hooks"
    graphs = [tried(partial(_trace, shadow(module, training))) for training in (True, False)]
    if None in graphs:
        return "its forward cannot be traced"
    found, evaluated = (_match(graph, module) for graph in graphs)
    if found is None or evaluated is None:
        return "its forward is not that of a gated MLP"
    if found != evaluated:
        return "its forward is another one in training"
    return GatedCall(*found, quiet, tuple(type(module.get_submodule(name)) for name in quiet))


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _sizes(layer: Any) -> tuple[Any, Any]:
    """Return how many features a layer takes and returns, as far as it says."""
    return getattr(layer, "in_features", None), getattr(layer, "out_features", None)


def _fits(sizes: list[tuple[Any, Any]]) -> bool:
    """Return whether layers of these sizes may be gate, up and down in any order, or both in one and down."""
    if any(None in pair for pair in sizes) or len(sizes) not in (2, 3):
        return False
    return any(
        all(other == (down[1], 2 * down[0] // (len(sizes) - 1)) for other in sizes[:at] + sizes[at + 1 :])
        for at, down in enumerate(sizes)
    )


def _trace(module: torch.nn.Module) -> Graph:
    """Return the graph of a module's forward, with its layers as they are called."""
    from torch import fx

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
            return _has_parameters(m) or super().is_leaf_module(m, module_qualified_name)

    found: Graph = Tracer().trace(module)
    return found


def _match(graph: Graph, module: torch.nn.Module) -> tuple[str, str, str, str] | None:
    """Return activation, gate, up and down if a graph is ``down(act(gate(x)) * up(x))`` and nothing else."""
    import torch

    *nodes, end = graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    down = end.args[0]
    if len(inputs) != 1 or inputs[0].args or not _is_call(down):
        return None
    product = down.args[0]
    if product.op not in ("call_function", "call_method") or product.kwargs or len(product.args) != 2:
        return None
    if product.target not in (operator.mul, torch.mul, "mul"):
        return None
    for activated, up in (product.args, product.args[::-1]):
        name = _activation(activated, module)
        if name and (found := _factors(activated.args[0], up, inputs[0])) is not None:
            gate, second, seen = found
            if len(nodes) == len({*seen, activated, product, down, inputs[0]}):
                return name, gate, second, down.target
    return None


def _factors(gate: Any, up: Any, x: Node) -> tuple[str, str, tuple[Node, ...]] | None:
    """Return the layers that compute gate and up of x, the second empty if both are halves, and all nodes."""
    import torch

    if _is_call(gate, x) and _is_call(up, x) and gate.target != up.target:
        return gate.target, up.target, (gate, up)
    if not all(getattr(part, "target", None) is operator.getitem for part in (gate, up)):
        return None
    (both, first), (same, second) = gate.args, up.args
    if both is not same or (first, second) != (0, 1) or both.target not in (torch.chunk, "chunk"):
        return None
    packed, *rest = both.args
    if [*rest, *both.kwargs.values()] != [2, -1] or not set(both.kwargs) <= {"chunks", "dim"}:
        return None
    return (packed.target, "", (gate, up, both, packed)) if _is_call(packed, x) else None


def _is_call(node: Any, x: Node | None = None) -> bool:
    """Return whether a node calls a layer on one operand, which is ``x`` if given."""
    called = getattr(node, "op", "") == "call_module" and len(node.args) == 1 and not node.kwargs
    return called and (x is None or node.args[0] is x)


def _activation(node: Any, module: torch.nn.Module) -> str:
    """Return the name of the activation that a node is; else nothing."""
    import torch

    functional, target = torch.nn.functional, getattr(node, "target", "")
    if getattr(node, "op", "") == "call_module":
        layer = module.get_submodule(target)
        names = {torch.nn.SiLU: "silu", torch.nn.ReLU: "relu", torch.nn.GELU: "gelu"}
        name, form = names.get(type(layer), ""), getattr(layer, "approximate", "none")
    else:
        functions: dict[Any, str] = {
            functional.silu: "silu",
            functional.gelu: "gelu",
            functional.relu: "relu",
            torch.relu: "relu",
            "relu": "relu",
        }
        name = functions.get(target, "") if len(getattr(node, "args", ())) == 1 else ""
        form = node.kwargs.get("approximate", "none") if name else "none"
    return "gelu_tanh" if name == "gelu" and form == "tanh" else name


def gated_problems(module: Any, call: GatedCall) -> tuple[str, ...]:
    """Return the lines of what a gated MLP poses for one row before its last layer; none without a kernel.

    Both that of its gate alone and that of the GEMM with it: hooks and the like decide which is called.
    """
    layer = module.get_submodule(call.gate)
    weight = getattr(layer, "weight", None)
    dtype = "" if weight is None else short_dtype(str(weight.dtype))
    if weight is None or weight.device.type != _DEVICE or dtype not in GATED.options[0].values:
        return ()
    n, layout = (_sizes(layer)[1], " layout=split") if call.up else (_sizes(layer)[1] // 2, "")
    more = f"{dtype} activation={call.activation}{layout}"
    found = [f"gated 1x{n} {more}"]
    if dtype in GATED_GEMM.options[0].values and layer.bias is None and not weight.shape[1] % _STEP:
        found.append(f"gated_gemm 1x{n}x{weight.shape[1]} {more}")
    return tuple(found)

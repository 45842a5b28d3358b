"""``torch.compile(model, backend="cutegen")``: Inductor, with its GEMMs replaced by the operators of cutegen.

A pass runs over each graph, forward or backward, before Inductor's own rewriting. It replaces ``mm``,
``addmm``, ``bmm`` and ``_scaled_mm`` where kernels take the operands, and takes a bias, an addend and an
activation behind them along, or a gate. It never adds a guard: rows may be symbols, and the config is chosen
at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import cutegen
from cutegen.errors import OperandError
from cutegen.families.gemm.operands import out_dtype_name
from cutegen.families.gemm.problem import LARGEST_SIZE
from cutegen.text import did_you_mean
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops.gated_gemm import has_kernels, prepare
from cutegen.torch_ops.graph_gates import gated_product, insert
from cutegen.torch_ops.graph_patterns import activation_behind, patterns
from cutegen.torch_ops.registration import pack

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, Node

__all__ = ["compile_with_cutegen", "inductor_options", "prepare"]

#: Part of the key of Inductor's cache: raised with every change of what the pass does.
_VERSION = 4
_DEVICE = "cuda"
_ROW_BYTES = 16  # what TMA asks of a pitch
_DTYPES, _FP8 = ("torch.bfloat16", "torch.float16"), ("torch.float8_e4m3fn", "torch.float8_e5m2")
#: Options of a GEMM, in the order of :data:`cutegen.torch_ops.gemm_plan.Options`.
_PLAIN: dict[str, Any] = {
    "c": None,
    "alpha": 1.0,
    "beta": 1.0,
    "bias": None,
    "activation": "",
    "out_dtype": None,
    "config": None,
    "more": None,
}


def compile_with_cutegen(module: Any, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Compile a graph: the backend that ``torch.compile(model, backend="cutegen")`` finds by its entry point.

    Args:
        module: What Dynamo captured.
        example_inputs: Its inputs.
        **settings: ``options`` of ``torch.compile``, for Inductor.

    Raises:
        OperandError: There is a setting that Inductor's options do not know how to hold, or an option that
            Inductor does not have.
    """
    from torch._inductor.compile_fx import compile_fx

    options = settings.pop("options", None) or {}
    mode = settings.pop("mode", None)
    if settings:
        names = ", ".join(settings)
        raise OperandError(f"backend 'cutegen' does not know {names}; it takes mode and options")
    if options:
        _require_known(options)
    patches = {**_mode(mode), **options, **inductor_options()}
    compiled: Any = compile_fx(module, example_inputs, config_patches=patches)
    found: Callable[..., Any] = compiled
    return found


def inductor_options(*, gates: bool = True) -> dict[str, Any]:
    """Return what makes Inductor use cutegen, for ``torch.compile(model, options={...})`` with more of yours.

    Padding is off: kernels take any number of rows.

    Args:
        gates: Whether the gate of an MLP becomes part of the GEMM before it; else it is left to Inductor.
    """
    prepare()
    return {"post_grad_custom_pre_pass": _pass(gates), "shape_padding": False}


def _require_known(options: dict[str, Any]) -> None:
    import torch

    known: Any = torch._inductor.config.get_config_copy()
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OperandError(
                f"Inductor has no option {name!r}{hint}; torch._inductor.list_options() has all"
            )


def _mode(mode: str | None) -> dict[str, Any]:
    import torch

    if mode is None or mode == "default":
        return {}
    found: dict[str, Any] = torch._inductor.list_mode_options(mode)
    return found


@cache
def _pass(gates: bool = True) -> Any:
    """Return the pass; its base class is torch's, by which Inductor knows how to cache what it made."""
    import torch
    from torch._inductor.custom_graph_pass import CustomGraphPass

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        patterns(dtype)  # traced now: while a graph is being compiled, torch would trace on symbols

    class Replace(CustomGraphPass):  # type: ignore[misc, unused-ignore]
        """Replaces GEMMs by operators of cutegen, as graph and GPU say; what it does depends on no table."""

        def __call__(self, graph: Graph) -> None:
            if gates:
                _replace_gated(graph)
            for node in list(graph.nodes):
                call = _gemm_of(node) if node.op == "call_function" and node.users else None
                if isinstance(call, str):
                    fallbacks.count(f"a GEMM of a compiled graph: {call}")
                elif call is not None:
                    _replace(node, *call)
            graph.lint()

        def uuid(self) -> Any:
            return "cutegen", cutegen.__version__, _VERSION, gates

    return Replace()


def _replace_gated(graph: Graph) -> None:
    """Put one operator in the place of GEMMs and the gate behind them, where kernels take the operands."""
    for node in list(graph.nodes):
        found = gated_product(node, _known) if node.users else None
        if found is None:
            continue
        x, w = (_value(argument) for argument in node.args)
        if not (_unfit(x) or _unfit(w)) and has_kernels(x.device):
            insert(found, strides_matter=not _fit_in_any_layout(x, w))


def _gemm_of(node: Node) -> tuple[Any, Any, dict[str, Any]] | str | None:
    """Return operands and options of the GEMM that a node is, why it is not ours, or None if it is none."""
    import torch

    aten = torch.ops.aten
    if node.target is aten._scaled_mm.default:
        return _scaled(node)
    if node.target in (aten.mm.default, aten.bmm.default):
        a, b = node.args
        options: dict[str, Any] = {}
    elif node.target in (aten.addmm.default, aten.baddbmm.default):
        addend, a, b = node.args
        options = _addend(node, addend, node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1))
        if not options:
            return "what it adds is neither a bias nor of the result's shape and dtype"
    else:
        return None
    left, right = _value(a), _value(b)
    if reason := _unfit(left) or _unfit(right):
        return reason
    if not left.dtype == right.dtype == _value(node).dtype:
        return f"operands and result differ in dtype: {left.dtype}, {right.dtype}, {_value(node).dtype}"
    return a, b, options


def _scaled(node: Node) -> tuple[Any, Any, dict[str, Any]] | str:
    """Return the same of a GEMM of fp8 operands with one scale each, contiguous along k."""
    import torch

    names = [argument.name for argument in torch.ops.aten._scaled_mm.default._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    a, b, bias, scales = given["self"], given["mat2"], given.get("bias"), (given["scale_a"], given["scale_b"])
    left, right, result = _value(a), _value(b), _value(node)
    try:
        out_dtype_name(left.dtype, result.dtype)
    except OperandError:
        return f"torch._scaled_mm of {left.dtype} to {result.dtype}"
    ones = all(_same(_value(scale).numel(), 1) and _value(scale).dtype == torch.float32 for scale in scales)
    along_k = _same(left.stride(1), 1) and _same(right.stride(0), 1)
    if reason := _unfit(left, _FP8) or _unfit(right, _FP8):
        return reason
    if not (ones and along_k and left.dtype == right.dtype) or given.get("scale_result") is not None:
        return "torch._scaled_mm with other scales or layouts than one each and contiguous along k"
    if bias is not None and _value(bias).dtype != result.dtype:
        return f"the bias is {_value(bias).dtype}, the result {result.dtype}"
    more = (*scales, bool(given.get("use_fast_accum")), False)
    return a, b, {"bias": bias, "out_dtype": result.dtype, "more": more}


def _addend(node: Node, addend: Any, alpha: Any, beta: Any) -> dict[str, Any]:
    """Return the options for what ``addmm`` adds: a bias along the columns, or a matrix; else nothing."""
    value, result = _value(addend), _value(node)
    if value.dtype != result.dtype or not all(isinstance(x, int | float) for x in (alpha, beta)):
        return {}
    if value.dim() == 1 and value.stride(0) == 1 and beta == 1 and _same(value.shape[0], result.shape[-1]):
        return {"bias": addend, "alpha": float(alpha)}
    if _same_matrix(value, result):
        return {"c": addend, "alpha": float(alpha), "beta": float(beta)}
    return {}


def _replace(node: Node, a: Any, b: Any, options: dict[str, Any]) -> None:
    """Put our operator in the place of ``node`` and of what it takes along."""
    import torch

    view, last = None, node
    behind = _only_user(node)
    if behind is not None and behind.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        view, behind = behind, _only_user(behind)  # rows of more than one dimension
    seen = view or node
    # The kernel adds C before the bias and rounds once: the sums of torch in another order.
    takes_addend = behind is not None and not options.keys() & {"c", "more"}
    if takes_addend and behind is not None and (addend := _residual(seen, behind)) is not None:
        options, seen, last = {**options, "c": addend}, behind, behind
    if (found := activation_behind(seen)) is not None:
        options, last = {**options, "activation": found[0]}, found[1]
    _insert(node, last, view if last is not node else None, a, b, options)


def _insert(node: Node, last: Node, view: Node | None, a: Any, b: Any, options: dict[str, Any]) -> None:
    """Put the operator in the place of ``last``, seen through ``view`` if there is one."""
    import torch

    full = {**_PLAIN, **options}
    aten, graph = torch.ops.aten, node.graph
    with graph.inserting_before(last):
        if view is not None and full["c"] is not None:
            columns = _value(node).shape[-1]
            flat = graph.call_function(aten.view.default, (full["c"], [-1, columns]))
            flat.meta["val"] = _value(full["c"]).view(-1, columns)
            full["c"] = flat
        arguments = (a, b, *pack((*full.values(),)))
        made = graph.call_function(torch.ops.cutegen.gemm.default, arguments)
        made.meta = dict(node.meta)
        if full["c"] is not None or full["more"] is not None or not _fit_in_any_layout(_value(a), _value(b)):
            # Inductor keeps the strides that the pass relied on: those of the operands in eager mode.
            made.meta["eager_input_vals"] = (tuple(_value(x) for x in arguments), {})
        if view is not None:
            made = graph.call_function(aten.view.default, (made, view.args[1]))
            made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _residual(node: Node, behind: Node) -> Any:
    """Return what an addition behind ``node`` adds, if the kernel can add it."""
    import torch

    if behind.target not in (torch.ops.aten.add.Tensor, operator.add) or behind.kwargs.get("alpha", 1) != 1:
        return None
    left, right = behind.args
    other = right if left is node else left
    if other is node or not hasattr(other, "meta") or not _same_matrix(_value(other), _value(node)):
        return None
    return other if _value(behind).dtype == _value(node).dtype else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _value(item: Any) -> Any:
    return item.meta["val"] if hasattr(item, "meta") else item


def _unfit(matrix: torch.Tensor, dtypes: tuple[str, ...] = _DTYPES) -> str:
    """Return why it is not sure that kernels read a tensor of this shape and these strides; else nothing."""
    if matrix.device.type != _DEVICE:
        return f"an operand is on {matrix.device.type}"
    if str(matrix.dtype) not in dtypes:
        return f"an operand is {matrix.dtype}"
    if _known(matrix.numel() == 0):
        return "an operand is empty"
    if any(_known(size > LARGEST_SIZE) for size in matrix.shape):
        return f"an operand has an extent above {LARGEST_SIZE}"
    if matrix.dim() == 3 and not _known(matrix.stride(0) >= matrix.shape[1] * matrix.shape[2]):
        return "matrices of a batch overlap"
    along, pitch = matrix.stride(-1), matrix.stride(-2)
    if _known(along != 1):
        along, pitch = pitch, along
    aligned = _known(pitch * matrix.element_size() % _ROW_BYTES == 0)
    if _known(along == 1) and aligned and _known(pitch > 1):
        return ""
    return "rows of an operand are not known to be contiguous and to start at multiples of 16 bytes"


def _fit_in_any_layout(*matrices: torch.Tensor) -> bool:
    """Return whether kernels read operands however their rows and columns lie.

    Then Inductor may choose. Where it must keep strides, it copies a view of what it has not yet computed,
    once for each operator: the gradient of a layer's output, which two GEMMs read, was written twice.
    """
    return all(
        _known(size * matrix.element_size() % _ROW_BYTES == 0)
        for matrix in matrices
        for size in matrix.shape[-2:]
    )


def _same_matrix(value: Any, result: Any) -> bool:
    """Return whether a tensor can be C: the result's shape and dtype, contiguous along its rows."""
    if value.dtype != result.dtype or value.dim() != result.dim():
        return False
    shapes = all(_same(x, y) for x, y in zip(value.shape, result.shape, strict=True))
    return shapes and bool(value.is_contiguous())


def _same(x: Any, y: Any) -> bool:
    return _known(x == y)


def _known(fact: Any) -> bool:
    """Return whether a fact about sizes holds without a new guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(fact))

"""The operators: ``gemm`` and ``linear`` on torch tensors, eager and under ``torch.compile``.

The warm path is Python on purpose: a tuple of shapes and strides, one probe of a dict, one call. A torch
custom op costs more than all of it together, so those are used only where torch must see an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cutegen.errors import CutegenError, OperandError
from cutegen.families.calls import require_tensor
from cutegen.families.gemm.operands import (
    Request,
    describe,
    refuse_inputs,
    refuse_part_of_c,
    refuse_shared,
    require_numbers,
)
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.workspace import GetWorkspace, Workspaces, new_workspace, torch_workspaces
from cutegen.system.forks import RenewedLock
from cutegen.torch_ops.family_operator import drop_family_plans
from cutegen.torch_ops.gemm_gradient import (
    activate,
    autocast,
    fused_activation,
    plain_linear,
    record_gemm,
    record_linear,
    refuse_gradients,
    require_columns,
)
from cutegen.torch_ops.gemm_plan import (
    AnyConfig,
    More,
    OperatorPlans,
    Options,
    Plan,
    as_config,
    explain_failure,
    fused_options,
    make_plan,
)
from cutegen.torch_ops.gemm_transforms import are_active, transformed_gemm
from cutegen.torch_ops.operator_values import count_modes, have_own_rules
from cutegen.torch_ops.registration import pack, register, unpack
from cutegen.torch_ops.written_tensors import write_counter

if TYPE_CHECKING:
    import torch

__all__ = [
    "default_dispatcher",
    "drop_plans",
    "gemm",
    "has_plans",
    "is_grad_enabled",
    "is_transforming",
    "linear",
    "must_trace",
    "prepare",
    "scaled_gemm",
    "use",
    "workspaces",
]

_SCALES = ("scale_a", "scale_b")
#: Plans are kept for so many kinds of call; a program with more starts over.
MAX_PLANS = 16384

_lock = RenewedLock()
_dispatcher: Dispatcher | None = None
_plans: dict[Any, Plan] = {}
_operator_plans = OperatorPlans()
_workspaces: Workspaces | None = None
_new_workspace: GetWorkspace = new_workspace
_Tensor: Any = None
_Parameter: Any = None


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: torch.Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    any_order: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor:
    """Return ``activation(alpha * a @ b + beta * c + bias)``, accumulated in fp32.

    The kernel is the one that the dispatch table names for this problem, else the default config's. The first
    call with new shapes, strides or dtypes looks it up. If it is not compiled yet, that happens in the
    background, and PyTorch or another kernel computes the result until it is ready; :func:`configure` has
    other ways.

    Gradients of a, b, c and bias are those of torch; those of a and b are GEMMs of cutegen. While autograd
    records, activations other than relu are calls of torch behind the kernel. Under autocast, operands in
    fp32 are cast, and others taken as they are.

    Args:
        a: (m, k) or (batch, m, k) on a GPU, contiguous along m or k.
        b: (k, n) or (batch, k, n), of the same dtype, contiguous along k or n.
        out: Where the result goes: (m, n) or (batch, m, n), contiguous along n.
        c: Added after scaling by ``beta``; shape and dtype of the result. May be ``out`` itself.
        alpha: Factor on the product.
        beta: Factor on ``c``; 0 ignores what ``c`` holds.
        bias: (n,) is added to every row, (m, 1) to every column; dtype of the result.
        activation: ``relu``, ``gelu`` (exact), ``gelu_tanh``, ``silu``, or nothing.
        out_dtype: dtype of the result; by default that of ``a``, bf16 for fp8, int32 for int8.
        any_order: Allow kernels that add partial sums in order of arrival: the last bits may differ from run
            to run.
        config: Overrides the choice: a complete config, or its text ``knob=value ...``. Not in the backward
            pass.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        ConfigError: ``config`` breaks rules; the message lists them.
        LaunchError: There is no kernel to launch, or it failed to.
        BuildError: The kernel was not there and does not compile.
    """
    more = (None, None, False, True) if any_order else None
    options = (c, alpha, beta, bias, activation, out_dtype, config, more)
    if (
        _is_compiling()
        or _count_modes()
        or (type(a) is not _Tensor and type(a) is not _Parameter)
        or (type(b) is not _Tensor and type(b) is not _Parameter)
        or (out is not None and type(out) is not _Tensor and type(out) is not _Parameter)
        or (c is not None and type(c) is not _Tensor and have_own_rules((c,)))
        or (
            bias is not None
            and type(bias) is not _Parameter
            and type(bias) is not _Tensor
            and have_own_rules((bias,))
        )
    ):
        return _through_torch(a, b, out, options)
    return _eager(a, b, out, options, _plans)


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "",
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor:
    """Return ``activation(scale_a * scale_b * a @ b + bias)`` of 8-bit operands.

    On Hopper operands in e4m3 may have a factor for every block instead: those of ``a`` for 128 elements of a
    row, those of ``b`` for 128 x 128. Sums of 128 products then are multiplied by both, and added up in fp32.

    Args:
        a: (m, k) in fp8 or int8, contiguous along k.
        b: (k, n), of the same dtype, contiguous along k.
        scale_a: One fp32 factor on the GPU; or (m, k / 128), rounded up, contiguous along m, which are the
            strides that ``torch._scaled_mm`` takes.
        scale_b: The factor of ``b``; or (k / 128, n / 128), rounded up, contiguous along k. torch's form,
            whose rows are padded to a multiple of 4, is taken too, and so is (n / 128, k / 128), the scales
            of the weight ``b.t()``. Where both have one shape, the contiguous axis is taken to be k.
        out: As for :func:`gemm`, like all that follows.
        bias: As there.
        activation: As there.
        out_dtype: dtype of the result, bf16 by default.
        fast_accum: Leave fp8 sums to the tensor cores, which keep about 14 bits of them, instead of adding
            them up in fp32 every 128 or 256 terms. Not with factors of blocks.
        config: As there.

    Raises:
        CutegenError: As :func:`gemm`.
    """
    more = (scale_a, scale_b, fast_accum, False)
    traced = _is_compiling()
    if out is None and out_dtype is None:
        out_dtype = _bfloat16
    options = (None, 1.0, 1.0, bias, activation, out_dtype, config, more)
    if (
        traced
        or _count_modes()
        or type(a) is not _Tensor
        or type(b) is not _Tensor
        or (out is not None and type(out) is not _Tensor)
        or have_own_rules((scale_a, scale_b, bias))
    ):
        return _through_torch(a, b, out, options)
    return _eager(a, b, out, options, _plans)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
    out: torch.Tensor | None = None,
    *,
    fuse_wgrad: bool = False,
) -> torch.Tensor:
    """Return ``activation(x @ w.T + bias)``, as ``torch.nn.functional.linear`` would; gradients included.

    Args:
        x: (..., k); leading dimensions are flattened, without a copy where strides allow.
        w: (n, k).
        bias: (n,), dtype of the result.
        activation: As for :func:`gemm`.
        out: (..., n), where the result goes; its leading dimensions must flatten without a copy.
        fuse_wgrad: Add the gradient of ``w`` to ``w.main_grad``, a contiguous (n, k) buffer in fp32, in the
            kernel that computes it. ``w.grad`` stays as it is, and ``w.grad_added_to_main_grad`` becomes
            True. Without a ``main_grad``, as ever. Eager calls only.

    Raises:
        OperandError: As :func:`gemm`.
        CutegenError: As :func:`gemm`.
    """
    if not (hasattr(x, "layout") and hasattr(w, "layout")):  # torch 2.6 does not know of methods here
        name, tensor = ("w", w) if hasattr(x, "layout") else ("x", x)
        raise OperandError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if w.dim() != 2:
        raise OperandError(f"w has shape {tuple(w.shape)}; it must be a matrix (n, k)")
    grad = x.requires_grad or w.requires_grad or (bias is not None and getattr(bias, "requires_grad", False))
    try:
        if x.dim() == 2 and not grad:  # the path of inference, which must stay short
            return gemm(x, w.t(), out=out, bias=bias, activation=activation)
        if (
            grad
            and out is None
            and (type(w) is _Parameter or type(w) is _Tensor)  # must_trace, without a call
            and (type(x) is _Tensor or type(x) is _Parameter)
            and not _is_compiling()
            and _is_grad_enabled()
        ):
            return _recorded_linear(x, w, bias, activation, fuse_wgrad)
        return _flat_linear(x, w, bias, activation, out)
    except OperandError:
        _refuse_layer(x, w, out, bias)  # in names of the layer
        raise


def _flat_linear(x: Any, w: Any, bias: Any, activation: str, out: Any) -> torch.Tensor:
    """Run a layer whose leading dimensions are flattened, if there are several."""
    require_columns(x, w)
    if x.dim() == 2:
        return gemm(x, w.t(), out=out, bias=bias, activation=activation)
    shape = (*x.shape[:-1], w.shape[0])
    flat = _flat(x)
    if out is None:
        return gemm(flat, w.t(), bias=bias, activation=activation).view(shape)
    require_tensor("out", out)
    if out.shape != shape:
        raise OperandError(f"out has shape {tuple(out.shape)}; it must have the result's, {shape}")
    gemm(flat, w.t(), out=_flat_view(out, flat.shape[0]), bias=bias, activation=activation)
    result: torch.Tensor = out
    return result


def _flat(x: Any) -> torch.Tensor:
    """Return ``x`` as a matrix; its rows are counted, since -1 says nothing where there are no elements."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    flat: torch.Tensor = x.reshape(rows, x.shape[-1])
    return flat


def _refuse_layer(x: Any, w: Any, out: Any, bias: Any) -> None:
    """Raise what the GEMM says of its operands, in names of the layer; nothing if others are to blame."""
    require_columns(x, w)
    options: Options = (None, 1.0, 1.0, bias, "", None, None, None)
    if _is_grad_enabled():
        refuse_gradients(x, w, out, options, ("x", "w"))
    x, w, _ = autocast(x, w, options) or (x, w, options)
    traced = must_trace(x, w) or _is_transforming()  # there is no memory to ask for
    refuse_inputs(
        ("x", x if x.dim() == 2 else _flat(x)), ("w", w), "" if traced else default_dispatcher().device_type
    )
    if hasattr(out, "data_ptr") and not traced:
        refuse_shared("x", x, out)
        refuse_shared("w", w, out)


def _flat_view(out: torch.Tensor, rows: int) -> torch.Tensor:
    try:
        return out.view(rows, out.shape[-1])
    except RuntimeError as error:
        raise OperandError(
            f"out has strides {out.stride()}, whose leading dimensions do not flatten; pass a contiguous out"
        ) from error


def _eager(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    options: Options,
    plans: dict[Any, Plan],
) -> torch.Tensor:
    """Run one call on real tensors. This is the path that must stay short."""
    c, alpha, beta, bias, activation, out_dtype, config, more = options
    try:
        key: Any
        if out is None:
            grad = a.requires_grad or b.requires_grad
            key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.get_device(), out_dtype)
        else:
            grad = a.requires_grad or b.requires_grad or out.requires_grad
            at = out.data_ptr()
            key = (
                a.shape,
                b.shape,
                out.shape,
                a.stride(),
                b.stride(),
                out.stride(),
                a.dtype,
                b.dtype,
                out.dtype,
                a.get_device(),
                at & 15,
                out_dtype,
            )
        extras: tuple[torch.Tensor, ...] = ()
        plain = c is None and bias is None and alpha == 1 and beta == 1 and not activation
        if not plain or config is not None or more is not None:
            if config is not None:
                config = as_config(config)
            extras, fused = fused_options(c, alpha, beta, bias, activation, more)
            key = (key, fused, config)
            for tensor in extras:
                grad = grad or tensor.requires_grad
        if grad and _is_grad_enabled():
            return _recorded(a, b, out, options)
        plan = plans.get(key)
        if plan is None:
            if cast := autocast(a, b, options):
                return _eager(*cast[:2], out, cast[2], plans)
            plan = _plan(_request(a, b, out, options), config, key, plans)
        if out is None:
            result: torch.Tensor = _new(plan.shape, plan.stride, dtype=plan.dtype, device=plan.device)
            if type(result) is not _Tensor:  # a mode makes other tensors, such as fake ones, of real operands
                return _through_torch(a, b, out, options)
        else:
            result = out
            if at < (start := a.data_ptr()) + plan.a_bytes and start < at + plan.out_bytes:
                refuse_shared("a", a, out)
            if at < (start := b.data_ptr()) + plan.b_bytes and start < at + plan.out_bytes:
                refuse_shared("b", b, out)
            if extras:
                _refuse_shared_extras(plan, out, at, c, bias, more)
        plan.launch(a, b, result, extras, alpha, beta)
        if out is not None:
            _count_writes((out,))
        return result
    except CutegenError:
        raise
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return _failed(error, a, b, out, options)


def _refuse_shared_extras(plan: Plan, out: Any, at: int, c: Any, bias: Any, more: More | None) -> None:
    """Raise if ``out``, which begins at ``at``, shares memory with c, a bias or a scale."""
    if c is not None and c is not out:
        refuse_part_of_c(c, out)
    if bias is not None:
        start = bias.data_ptr()
        if start < at + plan.out_bytes and (start >= at or at < start + bias.nbytes):
            refuse_shared("bias", bias, out)
    if more is not None:
        for name, scale in zip(_SCALES, more[:2], strict=True):
            if scale is not None:
                refuse_shared(name, scale, out)


def _failed(error: Exception, a: Any, b: Any, out: Any, options: Options) -> torch.Tensor:
    """Return the result by another way, or raise what tells the caller why there is none."""
    if _is_transforming():  # their tensors have no memory to read
        return _through_torch(a, b, out, options)
    failure = explain_failure(error, _request(a, b, out, options), default_dispatcher().device_type)
    if failure is error:
        raise error
    raise failure from error


def _request(a: Any, b: Any, out: Any, options: Options) -> Request:
    c, alpha, beta, bias, activation, out_dtype, _, more = options
    return Request(a, b, out, c, alpha, beta, bias, activation, out_dtype, *(more or ()))


def _plan(request: Request, config: AnyConfig, key: Any, plans: dict[Any, Plan]) -> Plan:
    """Work out the plan of a call that has none yet, and keep it."""
    import torch

    assert _workspaces is not None
    dispatcher = default_dispatcher()
    chosen = as_config(config)
    on_gpu = request.a.is_cuda
    workspace = _new_workspace if isinstance(plans, OperatorPlans) else _workspaces.get
    plan = make_plan(
        request,
        chosen,
        dispatcher,
        workspace,
        capturing=lambda: on_gpu and torch.cuda.is_current_stream_capturing(),
    )
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _recorded(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, options: Options) -> torch.Tensor:
    """Run an eager call that autograd records."""
    if _is_transforming():
        return _through_torch(a, b, out, options)
    refuse_gradients(a, b, out, options)
    a, b, options = autocast(a, b, options) or (a, b, options)
    c, alpha, beta, bias, activation, out_dtype, config, more = options
    keywords = {
        "alpha": alpha,
        "beta": beta,
        "activation": fused_activation(activation),
        "out_dtype": out_dtype,
        "config": config,
        "any_order": more is not None and more[3],
    }
    return activate(record_gemm(gemm, a, b, c, bias, keywords), activation)


def _recorded_linear(x: Any, w: Any, bias: Any, activation: str, fuse_wgrad: bool) -> torch.Tensor:
    """Run an eager layer that autograd records."""
    if _is_transforming():
        require_columns(x, w)
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        found = gemm(flat, w.t(), bias=bias, activation=activation)
        return found if flat is x else found.view(*x.shape[:-1], w.shape[0])
    owners = (w,) if fuse_wgrad else ()  # before a cast, whose result has no main_grad
    if x.dtype is _float32 or w.dtype is _float32:
        options: Options = (None, 1.0, 1.0, bias, activation, None, None, None)
        x, w, options = autocast(x, w, options) or (x, w, options)
        bias = options[3]
    if bias is None and not activation and not fuse_wgrad:
        plain: torch.Tensor = _record_plain(x, w)
        return plain
    require_columns(x, w)
    if not activation:
        return record_linear(_known_product, gemm, x, w, bias, False, owners)
    relu = fused_activation(activation) == "relu"
    return activate(record_linear(_known_product, gemm, x, w, bias, relu, owners), activation)


def _known_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Return ``a @ b`` of matrices if there is a plan for it and autograd is not to record it; else None."""
    if (type(a) is not _Tensor and type(a) is not _Parameter) or (
        type(b) is not _Tensor and type(b) is not _Parameter
    ):
        return None
    plan = _plans.get((a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.get_device(), None))
    if plan is None or _is_grad_enabled() or _count_modes():
        return None
    try:
        result: torch.Tensor = _new(plan.shape, plan.stride, dtype=plan.dtype, device=plan.device)
        if type(result) is not _Tensor:
            return None
        plan.launch(a, b, result, (), 1.0, 1.0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # gemm tells why
    return result


def _through_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Call the registered operators: torch is tracing, or the tensors are of a class with its own rules."""
    import torch

    scales = () if options[7] is None else options[7][:2]
    tensors = (a, b, *(t for t in (out, options[0], options[3], *scales) if t is not None))
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        describe(_request(a, b, out, options), device_type=default_dispatcher().device_type)  # names it
        return _eager(a, b, out, options, _plans)
    require_numbers(options[1], options[2])
    a, b, options = autocast(a, b, options) or (a, b, options)
    activation = ""
    if torch.is_grad_enabled() and _require_grad(a, b, out, options[0], options[3]):
        refuse_gradients(a, b, out, options)
        activation = options[4]
        options = (*options[:4], fused_activation(activation), *options[5:])
    arguments = pack(options)
    if out is None:
        operator = transformed_gemm if _is_transforming() else torch.ops.cutegen.gemm.default
        return activate(operator(a, b, *arguments), activation)
    torch.ops.cutegen.gemm_into(out, a, b, *arguments)
    return out


def _require_grad(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _run_operator(a: Any, b: Any, out: Any, *arguments: Any) -> torch.Tensor:
    """What the registered operators do on real tensors.

    Compiled graphs slice as they like: operands that do not start at a multiple of 16 bytes are copied.
    """
    try:
        return _eager(a, b, out, unpack(arguments), _operator_plans)
    except OperandError:
        if not (a.data_ptr() % 16 or b.data_ptr() % 16):
            raise
        return _eager(a.clone(), b.clone(), out, unpack(arguments), _operator_plans)


# --- what the operators stand on ---


def default_dispatcher() -> Dispatcher:
    """Return the dispatcher that the operators ask, made on first use."""
    global _dispatcher
    if _dispatcher is None:
        with _lock:
            if _dispatcher is None:
                _dispatcher = Dispatcher()
    return _dispatcher


def use(dispatcher: Dispatcher) -> Dispatcher:
    """Make the operators ask ``dispatcher`` from now on, and return it.

    Plans made so far are dropped; captured CUDA graphs keep what they captured.
    """
    global _dispatcher
    with _lock:
        _dispatcher = dispatcher
        drop_plans()
    return dispatcher


def drop_plans() -> None:
    """Let every kind of call be looked up anew, with what is loaded."""
    global _plans, _operator_plans
    with _lock:
        _plans, _operator_plans = {}, OperatorPlans()
    drop_family_plans()


def has_plans() -> bool:
    """Return whether calls were answered since plans were last dropped."""
    return bool(_plans or _operator_plans)


def prepare() -> None:
    """Import torch and register the operators with it; done by the first use, and again does nothing."""
    global _Tensor, _Parameter, _workspaces, _empty, _new, _bfloat16, _float32
    global _is_compiling, _count_modes, _count_writes, _is_grad_enabled, _is_transforming, _record_plain
    with _lock:
        if _Tensor is not None:
            return
        import torch

        register(_run_operator)
        _workspaces = torch_workspaces()
        _Parameter, _empty, _new = torch.nn.Parameter, torch.empty, torch.empty_strided
        _bfloat16, _float32 = torch.bfloat16, torch.float32
        _is_compiling = torch.compiler.is_dynamo_compiling
        _is_grad_enabled, _is_transforming = torch.is_grad_enabled, are_active()
        _count_modes, _count_writes = count_modes(), write_counter()
        _record_plain = plain_linear(_known_product, gemm)
        _Tensor = torch.Tensor


def workspaces() -> GetWorkspace:
    """Return what gives eager calls of all operators their scratch memory."""
    prepare()
    assert _workspaces is not None
    return _workspaces.get


def must_trace(*tensors: Any) -> bool:
    """Return whether a call must go through a registered operator: torch is tracing, a mode sees operators,
    or a tensor's class has rules of its own."""
    for tensor in tensors:  # no generator: one costs as much as all that it asks
        if type(tensor) is not _Tensor and type(tensor) is not _Parameter:
            return True
    return _is_compiling() or _count_modes() > 0


def is_grad_enabled() -> bool:
    """Return whether autograd records."""
    return _is_grad_enabled()


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` is at work, whose tensors have no memory to read."""
    return _is_transforming()


def _not_prepared() -> bool:
    prepare()
    return _is_compiling()


# Stand-ins until torch is there: importing this module must not import torch.
_is_compiling: Callable[[], bool] = _not_prepared
_count_modes: Callable[[], int] = None  # type: ignore[assignment]
_count_writes: Callable[[Sequence[torch.Tensor]], None] = None  # type: ignore[assignment]
_is_grad_enabled: Callable[[], bool] = None  # type: ignore[assignment]
_is_transforming: Callable[[], bool] = None  # type: ignore[assignment]
_empty: Callable[..., Any] = None  # type: ignore[assignment]
_new: Callable[..., Any] = None  # type: ignore[assignment]
_record_plain: Callable[..., Any] = None  # type: ignore[assignment]
_bfloat16: Any = None
_float32: Any = None

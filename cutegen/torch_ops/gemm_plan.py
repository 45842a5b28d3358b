"""Operands to a plan: everything about a call that its shapes decide, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from cutegen.dtypes import torch_dtype
from cutegen.errors import LaunchError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.operands import Request, describe
from cutegen.families.gemm.problem import Epilogue, Problem, Signature
from cutegen.families.gemm.stand_in import activation, make_stand_in
from cutegen.families.strides import View, contiguous_strides, span_bytes
from cutegen.runtime.call_plan import LauncherForm, call_by_name, launcher_form, serve_call
from cutegen.runtime.workspace import GetWorkspace
from cutegen.space import Config, Value, format_value, require_mapping
from cutegen.system.remembered import Remembered

if TYPE_CHECKING:
    import torch

    from cutegen.runtime.dispatch import Dispatcher, Served

__all__ = [
    "AnyConfig",
    "Launcher",
    "More",
    "OperatorPlans",
    "Options",
    "Plan",
    "as_config",
    "as_text",
    "explain_failure",
    "fused_options",
    "make_plan",
]

AnyConfig: TypeAlias = "Config | Mapping[str, Value] | str | None"
#: scale_a, scale_b, fast_accum, any_order: what few calls have.
More: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None, bool, bool]"
#: c, alpha, beta, bias, activation, out_dtype, config and what few products have.
Options: TypeAlias = "tuple[_Tensor, float, float, _Tensor, str, torch.dtype | None, AnyConfig, More | None]"
_Tensor: TypeAlias = "torch.Tensor | None"

#: ``launch(a, b, out, extras, alpha, beta)``; extras are the c, bias and scales that there are.
Launcher = Callable[[Any, Any, Any, tuple[Any, ...], float, float], None]


@dataclass(eq=False)
class Plan:
    """How to answer every call with the same shapes, strides, dtypes, device and options.

    Attributes:
        launch: Starts the work on the current stream. Replaced once, where a kernel is being compiled.
        shape: Shape of the result.
        stride: Strides of a new result: torch takes sizes with strides in less time than without.
        dtype: Its torch dtype.
        device: Its torch device.
        a_bytes: Bytes from the first element of a to behind its last; likewise the next two.
        b_bytes: Of b.
        out_bytes: Of out.
    """

    launch: Launcher
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    a_bytes: int
    b_bytes: int
    out_bytes: int

    def keep(self, launch: Launcher) -> None:
        """Let ``launch`` start the work from now on."""
        self.launch = launch


class OperatorPlans(dict[Any, Plan]):
    """Plans by kind of call, for calls through the registered operators; eager calls have a plain dict.

    Their workspaces are allocated for each launch and not kept: CUDA graph trees (``mode="reduce-overhead"``)
    refuse memory of their pool that outlives a call without being a result.
    """


def make_plan(
    request: Request,
    config: Config | None,
    dispatcher: Dispatcher,
    workspace: GetWorkspace,
    *,
    capturing: Callable[[], bool],
) -> Plan:
    """Check a request, choose and load its kernel, and return the plan.

    Args:
        request: The arguments of the call.
        config: Overrides the lookup.
        dispatcher: Chooses and loads the kernel.
        workspace: Asked at every launch for the scratch memory that the kernel needs, if it needs any.
        capturing: Whether a CUDA graph is being captured.

    Raises:
        OperandError: An operand cannot be one.
        LaunchError: The kernel cannot be had now; see :meth:`Dispatcher.serve`.
        CutegenError: As :meth:`Dispatcher.serve` says.
    """
    operands = describe(request, device_type=dispatcher.device_type)
    a, b, out, shape = request.a, request.b, request.out, operands.shape
    dtype = torch_dtype(operands.out_dtype) if out is None else out.dtype
    bytes_of = _dense_bytes if operands.dense else span_bytes
    spans = bytes_of(a), bytes_of(b), 0 if out is None else bytes_of(out)
    plan = Plan(_nothing, shape, contiguous_strides(shape), dtype, a.device, *spans)
    if operands.problem is not None:
        index = max(0, a.get_device())
        launcher = _Launchers(operands.problem, operands.views, dispatcher, config, workspace, index)
        plan.launch = serve_call(launcher.serve, launcher.bind, plan.keep, capturing)
    elif 0 not in operands.shape:
        plan.launch = _without_product(operands.epilogue, operands.views[3:])
    return plan


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Return what :func:`span_bytes` returns of a tensor without gaps."""
    return tensor.nbytes


@dataclass(eq=False)
class _Launchers:
    """Makes the launchers of one plan."""

    problem: Problem
    views: tuple[View | None, ...]
    dispatcher: Dispatcher
    config: Config | None
    workspace: GetWorkspace
    index: int

    def serve(self, capturing: bool) -> Served:
        if self.config is not None:
            return self.dispatcher.serve_given(self.problem, self.index, self.config, capturing)
        return self.dispatcher.serve(self.problem, self.index, capturing=capturing)

    def bind(self, served: Served) -> Launcher:
        if served.choice is not None:
            form, choice = _form(self.problem), served.choice
            launcher: Launcher = form(choice.function, choice.launch, self.workspace, self.index)
        elif GEMM.is_library_call(self.problem) and GEMM.is_plain(self.problem):
            return _vendor(batched=self.problem.batch > 1)
        else:
            launcher = _bind_stand_in(self.problem, left=served.answer.config is None)
        return _bind_views(launcher, self.views) if any(self.views) else launcher


#: What makes launchers of the kernels of one signature.
_forms: Remembered[Signature, LauncherForm] = Remembered(256)


def _form(problem: Problem) -> LauncherForm:
    """Return what makes launchers of the kernels of a problem's signature."""
    found = _forms.get(problem.signature)
    return _forms.keep(problem.signature, _made_form(problem)) if found is None else found


def _made_form(problem: Problem) -> LauncherForm:
    passed, extras = [], 0
    for argument in GEMM.arguments(problem):
        own = argument.kind if argument.kind in ("scratch", "launch") else ""
        name = argument.name
        if argument.kind == "in" and name not in ("a", "b"):
            name, extras = f"extras[{extras}]", extras + 1
        passed.append((own, name))
    return launcher_form(tuple(passed), ("a", "b", "out", "extras", "alpha", "beta"))


def _bind_stand_in(problem: Problem, *, left: bool) -> Launcher:
    """Return a launcher of what computes ``problem`` without a kernel, or because it is left to PyTorch."""
    stand_in = make_stand_in(problem, plain=True) if left else GEMM.stand_in(problem)
    assert stand_in is not None  # else the dispatcher would have refused
    launch, epilogue = call_by_name(stand_in, GEMM.arguments(problem)), problem.epilogue

    def launcher(a: Any, b: Any, out: Any, extras: Any, alpha: float, beta: float) -> None:
        factors = [*([alpha] if epilogue.alpha else []), *([beta] if epilogue.beta else [])]
        launch(a, b, out, *extras, *factors)

    return launcher


def _bind_views(launch: Launcher, views: Sequence[View | None]) -> Launcher:
    """Return a launcher that shows ``launch`` some tensors under other shapes and strides."""

    def launcher(a: Any, b: Any, out: Any, extras: Any, alpha: float, beta: float) -> None:
        a, b, out, *extras = _seen((a, b, out, *extras), views)
        launch(a, b, out, extras, alpha, beta)

    return launcher


def _seen(tensors: Sequence[Any], views: Sequence[View | None]) -> list[Any]:
    return [
        tensor if view is None else tensor.as_strided(view.shape, view.stride)
        for tensor, view in zip(tensors, views, strict=True)
    ]


def _nothing(a: Any, b: Any, out: Any, extras: Any, alpha: float, beta: float) -> None:
    """The result has no elements."""


def _vendor(*, batched: bool) -> Launcher:
    """A plan for a problem that the table gives to torch."""
    import torch

    product: Callable[..., Any] = torch.bmm if batched else torch.mm

    def vendor(a: Any, b: Any, out: Any, extras: Any, alpha: float, beta: float) -> None:
        product(a, b, out=out)

    return vendor


def _without_product(epilogue: Epilogue, views: Sequence[View | None]) -> Launcher:
    """A plan for k = 0: the product is zero, and what is fused behind it still happens, in fp32."""
    import torch

    activate = activation(epilogue.activation)

    def fill(a: Any, b: Any, out: Any, extras: Any, alpha: float, beta: float) -> None:
        value = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        rest = _seen(extras, views)
        if epilogue.beta:
            value += beta * rest.pop(0).float()
        if epilogue.bias:
            vector = rest.pop(0).float()
            value += vector[:, None] if epilogue.bias == "m" else vector
        out.copy_(activate(value))

    return fill


# --- the options of a call, and its end ---


def fused_options(
    c: torch.Tensor | None,
    alpha: float,
    beta: float,
    bias: torch.Tensor | None,
    activation: str,
    more: More | None,
) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Return the tensors that the kernel takes besides a, b and out, and the options that shape a plan."""
    extras: tuple[torch.Tensor, ...] = ()
    kinds: tuple[Any, ...] = (alpha == 1, beta == 1, activation)
    if c is not None:
        kinds += (c.shape, c.stride(), c.dtype, c.data_ptr() & 15, beta == 0)
        extras = () if beta == 0 else (c,)
    if bias is not None:
        kinds += ("bias", bias.shape, bias.stride(), bias.dtype)
        extras += (bias,)
    if more is not None:
        kinds += more[2:]
        for scale in more[:2]:
            if scale is not None:
                kinds += ("scale", scale.shape, scale.stride(), scale.dtype)
                extras += (scale,)
    return extras, kinds


def as_text(config: Config | Mapping[str, Value] | str) -> str:
    """Return a config as ``knob=value`` words, without a look at what they say: torch can trace this.

    Raises:
        ConfigError: It is nothing that stands for a config.
    """
    if isinstance(config, str):
        return config
    if isinstance(config, Config):
        return str(config)
    require_mapping(config)
    return " ".join([f"{knob}={format_value(value)}" for knob, value in config.items()])


def as_config(config: AnyConfig) -> Config | None:
    """Return the config that an object, a mapping or its text stands for; None for none.

    Raises:
        ConfigError: As :meth:`~cutegen.space.Config.of`.
    """
    return None if config is None else Config.of(config)


def explain_failure(error: Exception, request: Request, device_type: str) -> Exception:
    """Return the clear form of an error that a launch, or reading an operand, ended with.

    Raises:
        OperandError: An operand is to blame: the kernel noticed, our own checks say it in the caller's words.
    """
    import torch

    operands = describe(request, device_type=device_type)
    if isinstance(error, torch.OutOfMemoryError):
        return error
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return LaunchError(f"the kernel for {operands.problem} failed to launch: {reason}")

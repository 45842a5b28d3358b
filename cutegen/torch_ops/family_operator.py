"""Operators of declared families: called eagerly by a short path, and registered with torch for tracing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cutegen.dtypes import INTEGER_RANGES, SHORT_NAMES, short_dtype, torch_dtype
from cutegen.errors import CutegenError, LaunchError, OperandError
from cutegen.families.calls import (
    check_of_nothing,
    describe_call,
    output_shapes,
    refuse_overlap,
    require_tensor,
    untold_size,
)
from cutegen.families.declared import DeclaredFamily, DeclaredProblem, multiple
from cutegen.families.declared.arguments import SAME
from cutegen.runtime.call_plan import call_by_name, make_launcher, serve_call
from cutegen.runtime.dispatch import Dispatcher, Served
from cutegen.runtime.recorder import is_recording
from cutegen.runtime.workspace import GetWorkspace, new_workspace
from cutegen.space import Config
from cutegen.system.forks import RenewedLock
from cutegen.torch_ops.fake_calls import note_family_call
from cutegen.torch_ops.flop_formulas import give_formulas
from cutegen.torch_ops.gemm_transforms import are_active
from cutegen.torch_ops.operator_plans import MAX_PLANS, Plan, Plans, key_of, unbound
from cutegen.torch_ops.operator_schema import OperatorSchema, Value
from cutegen.torch_ops.operator_values import MAKE, count_modes, have_own_rules
from cutegen.torch_ops.written_tensors import write_counter

if TYPE_CHECKING:
    import torch

__all__ = ["DeclaredOperator", "drop_family_plans"]

#: All that there are, so that their plans can be dropped.
_operators: weakref.WeakSet[DeclaredOperator] = weakref.WeakSet()


def _depending(results: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return results without elements as what autograd takes to depend on ``leaves``."""
    import torch

    recorded = [t for t in leaves if t is not None and t.requires_grad] if torch.is_grad_enabled() else []
    if not recorded:
        return list(results)
    nothing = sum(leaf.sum() * 0 for leaf in recorded)
    return [result + nothing.to(result.dtype) for result in results]


def drop_family_plans() -> None:
    """Let the operators of all families look every kind of call up anew, with what is loaded."""
    for operator in tuple(_operators):
        operator.forget()


class DeclaredOperator:
    """The operator of one family.

    Tensors are passed in the order in which the family declares them: None for one that is not there,
    :data:`MAKE` for an output that is to be allocated. So are the words of a call: options and sizes that no
    input tells; None for one that an output tells, or for its default.

    Args:
        family: Whose.
        dispatcher: Returns the dispatcher to ask; another one than before voids what was planned.
        workspaces: Returns scratch memory of kernels.
    """

    def __init__(
        self,
        family: DeclaredFamily,
        dispatcher: Callable[[], Dispatcher],
        workspaces: Callable[[], GetWorkspace],
    ) -> None:
        self.family = family
        self._schema = OperatorSchema(family)
        self.tensors, self.scalars = self._schema.tensors, self._schema.scalars
        self.words = self._schema.words
        self._names = tuple(a.name for a in self.tensors)
        self._integers = tuple((at, a) for at, a in enumerate(self.scalars) if a.dtype in INTEGER_RANGES)
        self._outputs, self._in_place = self._schema.outputs, self._schema.in_place
        self._dispatcher = dispatcher
        self._asked: Dispatcher | None = None
        #: Registrations end when their library object does.
        self._library: Any = None
        self._plans = Plans(workspaces, {})
        #: Calls through the registered operator: CUDA graph trees (mode "reduce-overhead") refuse memory of
        #: their pool that outlives a call, so each call takes its own workspace.
        self._traced_plans = Plans(lambda: new_workspace, {})
        #: What code that is written for the family remembers of plans; emptied when they are.
        self.fast: dict[Any, Any] = {}
        #: How often all plans were dropped: one that was begun before is not kept.
        self._drops = 0
        self._lock = RenewedLock()
        _operators.add(self)

    def forget(self) -> None:
        """Look every kind of call up anew."""
        self._drop(None)

    def _drop(self, dispatcher: Dispatcher | None) -> None:
        """Drop all plans; those that are made from now on are of ``dispatcher``, if it is known."""
        with self._lock:
            self._drops += 1
            self._asked = dispatcher
            for plans in (self._plans, self._traced_plans):
                plans.known.clear()
            self.fast.clear()

    def planned(self, values: Sequence[Any], options: tuple[Value, ...]) -> Any:
        """Return the plan of a call that was just answered, whose ``launch`` takes what is not absent.

        None if another thread has dropped it, or torch answered.
        """
        return None if have_own_rules(values) else self._plans.known.get(key_of(values, None, options))

    def remember(self, key: Any, plan: Any) -> None:
        """Keep what written code knows of a kind of call, of as many kinds as there may be plans."""
        if len(self.fast) >= MAX_PLANS:
            self.fast.clear()
        self.fast[key] = plan

    def __call__(
        self,
        values: Sequence[Any],
        scalars: Sequence[float],
        config: Config | None = None,
        options: tuple[Value, ...] = (),
    ) -> list[Any]:
        """Launch the kernel for ``values`` and return them, with the outputs that were made in their places.

        Tensors of classes with rules of their own go through the registered operator, and all where a mode of
        torch sees operators.

        Raises:
            OperandError: A tensor cannot be an operand; the message names it and what would be valid.
            LaunchError: There is no kernel to launch, or it failed to.
            CutegenError: As :meth:`cutegen.runtime.dispatch.Dispatcher.kernel`.
        """
        if have_own_rules(values) or count_modes()():
            return self.traced(values, scalars, config, options)
        return self._answer(values, scalars, config, options, self._plans)

    def _answer(
        self,
        values: Sequence[Any],
        scalars: Sequence[float],
        config: Config | None,
        options: tuple[Value, ...],
        plans: Plans,
    ) -> list[Any]:
        dispatcher = self._dispatcher()
        if dispatcher is not self._asked:
            self._drop(dispatcher)
        try:
            key = key_of(values, config, options)
            plan = plans.known.get(key) or self._plan(key, values, config, options, dispatcher, plans)
            found = list(values)
            if plan.made:
                import torch

                device = values[plan.first].device
                for at, shape, dtype in plan.made:
                    found[at] = torch.empty(shape, dtype=dtype, device=device)
                if type(found[at]) is not torch.Tensor and plans is self._plans:
                    # A mode makes other tensors, such as fake ones, of real operands.
                    return self.traced(values, scalars, config, options)
            if self._integers:
                self._refuse_wide(scalars)
            if plan.written:
                self._refuse_gradients(values)
                self._check_overlap(plan, values)
            plan.launch(*[found[at] for at in plan.present], *[scalars[at] for at in plan.scalars])
            if plan.written:
                write_counter()([values[at] for at in plan.written])
        except CutegenError:
            raise
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise self._explained(error, values, options, dispatcher) from error
        return found

    def _given(self, values: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(self._names, values, strict=True)
        return {name: value for name, value in pairs if value is not None and value is not MAKE}

    def _refuse_wide(self, scalars: Sequence[float]) -> None:
        """Raise if an integer has more bits than its argument: a launch drops them without a word."""
        for at, argument in self._integers:
            low, high = INTEGER_RANGES[argument.dtype]
            if not low <= scalars[at] <= high:
                raise OperandError(f"{argument.name} is {scalars[at]}; it must be from {low} to {high}")

    def _refuse_gradients(self, values: Sequence[Any]) -> None:
        """Raise if autograd would have to record a call that it cannot."""
        import torch

        if torch.is_grad_enabled():
            for name, tensor in zip(self._names, values, strict=True):
                if getattr(tensor, "requires_grad", False):
                    raise OperandError(
                        f"{name} requires grad, but this call of {self.family.name} has no gradients; pass "
                        f"{name}.detach() or call under torch.no_grad()"
                    )

    def _check_overlap(self, plan: Plan, values: Sequence[Any]) -> None:
        if not plan.is_apart(values):
            refuse_overlap(self.family, self._given(values))
            plan.note_apart(values)

    def problem_of(
        self, values: Sequence[Any], options: tuple[Value, ...], dispatcher: Dispatcher
    ) -> DeclaredProblem:
        """Return the problem that a call poses; raises :class:`OperandError`."""
        wanted = frozenset(name for name, v in zip(self._names, values, strict=True) if v is MAKE)
        return describe_call(
            self.family,
            self._given(values),
            wanted,
            self._named(options),
            device_type=dispatcher.device_type,
        )

    def _named(self, options: Sequence[Value]) -> dict[str, Any]:
        pairs = zip(self.words, options, strict=True)
        return {word.name: value for word, value in pairs if value is not None}

    def _plan(
        self,
        key: Any,
        values: Sequence[Any],
        config: Config | None,
        options: tuple[Value, ...],
        dispatcher: Dispatcher,
        plans: Plans,
    ) -> Plan:
        """Return the plan of a kind of call that has none, and keep it unless plans are dropped meanwhile."""
        import torch

        drops = self._drops
        current = dispatcher is self._dispatcher()  # behind the number: a change in between shows in one
        self._refuse_gradients(values)
        problem = self.problem_of(values, options, dispatcher)
        plan = self._unbound_plan(problem, values)
        on_gpu, index = values[plan.first].is_cuda, max(0, values[plan.first].get_device())

        def serve(capturing: bool) -> Served:
            if config is not None:
                return dispatcher.serve_given(problem, index, config, capturing)
            return dispatcher.serve(problem, index, capturing=capturing)

        plan.launch = serve_call(
            serve,
            lambda served: self._bind(served, problem, plans.workspace(), index),
            plan.keep,
            lambda: on_gpu and torch.cuda.is_current_stream_capturing(),
        )
        with self._lock:
            if len(plans.known) >= MAX_PLANS:
                plans.known.clear()
            if current and drops == self._drops:
                plans.known[key] = plan
        return plan

    def _unbound_plan(self, problem: DeclaredProblem, values: Sequence[Any]) -> Plan:
        """Return what is made and passed in a call of ``problem``, without what launches it."""
        shapes = output_shapes(problem)
        made = tuple(
            (at, shapes[self._names[at]][0], torch_dtype(shapes[self._names[at]][1]))
            for at in self._outputs
            if values[at] is MAKE
        )
        present = tuple(at for at, value in enumerate(values) if value is not None)
        given = tuple(at for at in present if values[at] is not MAKE)
        there = {argument.name for argument in self.family.arguments(problem)}
        factors = tuple(at for at, scalar in enumerate(self.scalars) if scalar.name in there)
        written = tuple(at for at in given if self.tensors[at].kind != "in")
        return Plan(unbound, made, present, factors, given[0], written)

    def _bind(
        self, served: Served, problem: DeclaredProblem, workspace: GetWorkspace, index: int
    ) -> Callable[..., Any]:
        arguments, choice = self.family.arguments(problem), served.choice
        tensors = [a for a in arguments if a.kind in ("in", "out", "inout")]
        given = [*tensors, *(a for a in arguments if a.kind == "scalar")]  # as calls here pass them
        if choice is None:
            return call_by_name(self.family.stand_in(problem), given)
        names = [a.name for a in given]
        return make_launcher(choice.function, arguments, choice.launch, workspace, index, parameters=names)

    def _explained(
        self,
        error: Exception,
        values: Sequence[Any],
        options: tuple[Value, ...],
        dispatcher: Dispatcher,
    ) -> Exception:
        import torch

        if are_active()():  # what they hand to code has no memory to read
            return OperandError(
                f"{self.family.name} has no rule for transforms of torch.func, such as grad and vmap; use "
                "autograd, or call it outside of them"
            )
        problem = self.problem_of(values, options, dispatcher)
        if isinstance(error, torch.OutOfMemoryError):
            return error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return LaunchError(f"the kernel for {problem} failed to launch: {reason}")

    # -- torch

    def register(self, backward: Callable[..., Any] | None = None, setup: Any = None) -> None:
        """Define the operator for torch, for real and for fake tensors; again does nothing.

        Args:
            backward: Its gradients, as torch's ``register_autograd`` takes them; None for none.
            setup: Keeps what they need.
        """
        import torch
        from torch import library as registry

        if self._library is not None:
            return
        api = cast("Any", registry)  # not annotated in all versions
        library = self._library = api.Library("cutegen", "FRAGMENT")
        strict = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
        library.define(str(self._schema), tags=(torch.Tag.pt2_compliant_tag, strict))
        library.impl(self.family.name, self._run_traced, "CompositeExplicitAutograd")
        name = f"cutegen::{self.family.name}"
        api.register_fake(name, self._shapes, lib=library)
        give_formulas(self.family.name)
        if backward is not None:
            api.register_autograd(name, backward, setup_context=setup, lib=library)

    def traced(
        self,
        values: Sequence[Any],
        scalars: Sequence[float],
        config: Config | None,
        options: tuple[Value, ...] = (),
    ) -> list[Any]:
        """As a call, through the registered operator: torch is tracing, or a tensor has rules of its own."""
        import torch

        for name, value in self._given(values).items():
            if not isinstance(value, torch.Tensor):
                require_tensor(name, value)
        operator = getattr(torch.ops.cutegen, self.family.name)
        if self._in_place:
            found = self._filled(values, options)
            operator(*self._schema.pack(found, scalars, config, options))
            return found
        if any(values[at] is not None and values[at] is not MAKE for at in self._outputs):
            return self._into_given(values, scalars, config, options)
        outputs = iter(operator(*self._schema.pack(values, scalars, config, options)))
        return [next(outputs) if value is MAKE else value for value in values]

    def _into_given(
        self,
        values: Sequence[Any],
        scalars: Sequence[float],
        config: Config | None,
        options: tuple[Value, ...],
    ) -> list[Any]:
        """Outputs of the caller's are filled by copies, which a compiler can take away."""
        made = [MAKE if v is not None and at in self._outputs else v for at, v in enumerate(values)]
        found = self.traced(made, scalars, config, self._told(values, options))
        for at in self._outputs:
            if made[at] is MAKE and values[at] is not MAKE:
                self._require_like(self._names[at], values[at], found[at])
        return [
            v if v is None or v is MAKE or at not in self._outputs else v.copy_(found[at])
            for at, v in enumerate(values)
        ]

    def _require_like(self, name: str, out: Any, made: Any) -> None:
        """Raise if a copy into an output of the caller's would convert or repeat what was computed."""
        if out.dtype != made.dtype:
            raise OperandError(f"{name} has dtype {out.dtype}; it must be {made.dtype}")
        if out.shape != made.shape:
            raise OperandError(f"{name} has shape {tuple(out.shape)}; it must be {tuple(made.shape)}")

    def _told(self, values: Sequence[Any], options: tuple[Value, ...]) -> tuple[Value, ...]:
        """Return ``options`` with what the caller's outputs tell."""
        if None not in options:
            return options
        sizes, dtypes = self._read(self._given(values), {})
        told: dict[str, Any] = {**sizes, **{k: SHORT_NAMES.get(str(v)) for k, v in dtypes.items()}}
        return tuple([told.get(w.name) if v is None else v for w, v in zip(self.words, options, strict=True)])

    def _run_traced(self, *arguments: Any) -> list[torch.Tensor] | None:
        values, scalars, config, options = self._schema.unpack(arguments)
        found = self._answer(values, scalars, config, options, self._traced_plans)
        if self._in_place:
            return None
        return [found[at] for at in self._outputs if values[at] is MAKE]

    def _shapes(self, *arguments: Any) -> list[torch.Tensor] | None:
        """Shapes and dtypes of the outputs; sizes may be symbols."""
        values, _, _, options = self._schema.unpack(arguments)
        given, named = self._given(values), self._named(options)
        names = frozenset(n for n, v in zip(self._names, values, strict=True) if v is MAKE)
        # What is traced runs much later, and elsewhere: what cannot work is said now.
        check_of_nothing(self.family, given, names, named, device_type="")
        if is_recording():
            note_family_call(self.family, given, names, named)
        return None if self._in_place else self._made_like(values, options)

    def of_nothing(
        self, values: Sequence[Any], options: tuple[Value, ...] = (), leaves: Sequence[Any] = ()
    ) -> list[Any]:
        """Answer a call of tensors without elements: outputs are made, and nothing is launched.

        Args:
            values: As for a call; they are checked as far as a call without elements can be wrong, but not
                while a compiler traces.
            options: As for a call.
            leaves: What outputs that are made depend on, for autograd; None for what is not there.

        Raises:
            OperandError: As a call.
        """
        import torch

        given = self._given(values)
        if not torch.compiler.is_compiling():
            device_type = self._dispatcher().device_type
            wanted = frozenset(name for name, v in zip(self._names, values, strict=True) if v is MAKE)
            check_of_nothing(self.family, given, wanted, self._named(options), device_type=device_type)
        if any(self._names[at] in given for at in self._outputs) or self._in_place:
            self._refuse_gradients(values)
        # A row of nothing has statistics.
        results = [result.zero_() for result in self._made_like(values, options)]
        made = iter(_depending(results, leaves))
        return [next(made) if value is MAKE else value for value in values]

    def _filled(self, values: Sequence[Any], options: tuple[Value, ...]) -> list[Any]:
        """Return the values, with new tensors for the outputs that are to be made."""
        made = iter(self._made_like(values, options))
        return [next(made) if value is MAKE else value for value in values]

    def _made_like(self, values: Sequence[Any], options: tuple[Value, ...]) -> list[torch.Tensor]:
        """Return new tensors for the outputs that are to be made."""
        given, named = self._given(values), self._named(options)
        sizes, dtypes = self._read(given, named)
        for option in self.family.dtypes_of_outputs:
            dtypes.setdefault(option.name, self._dtype(str(named.get(option.name, option.default)), dtypes))
        like = next(iter(given.values()))
        made = [a for at, a in enumerate(self.tensors) if at in self._outputs and values[at] is MAKE]
        for size in (size for a in made for _, size in map(multiple, a.dims)):
            if size not in sizes:
                raise untold_size(self.family, size)
        return [
            like.new_empty(a.shape(sizes), dtype=dtypes.get(a.dtype) or torch_dtype(a.dtype)) for a in made
        ]

    def _read(
        self, given: Mapping[str, Any], named: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return sizes, which may be symbols, and torch's dtypes by what the declaration calls them."""
        sizes: dict[str, Any] = {s.name: named[s.name] for s in self.family.named_sizes if s.name in named}
        dtypes: dict[str, Any] = {}
        for a in self.tensors:
            if a.name in given:
                for (times, dim), size in zip(map(multiple, a.dims), given[a.name].shape, strict=True):
                    sizes.setdefault(dim, size * times.denominator // times.numerator)
                dtypes.setdefault(a.dtype, given[a.name].dtype)
        return sizes, dtypes

    def _dtype(self, name: str, dtypes: Mapping[str, Any]) -> Any:
        """Return torch's dtype of an output's option; ``same`` is that of option ``dtype``."""
        return dtypes["dtype"] if name == SAME else torch_dtype(short_dtype(name))

"""``cutegen.exhaustive_search``: the configs of a list, tried on the problem of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cutegen.errors import UsageError
from cutegen.family import Problem
from cutegen.space import Config, Value
from cutegen.torch_ops import gemm as gemm_operators
from cutegen.torch_ops.settings import load_table
from cutegen.torch_ops.user_kernels import problem_of_call
from cutegen.tuning.autotuner import AutoTuner
from cutegen.tuning.model import tuner_of
from cutegen.tuning.result import TuneResult

__all__ = ["exhaustive_search"]

_Configs = Sequence[Mapping[str, Value]]


def exhaustive_search(
    kernel: Callable[..., Any],
    configs: _Configs | Callable[[Problem], _Configs],
    *arguments: Any,
    tuner: AutoTuner | None = None,
    **named: Any,
) -> TuneResult:
    """Try exactly these configs of a loaded kernel, and its default, on the problem that a call poses.

    Each is compiled, checked against the reference and timed, in child processes, on operands of their own:
    those of the call are only looked at. The winner and its compiled kernel are kept, in the table that the
    operators ask and in the cache, and later calls of such shapes run it; asking again tries nothing. With
    ``CUTEGEN_DISABLE_AUTOTUNE=1`` nothing is tried either, and the default config is the answer.

    Args:
        kernel: What :func:`cutegen.load` returned.
        configs: All knobs of each; or a function from the problem to such a list.
        *arguments: Of the call.
        tuner: What tunes and into which table; by default into the one that the operators ask.
        **named: Of the call too.

    Raises:
        UsageError: ``kernel`` was not loaded, or there are no configs.
        TypeError: An argument is missing or unknown.
        CutegenError: As :meth:`AutoTuner.tune`.
    """
    gemm_operators.prepare()
    dispatcher = gemm_operators.default_dispatcher()
    problem = problem_of_call(kernel, arguments, named, dispatcher)
    found = tuple(Config(config) for config in (configs(problem) if callable(configs) else configs))
    if not found:
        raise UsageError(f"there are no configs for {problem}; give at least one")
    tuner = tuner or tuner_of(dispatcher)
    result = tuner.tune_problem(problem, candidates=found)
    table = tuner.setting.table
    if table is not None and table.exists():
        load_table(table)
    return result

"""What a call of a shape that was not seen before takes on the host: files of one benchmark, rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.benchmark.markdown import line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["FIRST_CALLS", "FirstCalls"]

#: What such files say that they are.
FIRST_CALLS = "first calls"
#: Parts of a call in words.
_PARTS = {
    "operands": "checks of the operands",
    "choice": "lookup and choice",
    "torch": "what torch is expected to take",
    "kernel": "finding the loaded kernel",
    "arguments": "its arguments",
    "workspace": "scratch memory",
    "plan": "the rest of the plan",
    "launch": "the launch, by a kernel or by torch",
}


class FirstCalls(QuotedFile):
    """What tools/bench_first_call.py measured."""

    tool = "tools/bench_first_call.py"

    def summary(self) -> list[str]:
        """Return medians and limits, in a line."""
        facts = self.facts
        kernel, first, choice = facts["by_answer"]["kernel"], facts["first_us"], facts["choice_us"]
        return [
            f"- first calls of {facts['shapes']} shapes, {facts['kernels']} kernels warm: median "
            f"**{up(first['median'], 0)} us**, {up(kernel['median'], 0)} us where a kernel answers "
            f"(promised: {facts['limit_us']:g}); the choice alone {up(choice['median'], 0)} us (promised: "
            f"{facts['choice_limit_us']:g}); {facts['compiled_by_calls']} kernels compiled"
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        facts = self.facts
        rows: list[tuple[str, Mapping[str, Any]]] = [("first call", facts["first_us"])]
        rows += [
            (f"first call, by {who}: {spread['shapes']} shapes", spread)
            for who, spread in facts["by_answer"].items()
        ]
        rows += [
            ("first call of `torch.mm` itself", facts["torch_mm_first_us"]),
            ("second call", facts["second_us"]),
            ("the choice alone, one after another", facts["choice_us"]),
        ]
        parts = facts["parts_us"]
        rows += [(f"part: {words}", parts[name]) for name, words in _PARTS.items() if name in parts]
        table = [line(["host time", "median, us", "95 % within", "most"]), line(["---", *["---:"] * 3])]
        for what, spread in rows:
            table.append(line([what, *(up(spread[name], 1) for name in ("median", "p95", "most"))]))
        session = facts["session"]
        commit, gpu = short_commit(facts["commit"]), facts["device"]["name"]
        where = f"{gpu}, {session['cpu']}, {session['cores']} cores; commit {commit}; {facts['date']}."
        return "\n".join([*self.summary(), "", *table, "", where])

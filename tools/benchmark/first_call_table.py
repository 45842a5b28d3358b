"""What a call of a shape that was not seen before takes on the host: files of two benchmarks, rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.benchmark.markdown import down, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["FIRST_CALLS", "HOST_ONLY", "FirstCalls", "HostCalls"]

#: What such files say that they are.
FIRST_CALLS = "first calls"
HOST_ONLY = "first calls, host only"
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


#: Parts of a warm-up in words.
_WARM_PARTS = {
    "find": "finding artifacts",
    "compile": "compiling",
    "choice": "the choice in C",
    "load": "loading libraries",
    "launch": "first launches",
    "begin": "the start of CUDA and the rest",
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
            f"{facts['choice_limit_us']:g}); {facts['compiled_by_calls']} kernels compiled",
            *self._warm_up(),
        ]

    def _warm_up(self) -> list[str]:
        """Return what the warm-up before them took; older files do not say its parts."""
        facts = self.facts
        took: Mapping[str, float] = facts.get("warm_parts_s", {})
        parts = [f"{words} {up(took[name], 2)}" for name, words in _WARM_PARTS.items() if name in took]
        if not parts:
            return []
        return [
            f"- `cutegen.warmup()` before them, {facts['compiled_by_warm_up']} kernels compiled: "
            f"**{up(facts['warm_s'], 2)} s**: {', '.join(parts)}"
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


class HostCalls(QuotedFile):
    """What tools/bench_first_call_host.py measured."""

    tool = "tools/bench_first_call_host.py"

    def summary(self) -> list[str]:
        """Return medians, in a line."""
        facts = self.facts
        own, choice, later = facts["first_us"]["median"], facts["choice_us"]["median"], facts["later_us"]
        before = facts.get("against")
        was = [f" (was {each})" for each in self._of(before)] if before else ["", "", ""]
        return [
            f"- first calls of {facts['shapes']} shapes, no launches: median **{up(own, 0)} us**{was[0]}, "
            f"the choice alone {up(choice, 0)} us{was[1]}, later calls {up(later, 2)} us{was[2]}; "
            f"{facts['where']}"
        ]

    @staticmethod
    def _of(side: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return what another checkout took, rounded down."""
        medians = (side[name]["median"] for name in ("first_us", "choice_us"))
        first, choice = (down(each, 0) for each in medians)
        return first, choice, down(side["later_us"], 2)

    def render(self) -> str:
        """Return the Markdown of the file."""
        facts = self.facts
        sides = [("", facts, up)]
        if "against" in facts:
            sides.append((f", at {short_commit(facts['against']['commit'])}", facts["against"], down))
        table = [line(["host time", "median, us", "95 % within", "most"]), line(["---", *["---:"] * 3])]
        for what, name in (("first call", "first_us"), ("the choice alone", "choice_us")):
            for words, side, rounded in sides:
                cells = (rounded(side[name][each], 1) for each in ("median", "p95", "most"))
                table.append(line([what + words, *cells]))
        table += [line([f"later call{words}", r(side["later_us"], 2), "", ""]) for words, side, r in sides]
        session, commit = facts["session"], short_commit(facts["commit"])
        where = f"No GPU; {session['cpu']}, {session['cores']} cores; commit {commit}; {facts['date']}."
        return "\n".join([*self.summary(), "", *table, "", where])

"""A sweep of the compiler over a space: its results file, read and rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.benchmark.markdown import down, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["SWEEP", "Sweep"]

#: What such a file says that it is.
SWEEP = "compile sweep"


class Sweep(QuotedFile):
    """What tools/sweep_compile.py summed up."""

    tool = "tools/sweep_compile.py"

    def summary(self) -> list[str]:
        """Return the lines that say how large the space is, what was wrong, and how fast it went."""
        return [f"- {sentence}" for sentence in (*self._space(), *self._verdicts(), *self._pace())]

    def render(self) -> str:
        """Return the Markdown of the file."""
        return "\n".join([*self.summary(), "", self._footing()])

    def _space(self) -> Iterator[str]:
        facts: Any = self.facts
        for count in facts["configs"]:
            yield f"{count['problem']}: {count['legal']} valid configs, made of {count['kernels']} kernels"

    def _verdicts(self) -> Iterator[str]:
        facts: Any = self.facts
        kernels, values = facts["kernels"], facts["values"].values()
        seen, there = (sum(value[which] for value in values) for which in ("seen", "of"))
        verdicts = ", ".join(f"**{count} {name}**" for name, count in facts["verdicts"].items())
        asked = facts["asked"]
        chosen = "a covering set of" if asked["pairs"] and not asked["sample"] else "a sample of"
        yield (
            f"of the space's {kernels['of_the_space']} kernels {chosen} {kernels['chosen']}, with "
            f"{seen} of the {there} values of its knobs: {verdicts}"
        )
        for wrong in facts["wrong"]:
            yield f"**{wrong['verdict']}**: {wrong['problem']} {wrong['config']}: {wrong['detail']}"

    def _pace(self) -> Iterator[str]:
        facts: Any = self.facts
        pace, machine = facts["compiled_now"], facts["machine"]
        if pace["per_s"] is not None:
            rate, each = down(pace["per_s"], 2), up(pace["cpu_s"] / pace["kernels"], 2)
            yield (
                f"{pace['kernels']} of them in {pace['seconds']} s, {pace['workers']} at a time on "
                f"{machine['cores']} cores ({machine['cpu']}): **{rate} kernels a second**, "
                f"{each} CPU seconds each"
            )

    def _footing(self) -> str:
        facts: Any = self.facts
        software, asked = facts["software"], facts["asked"]
        return (
            f"{facts['arch']}: {asked['dtype']}; {asked['layout']}; nvidia-cutlass-dsl "
            f"{software['packages']['nvidia-cutlass-dsl']}, Python {software['python']}; cutegen "
            f"{software['cutegen']}, commit {short_commit(facts['commit'])}; {facts['measured_at'][:10]}. "
            "Good is a kernel that compiled, spills nothing, takes exactly the shared memory and at most the "
            "registers that the space predicts, and about which the assembler noted nothing."
        )

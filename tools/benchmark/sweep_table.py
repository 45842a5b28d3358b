"""A sweep of the compiler over a space: its results file, read and rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.benchmark.markdown import down, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["SWEEP", "Sweep"]

#: What such a file says that it is.
SWEEP = "compile sweep"


class Sweep(QuotedFile):
    """What tools/sweep_compile.py summed up."""

    tool = "tools/sweep_compile.py"

    def summary(self) -> list[str]:
        """Return the lines that say how large the space is, what was wrong, and how fast it went."""
        said = self._families() if "families" in self.facts else (*self._space(), *self._verdicts())
        return [f"- {sentence}" for sentence in (*said, *self._wrong(), *self._pace())]

    def render(self) -> str:
        """Return the Markdown of the file."""
        table = [*self._table(), ""] if "families" in self.facts else []
        return "\n".join([*table, *self.summary(), "", self._footing()])

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

    def _families(self) -> Iterator[str]:
        facts: Any = self.facts
        verdicts = ", ".join(f"**{count} {name}**" for name, count in facts["verdicts"].items())
        kernels = facts["kernels"]
        yield (
            f"of {kernels['of_the_space']} kernels of {len(facts['families'])} families covering sets of "
            f"{kernels['chosen']}: {verdicts}"
        )

    def _table(self) -> Iterator[str]:
        """Yield the lines of the table of families."""
        facts: Any = self.facts
        head = ["family", "kernels", "compiled", "values of knobs", "most registers", "most smem", "verdicts"]
        yield from (line(head), line(["---"] * len(head)))
        for part in facts["families"]:
            found = part["values"].values()
            seen, there = (sum(value[which] for value in found) for which in ("seen", "of"))
            verdicts = ", ".join(f"{count} {name}" for name, count in part["verdicts"].items())
            kernels, most = part["kernels"], part["most"]
            cells = [kernels["of_the_space"], kernels["chosen"], f"{seen} of {there}"]
            cells += [most["registers"], most["smem_bytes"], verdicts]
            yield line([f"`{part['family']}`", *map(str, cells)])

    def _wrong(self) -> Iterator[str]:
        facts: Any = self.facts
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
        of = (
            "example problems of each family"
            if "families" in facts
            else f"{asked['dtype']}; {asked['layout']}"
        )
        return (
            f"{facts['arch']}: {of}; nvidia-cutlass-dsl "
            f"{software['packages']['nvidia-cutlass-dsl']}, Python {software['python']}; cutegen "
            f"{software['cutegen']}, commit {short_commit(facts['commit'])}; {facts['measured_at'][:10]}. "
            "Good is a kernel that compiled, spills nothing, takes exactly the shared memory and at most the "
            "registers that the space predicts, and about which the assembler noted nothing."
        )

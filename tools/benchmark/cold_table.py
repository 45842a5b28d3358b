"""What a user waits for: results files of one benchmark, read and rendered."""

from __future__ import annotations

from tools.benchmark.markdown import down, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["COLD_START", "ColdStart"]

#: What such files say that they are.
COLD_START = "cold start"


class ColdStart(QuotedFile):
    """What tools/bench_cold.py measured."""

    tool = "tools/bench_cold.py"

    def summary(self) -> list[str]:
        """Return how long one command took with an empty cache, in a line."""
        facts = self.facts
        cold, again = (up(facts[name]["seconds"], 1) for name in ("cold", "again"))
        effort = facts.get("effort", "standard")
        return [f"- `{facts['problem']}`, {effort}: **{cold} s** with an empty cache, {again} s again"]

    def render(self) -> str:
        """Return the Markdown of the file."""
        facts = self.facts
        compiled, limits = facts["compile"], facts["limits"]
        rows = [
            ("the command, with an empty cache", facts["cold"]["seconds"], limits.get("cold_s")),
            ("the same again", facts["again"]["seconds"], limits.get("again_s")),
            ("`import cutegen`", facts["import"]["median_s"], limits.get("import_s")),
        ]
        cells = [[what, up(took, 3), f"{limit:g}" if limit else ""] for what, took, limit in rows]
        rate = (
            f"{compiled['kernels']} kernels, {compiled['workers']} at a time: "
            f"{up(compiled['seconds'], 1)} s; "
            f"{down(compiled['per_s_once_started'], 1)} a second once the first is there."
        )
        machine = facts["machine"]
        gpu = f"{facts['gpu']}, driver {machine['driver']}" if facts["gpu"] else "no GPU"
        commit, day = short_commit(facts["commit"]), facts["measured_at"][:10]
        ready = facts.get("byte_compiled")
        modules = ", modules byte-compiled" if ready and all(ready.values()) else ""
        if "first_imports_s" in facts:
            modules += f", files of PyTorch and the DSL read before (in {up(facts['first_imports_s'], 1)} s)"
        where = f"{gpu}, {machine['cores']} cores{modules}; commit {commit}; {day}."
        table = [line(["", "s", "promised"]), line(["---", "---:", "---:"]), *map(line, cells)]
        return "\n".join([*self.summary(), "", *table, "", rate, "", where])

"""Steps of a model by torch and by cutegen: the results file of tools/bench_model.py, read and rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutegen.families.registry import find_family, parse_problem
from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["APART", "BESIDE", "COMPILED", "GEMMS", "LINEAR", "MODEL", "OVERLAP", "STEP", "ModelResults"]

#: What such a file says that it is.
MODEL = "model"
#: What is timed of a step.
GEMMS, COMPILED, APART = "GEMMs alone", "whole step, compiled", "whole step, compiled, gates apart"
#: A step of a model of which cutegen.optimize has swapped the linear layers only, or all that it knows.
LINEAR, STEP = "whole step, linear layers", "whole step, optimized"
#: All that it knows, with the answers of another table.
BESIDE = "whole step, optimized, other table"
#: All that it knows, where all launches overlap their neighbours.
OVERLAP = "whole step, optimized, all overlapping"
#: What one step has and another lacks: in words, and what was timed without and with it.
_ADDED = (
    ("swapping norms and gates adds to linear layers", LINEAR, STEP),
    ("this table's winners add to those of the other one", BESIDE, STEP),
    ("overlap adds to the same winners", STEP, OVERLAP),
)


class ModelResults(QuotedFile):
    """What tools/bench_model.py measured."""

    tool = "tools/bench_model.py"

    def summary(self) -> list[str]:
        """Return the geometric mean of what was timed of all steps of inference, and of training."""
        lines = []
        for training in (False, True):
            for what in (GEMMS, LINEAR, STEP, BESIDE, OVERLAP, COMPILED, APART):
                rows = [r for r in self._rows() if r["what"] == what and _is_training(r) == training]
                if not rows:
                    continue
                ratios = [row["ratio"][1] for row in rows]
                lines.append(
                    f"- {'training' if training else 'inference'}, {what}: torch / cutegen in geometric mean "
                    f"**{down(geometric_mean(ratios), 3)}**, smallest {down(min(ratios), 3)} of {len(ratios)}"
                )
            for added, without, having in _ADDED:
                if gains := self._gains(training, without, having):
                    each = ", ".join(f"{down(gain, 3)} ({name})" for name, gain in gains.items())
                    lines.append(
                        f"- {'training' if training else 'inference'}, what {added}: "
                        f"**{down(geometric_mean(list(gains.values())), 3)}** in geometric mean: {each}"
                    )
        lines += self._products()
        memory = self.facts.get("memory")
        if memory:
            early, late = memory["early"]["reserved"], memory["late"]["reserved"]
            lines.append(
                f"- memory that PyTorch holds, {memory['steps']} steps of mixed lengths under "
                f"`reduce-overhead`: {up(early / 2**20, 0)} MiB after a tenth of them, "
                f"{up(late / 2**20, 0)} MiB at the end"
            )
        tuned = self.facts.get("autotune")
        if tuned:
            cold, known, counts = tuned["cold"], tuned["known"], " and ".join(map(str, tuned["rows"]))
            lines.append(
                f"- `cutegen.autotune`, {cold['problems']} problems, {cold['products']} of them products "
                f"of {counts} rows, {cold['tuned']} tuned: {up(cold['seconds'], 1)} s with an empty cache "
                f"folder, {up(known['seconds'], 1)} s once all are known"
            )
        return lines

    def _products(self) -> list[str]:
        """Return how the products that were tuned before compare with torch's, each alone.

        Those that no call of torch computes were timed beside a copy, which says nothing here.
        """
        tuning: Any = self.facts.get("tuning") or {}
        products = tuning.get("products", {}).items()
        ratios = {line: found["ratio"] for line, found in products if found["ratio"] and _is_torchs(line)}
        if not ratios:
            return []
        behind = [f"`{line}` {down(mid, 3)}" for line, (_, mid, high) in ratios.items() if high < 1]
        mean = down(geometric_mean([mid for _, mid, _ in ratios.values()]), 3)
        return [
            f"- {len(ratios)} tuned products, each alone: torch / cutegen in geometric mean **{mean}**; "
            f"torch's is surely faster at {', '.join(behind) or 'none'}"
        ]

    def _gains(self, training: bool, without: str, having: str) -> dict[str, float]:
        """Return by its name how many times as long each step takes without something, in the same rounds."""
        times = {(row["name"], row["what"]): row["cutegen_us"][1] for row in self._rows()}
        return {
            row["name"]: times[row["name"], without] / row["cutegen_us"][1]
            for row in self._rows()
            if row["what"] == having and (row["name"], without) in times and _is_training(row) == training
        }

    def render(self) -> str:
        """Return the Markdown of the file."""
        head = ["step", "timed", "layers", "torch ms", "cutegen ms", "torch / cutegen (95 %)"]
        table = [line(head), line([*["---"] * 2, *["---:"] * 4]), *map(_line, self._rows()), ""]
        return "\n".join([*self.summary(), "", *(table if self._rows() else ()), self._footing()])

    def _rows(self) -> Sequence[Any]:
        rows: Sequence[Any] = self.facts["rows"]
        return rows

    def _footing(self) -> str:
        facts: Any = self.facts
        packages = facts["software"]["packages"]
        named = ", ".join(f"{n} {packages[n]}" for n in ("torch", "nvidia-cutlass-dsl") if n in packages)
        model = facts["model"]
        return (
            f"A Llama-shaped model of the size {model['size']}, random weights, bf16; decoding at place "
            f"{model['context']}; inference in CUDA graphs, training eager or compiled, of its layers alone. "
            f"{facts['gpu']}, driver {facts['machine']['driver']}; {named}; commit "
            f"{short_commit(facts['commit'])}; {facts['measured_at'][:10]}. Medians of {facts['rounds']} "
            "interleaved rounds; above 1 cutegen is faster."
        )


def _is_torchs(line: str) -> bool:
    """Return whether one call of torch computes a problem."""
    problem = parse_problem(line)
    return find_family(problem.family).is_library_call(problem)


def _is_training(row: Any) -> bool:
    return str(row["name"]).startswith("training")


def _line(row: Any) -> str:
    low, mid, high = (down(value, 3) for value in row["ratio"])
    torch_ms, own_ms = down(row["torch_us"][1] / 1e3, 3), up(row["cutegen_us"][1] / 1e3, 3)
    return line([row["name"], row["what"], str(row["layers"]), torch_ms, own_ms, f"{mid} ({low} to {high})"])

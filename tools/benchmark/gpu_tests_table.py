"""What the GPU tests came to: documents quote it through tools/results_table.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.benchmark.markdown import line, short_commit, up
from tools.benchmark.quoted import QuotedFile
from tools.gpu_test_parts.outcomes import BAD, OUTCOMES, file_of
from tools.gpu_test_parts.summary import GPU_TESTS

__all__ = ["GPU_TESTS", "GpuTests", "latest"]

_SHOWN = ("torch", "nvidia-cutlass-dsl")


class GpuTests(QuotedFile):
    """What tools/run_gpu_tests.py wrote."""

    tool = "tools/run_gpu_tests.py"

    def summary(self) -> list[str]:
        """Return the line that says how many tests ended how."""
        outcomes: dict[str, int] = dict(self.facts["outcomes"])
        return [f"- {sum(outcomes.values())} tests that need a GPU: {_counted(outcomes)}"]

    def render(self) -> str:
        """Return the Markdown of the file: how many, where, what failed, and why others were skipped."""
        facts: Any = self.facts
        bad = [_bad_line(entry["test"], entry["outcome"]) for entry in facts["bad"]]
        rows = [line([reason, str(count)]) for reason, count in facts["skipped"].items()]
        skipped = [line(["skipped, since", "tests"]), line(["---", "---:"]), *rows] if rows else []
        took = f"{up(facts['seconds'], 0)} s in {facts['processes']} processes."
        where = f"{self.machine()}; commit {self.at()}; {took}"
        return "\n".join([*self.summary(), *bad, "", *skipped, *([""] if rows else []), where])

    def at(self) -> str:
        """Return the commit and the day."""
        return f"{short_commit(self.facts['commit'])}; {self.facts['measured_at'][:10]}"

    def counts(self) -> dict[str, Counter[str]]:
        """Return how many tests ended how, by file."""
        return {
            file: Counter({name: count for name, count in found.items() if name in OUTCOMES})
            for file, found in self.facts["files"].items()
        }

    def bad(self, file: str) -> dict[str, str]:
        """Return the tests of a file that are not known to pass, and how each ended."""
        return {
            entry["test"]: entry["outcome"] for entry in self.facts["bad"] if file_of(entry["test"]) == file
        }

    def machine(self) -> str:
        """Return the GPU, its driver, the cores and the packages."""
        facts: Any = self.facts
        machine, packages = facts["machine"], facts["software"]["packages"]
        shown = ", ".join(f"{name} {packages[name]}" for name in _SHOWN if name in packages)
        return f"{facts['gpu']}, driver {machine['driver']}, {machine['cores']} cores; {shown}"


@dataclass(frozen=True)
class _Newest:
    """A test file in its newest run as a whole, and what ran again since.

    Attributes:
        run: The last of these runs.
        counts: How many tests ended how.
        bad: Those that are not known to pass, and how each ended.
        passed: The newest run behind which no such test was left, None if there was none.
    """

    run: GpuTests
    counts: Counter[str]
    bad: Mapping[str, str]
    passed: GpuTests | None

    def after(self, run: GpuTests, counts: Counter[str], bad: Mapping[str, str]) -> _Newest:
        """Return what is known after a later run, which may have had only what was bad before."""
        if counts.total() == len(self.bad):
            counts = self.counts - Counter(self.bad.values()) + counts
        elif 2 * counts.total() <= self.counts.total():
            return self
        return _Newest(run, counts, bad, self.passed if bad else run)


def latest(runs: Iterable[GpuTests]) -> tuple[list[str], str]:
    """Return what the newest runs of all test files come to, and the Markdown of a table of them."""
    found = _newest(runs)
    summed = _sums(found)
    head = ["tests/gpu/", "passed", "skipped", "else", "commit; day", "all passed before"]
    rows = [line(_cells(file, newest)) for file, newest in sorted(found.items())]
    bad = [_bad_line(test, outcome) for newest in found.values() for test, outcome in newest.bad.items()]
    table = [line(head), line(["---", "---:", "---:", "---", "---", "---"]), *rows]
    machines = dict.fromkeys(newest.run.machine() for newest in found.values())
    lines = [*summed, *sorted(bad), "", *table, "", *(f"{machine}." for machine in machines)]
    return summed, "\n".join(lines)


def _newest(runs: Iterable[GpuTests]) -> dict[str, _Newest]:
    found: dict[str, _Newest] = {}
    for run in sorted(runs, key=lambda run: str(run.facts["measured_at"])):
        for file, counts in run.counts().items():
            bad = run.bad(file)
            first = _Newest(run, counts, bad, None if bad else run)
            found[file] = found[file].after(run, counts, bad) if file in found else first
    return found


def _sums(found: Mapping[str, _Newest]) -> list[str]:
    outcomes: Counter[str] = Counter()
    for newest in found.values():
        outcomes += newest.counts
    return [f"- {outcomes.total()} tests in {len(found)} files, each in its newest run: {_counted(outcomes)}"]


def _cells(file: str, newest: _Newest) -> Sequence[str]:
    counts = newest.counts
    left = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (*BAD, "xfailed") if counts[outcome])
    before = "" if not newest.bad else newest.passed.at() if newest.passed else "never"
    name = file.removeprefix("tests/gpu/")
    return [f"`{name}`", str(counts["passed"]), str(counts["skipped"] or ""), left, newest.run.at(), before]


def _counted(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))


def _bad_line(test: str, outcome: str) -> str:
    return f"- **{outcome}**: `{test}`"

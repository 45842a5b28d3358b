"""What the GPU tests came to: documents quote it through tools/results_table.py."""

from __future__ import annotations

from typing import Any

from tools.benchmark.markdown import line, short_commit, up
from tools.benchmark.quoted import QuotedFile
from tools.gpu_test_parts.summary import GPU_TESTS

__all__ = ["GPU_TESTS", "GpuTests"]

_SHOWN = ("torch", "nvidia-cutlass-dsl")


class GpuTests(QuotedFile):
    """What tools/run_gpu_tests.py wrote."""

    tool = "tools/run_gpu_tests.py"

    def summary(self) -> list[str]:
        """Return the line that says how many tests ended how."""
        outcomes: dict[str, int] = dict(self.facts["outcomes"])
        counted = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        return [f"- {sum(outcomes.values())} tests that need a GPU: {counted}"]

    def render(self) -> str:
        """Return the Markdown of the file: how many, where, what failed, and why others were skipped."""
        facts: Any = self.facts
        machine, software = facts["machine"], facts["software"]
        packages = [f"{name} {software['packages'][name]}" for name in _SHOWN if name in software["packages"]]
        where = (
            f"{facts['gpu']}, driver {machine['driver']}, {machine['cores']} cores; {', '.join(packages)}; "
            f"commit {short_commit(facts['commit'])}; {facts['measured_at'][:10]}; "
            f"{up(facts['seconds'], 0)} s in {facts['processes']} processes."
        )
        bad = [f"- **{entry['outcome']}**: `{entry['test']}`" for entry in facts["bad"]]
        rows = [line([reason, str(count)]) for reason, count in facts["skipped"].items()]
        skipped = [line(["skipped, since", "tests"]), line(["---", "---:"]), *rows] if rows else []
        return "\n".join([*self.summary(), *bad, "", *skipped, *([""] if rows else []), where])

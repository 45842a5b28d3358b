"""Programs of the host: found by name, and what they say when they fail."""

from __future__ import annotations

import pytest

from cutegen.build.host_compiler import find_program, run_program
from cutegen.errors import BuildError


def test_the_first_program_that_is_there_is_found() -> None:
    found = find_program(["no-such-program", "sh", "ls"])
    assert found is not None and found.endswith("/sh")
    assert find_program(["no-such-program"]) is None


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "In file included from a.h:1\na.h:2: error: no such type\n1 error generated\n",
            "a.h:2: error: no such type",
        ),
        (
            "b.o: undefined reference to `f'\ncollect2: error: ld returned 1\n",
            "b.o: undefined reference to `f'",
        ),
        (
            "ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status\n",
            "ld: final link failed: No space left on device",
        ),
        ("cannot write\nsorry\n", "cannot write"),
        ("", "exit status 3"),
    ],
)
def test_the_line_that_says_why_is_in_the_message_and_all_lines_are_in_the_log(said: str, line: str) -> None:
    with pytest.raises(BuildError) as caught:
        run_program(["sh", "-c", 'printf %s "$0" >&2; exit 3', said])
    assert str(caught.value) == f"sh failed: {line}" and caught.value.log == said


def test_what_does_not_run_or_does_not_end_is_an_error() -> None:
    with pytest.raises(BuildError, match="no-such-program could not run"):
        run_program(["no-such-program"])
    with pytest.raises(BuildError, match=r"sleep could not run: .*timed out"):
        run_program(["sleep", "60"], limit_s=0.01)

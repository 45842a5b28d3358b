"""What is made once is found again, until others are too many."""

from __future__ import annotations

from cutegen.system.remembered import Remembered


def test_the_oldest_goes_when_it_is_full() -> None:
    known: Remembered[str, int] = Remembered(2)
    assert [known.keep(name, at) for at, name in enumerate("abc")] == [0, 1, 2]
    assert known == {"b": 1, "c": 2} and known.get("a") is None
    known.clear()
    assert known.keep("a", 3) == 3 and known == {"a": 3}

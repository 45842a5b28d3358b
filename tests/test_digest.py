"""Digests: the same name for the same value, in every process."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegen.digest import canonical_json, digest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_canonical_text_is_sorted_tight_and_ascii() -> None:
    """One value has one text."""
    assert canonical_json({"b": [1, 2.5, None], "a": "ü"}) == '{"a":"\\u00fc","b":[1,2.5,null]}'


@given(st.dictionaries(st.text(), JSON))
def test_the_order_of_keys_does_not_matter(value: dict[str, object]) -> None:
    """Mappings that are equal have equal digests."""
    backwards = dict(reversed(list(value.items())))
    assert digest(value) == digest(backwards)  # type: ignore[arg-type]


@given(JSON, JSON)
def test_different_texts_have_different_digests(one: object, other: object) -> None:
    """128 bits do not collide by chance; strings are hashed as they are, not as JSON."""
    if isinstance(one, str) or isinstance(other, str):
        return
    same = canonical_json(one) == canonical_json(other)  # type: ignore[arg-type]
    assert (digest(one) == digest(other)) == same  # type: ignore[arg-type]


def test_text_and_bytes_are_hashed_as_they_are() -> None:
    """A digest of a source can be checked with sha256sum."""
    expected = hashlib.sha256("grün".encode()).hexdigest()
    assert digest("grün", length=64) == digest("grün".encode(), length=64) == expected
    assert digest("grün") == expected[:32]


@pytest.mark.parametrize("value", [math.nan, math.inf, {"a": [-math.inf]}])
def test_numbers_that_json_lacks_are_refused(value: float) -> None:
    """NaN has no canonical text."""
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(value)


def test_values_that_json_lacks_are_refused() -> None:
    """A set has no order, so no canonical text."""
    with pytest.raises(TypeError):
        canonical_json({"a": {1, 2}})  # type: ignore[dict-item]


def test_another_process_finds_the_same_digest() -> None:
    """The seed of Python's own hashing does not matter."""
    code = "from cutegen.digest import digest; print(digest({'b': [1, 'x'], 'a': None}))"
    here = digest({"b": [1, "x"], "a": None})
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.strip() == here


def test_text_that_cannot_be_encoded_has_a_digest() -> None:
    """JSON may hold lone surrogates, and so may what is read from it."""
    assert digest("\ud800") != digest("\udfff") and len(digest("\ud800")) == 32

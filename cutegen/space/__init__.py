"""Domains and rules that say which configs are legal, and why the others are not."""

from cutegen.space.config import Config, Value, format_value, parse_value
from cutegen.space.rules import LARGEST_EXTENT, extents_round_up_below_2_to_31
from cutegen.space.space import Launch, Rule, Space, Violation

__all__ = [
    "LARGEST_EXTENT",
    "Config",
    "Launch",
    "Rule",
    "Space",
    "Value",
    "Violation",
    "extents_round_up_below_2_to_31",
    "format_value",
    "parse_value",
]

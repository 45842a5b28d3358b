"""Domains and rules that say which configs are valid, and why the others are not."""

from cutegen.space.config import (
    Config,
    Value,
    as_flag,
    as_integer,
    as_pair,
    format_value,
    parse_value,
    require_mapping,
)
from cutegen.space.query import Query
from cutegen.space.space import Launch, Rule, Space, Violation

__all__ = [
    "Config",
    "Launch",
    "Query",
    "Rule",
    "Space",
    "Value",
    "Violation",
    "as_flag",
    "as_integer",
    "as_pair",
    "format_value",
    "parse_value",
    "require_mapping",
]

"""Rotary position embedding of queries and keys, in place or not."""

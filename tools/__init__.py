"""Benchmarks and maintenance, each run as ``python tools/NAME.py``; not part of the package."""

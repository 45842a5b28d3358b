"""Grouped GEMM: groups of rows, each multiplied by a matrix of its own, as in mixtures of experts."""

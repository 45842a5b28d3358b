"""Grouped GEMM: products of groups of rows with a matrix each, as in mixtures of experts."""

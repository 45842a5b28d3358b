"""Grouped GEMM of fp8 operands whose blocks have factors."""

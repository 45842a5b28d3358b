"""Grouped GEMM whose epilogue multiplies activated gates with what they gate."""

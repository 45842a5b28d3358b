"""Kernels that users bring: a declaration file becomes a family like any other."""

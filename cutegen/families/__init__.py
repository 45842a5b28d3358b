"""Kernel families: what each computes, how its problems are written, checked and compared."""

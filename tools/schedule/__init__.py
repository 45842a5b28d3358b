"""Kernels broken on purpose: what the model of the schedule says of them, and what a GPU does with them."""

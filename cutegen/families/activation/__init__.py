"""Activations by themselves, element by element."""

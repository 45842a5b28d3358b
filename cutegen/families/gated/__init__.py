"""Gated activations: ``act(gate) * up``, forward and backward."""

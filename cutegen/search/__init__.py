"""What to try next: configs to compile first, and steps from those that were fast."""

"""GEMMs, plain and block-scaled: everything that knows matrices."""

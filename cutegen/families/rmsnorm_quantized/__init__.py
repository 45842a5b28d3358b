"""RMSNorm of rows to 8 bits, with a scale for each row."""

"""RMSNorm: rows divided by their root mean square."""

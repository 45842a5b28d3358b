"""What the benchmark scripts share: contestants, the contest itself, the results file, the environment."""

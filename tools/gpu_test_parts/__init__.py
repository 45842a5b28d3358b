"""Parts of tools/run_gpu_tests.py: what to run side by side, running it, and what came of each test."""

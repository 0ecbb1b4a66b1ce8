"""Benchmarks: every figure side by side with its peer in one run."""

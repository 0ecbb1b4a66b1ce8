"""Benchmarks: every figure side by side with its peer in one run; `gnnscale bench` finds them in the source tree."""

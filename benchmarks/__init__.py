"""Benchmarks: ratios to the limits of the machine they run on, inside one run."""

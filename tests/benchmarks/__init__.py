"""Tests of benchmarks/: what they compute from their measurements."""

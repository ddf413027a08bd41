"""Benchmarks: `make bench`. Every figure is a ratio to a reference that ran in alternation with it."""

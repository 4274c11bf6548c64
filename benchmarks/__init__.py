"""Benchmarks of the project; README.md lists them."""

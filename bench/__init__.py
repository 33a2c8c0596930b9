"""Benchmarks that write rows to results/. A package so that attacks.py here is not `attacks`."""

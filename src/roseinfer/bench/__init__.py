"""Benchmarks: loads on an engine, a server or a simulator, and reports in the words of the metrics."""

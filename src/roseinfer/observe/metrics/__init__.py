"""Prometheus metrics: the catalogue of them all, how they count, and their exposition."""

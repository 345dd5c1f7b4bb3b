"""FACTS: what is made of records and timelines: metrics, logs, traces, causes of gaps, and recordings."""

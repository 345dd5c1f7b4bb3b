"""FACTS. Turns records and timelines into metrics, logs and ranges; imported by nobody but the wiring."""

"""MEASUREMENT. Load, stamps and reports, in the words of the metrics; drives the engine from outside."""

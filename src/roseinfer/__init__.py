"""roseinfer: an LLM inference server in which every millisecond of latency has a name."""

__version__ = "0.1.0"

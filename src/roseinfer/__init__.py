"""roseinfer: an LLM inference server in which every millisecond of latency has a name.

As a library: `from roseinfer import LLM, SamplingParams`; docs/quickstart.md shows how. `__init__.pyi` has the types.
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Config", "RoseinferError", "SamplingParams", "Thinking", "__version__"]

_HOMES = {
    "LLM": "roseinfer.llm.llm",
    "Completion": "roseinfer.llm.llm",
    "Config": "roseinfer.config.options",
    "RoseinferError": "roseinfer.errors",
    "SamplingParams": "roseinfer.messages",
    "Thinking": "roseinfer.text.answers.reasoning",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that `roseinfer --help` and the probes wait for nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

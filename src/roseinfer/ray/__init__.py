"""Ray: batches spread over a cluster, and servers as replicas of Ray Serve; needs the extra `ray`."""

from importlib import import_module

from roseinfer.errors import ConfigError

__all__ = ["LineActor", "answer_all", "answer_lines", "app", "build_app"]

_HOMES = {"LineActor": "data", "answer_all": "data", "answer_lines": "data", "app": "serve", "build_app": "serve"}
_BROUGHT = {"pyarrow", "pydantic", "ray", "starlette"}  # by the extra


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for. Raises ConfigError where the extra is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _BROUGHT:
            raise
        raise ConfigError(
            f"needs {error.name}, which the extra `ray` brings: pip install 'roseinfer[ray]'", param=__name__
        ) from None

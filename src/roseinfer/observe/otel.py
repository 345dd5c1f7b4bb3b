"""Sets up OpenTelemetry's SDK as the variables OTEL_… of the environment ask; our options are defaults for them.

The SDK is imported in the functions that need it: a server that exports nothing pays for it with neither time nor
memory. What a variable says that cannot be followed is refused at the start, where the SDK would log and go on.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from roseinfer.errors import ConfigError
from roseinfer.observe.tracing import semconv

logger = logging.getLogger(__name__)

Signal = Literal["traces", "metrics"]
Environment = Mapping[str, str]

FLUSH_TIMEOUT_S = 1.0  # longest time that the exit waits for a collector

_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_WHOLE = (
    *("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT"),
    *("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
)
_NUMBERS = ("OTEL_METRIC_EXPORT_INTERVAL", "OTEL_METRIC_EXPORT_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_:%")


def sdk_environment() -> Environment:
    """Returns what the SDK, too, reads; so it is not handed down from the command line."""
    return os.environ


def given(environment: Environment, *names: str) -> tuple[str, str]:
    """Returns the first of the variables that is set, and its value; an empty one is not set."""
    return next(((name, value) for name in names if (value := environment.get(name, "").strip())), ("", ""))


def exporter_names(signal: Signal, endpoint: str | None, environment: Environment) -> list[str]:
    """Returns what a signal is exported to: none where nothing asks for it. `endpoint` is the option's."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    _, names = given(environment, f"OTEL_{signal.upper()}_EXPORTER")
    if not names and signal == "traces" and (endpoint or given(environment, *_endpoints_of(signal))[1]):
        names = "otlp"
    return [name.strip() for name in names.split(",") if name.strip() not in {"", "none"}]


def _endpoints_of(signal: Signal) -> tuple[str, str]:
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


def make_exporters(signal: Signal, names: Iterable[str], endpoint: str | None, environment: Environment) -> list[Any]:
    """Returns the SDK's exporters of these names. Raises ConfigError for what the variables say wrongly."""
    _check_numbers(signal, environment)
    return [_make_exporter(signal, name, endpoint, environment) for name in names]


def _make_exporter(signal: Signal, name: str, endpoint: str | None, environment: Environment) -> Any:
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    arguments: dict[str, str] = {}
    if name == "otlp":
        variable, protocol = given(
            environment, f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        protocol = protocol or "http/protobuf"
        if protocol not in _PROTOCOLS:
            raise ConfigError(f"{protocol!r} is none of {', '.join(_PROTOCOLS)}", param=variable)
        name = _PROTOCOLS[protocol]
        arguments = _endpoint_argument(signal, protocol, endpoint, environment)
        _check_files(signal, environment)
    return make_component(f"opentelemetry_{signal}_exporter", name, variable, **arguments)


def make_component(group: str, name: str, variable: str, *arguments: object, **named: object) -> Any:
    """Calls what an installed package offers under this name. Raises ConfigError, which names the variable."""
    found = list(entry_points(group=group, name=name))
    if not found:
        missing = "install 'roseinfer[otlp-grpc]'" if name == _PROTOCOLS["grpc"] else "no package here offers it"
        raise ConfigError(f"{name!r} cannot be used: {missing}", param=variable)
    try:
        return found[0].load()(*arguments, **named)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"{name!r} cannot be used: {error}", param=variable) from None


def _endpoint_argument(signal: Signal, protocol: str, endpoint: str | None, environment: Environment) -> dict[str, str]:
    """Returns the endpoint where the option decides it, with the protocol's path; else the SDK reads the variable."""
    name, value = given(environment, *_endpoints_of(signal))
    if value:
        _check_endpoint(value, name, protocol)
    if value or not endpoint:
        return {}
    path = _check_endpoint(endpoint, "tracing.endpoint", protocol)
    if protocol == "http/protobuf" and not path.strip("/"):
        return {"endpoint": f"{endpoint.rstrip('/')}/v1/{signal}"}
    return {"endpoint": endpoint}


def _check_endpoint(endpoint: str, param: str, protocol: str) -> str:
    """Returns the path. Raises ConfigError for what is no address, such as one with a `$(…)` that nothing replaced."""
    address = f"http://{endpoint}" if protocol == "grpc" and "://" not in endpoint else endpoint
    try:
        parts = urlsplit(address)
        host = (parts.hostname or "").lower()
        host.encode("idna"), parts.path.encode("ascii")
        is_usable = parts.scheme in {"http", "https"} and bool(host) and parts.port != 0
        is_usable = is_usable and (not host.isascii() or _HOST_CHARACTERS.issuperset(host))
    except ValueError:
        is_usable = False
    if not is_usable or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"{endpoint!r} is no address such as http://127.0.0.1:4318", param=param)
    return parts.path


def _check_numbers(signal: Signal, environment: Environment) -> None:
    for name in (*_WHOLE, *_NUMBERS, f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT"):
        if text := given(environment, name)[1]:
            try:
                is_usable = (int(text) if name in _WHOLE else float(text)) > 0
            except ValueError:
                is_usable = False
            if not is_usable:
                kind = "whole number" if name in _WHOLE else "number"
                raise ConfigError(f"{text!r} is no {kind} above 0", param=name)


def _check_files(signal: Signal, environment: Environment) -> None:
    for kind in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{kind}", f"OTEL_EXPORTER_OTLP_{kind}"):
            _, path = given(environment, name)
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"the file {path!r} cannot be read", param=name)


def make_resource(version: str) -> Any:
    """Returns what all spans and metrics say of this process; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    ours = {
        semconv.SERVICE_NAME: semconv.PROVIDER,
        semconv.SERVICE_VERSION: version,
        semconv.SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}",
    }
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})


class Failures(logging.Handler):
    """Hears what the SDK logs, so that an outage of the collector is one line with its reason, and not one a batch."""

    def __init__(self, what: str) -> None:
        super().__init__(logging.WARNING)
        self._what = what
        self._reasons: dict[int | None, str] = {}  # the last of each thread
        self._is_failing = False
        self._sdk = logging.getLogger("opentelemetry")
        self._sdk.addHandler(self)
        self._sdk.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._reasons[record.thread] = record.getMessage()
        logger.debug("OpenTelemetry: %s", record.getMessage())

    def note(self, *, is_taken: bool) -> None:
        """Takes the outcome of a batch, in the thread that sent it; logs it where it differs from the one before."""
        reason = self._reasons.pop(threading.get_ident(), "")
        if self._is_failing is not is_taken:
            return
        self._is_failing = not is_taken
        if is_taken:
            logger.info("the collector takes %s again", self._what)
        else:
            template = "the collector does not take %s; they are dropped until it does"
            logger.warning(template, self._what, extra={"reason": reason})

    def close(self) -> None:
        self._sdk.removeHandler(self)
        super().close()


class Closable(Protocol):
    """An exporter, whose shutdown ends a pause between two attempts."""

    def shutdown(self) -> None: ...


def close_within(timeout_s: float, shutdown: Callable[[], object], exporters: Iterable[Closable]) -> None:
    """Shuts a provider down, with what it has yet to deliver, for so long at most.

    The SDK's own limit is 30 s. Of what takes longer the exporters are closed, and a thread may stay behind in a
    request that is not answered; it does not keep the process.
    """
    closing = threading.Thread(target=shutdown, name="roseinfer-otel-close", daemon=True)
    closing.start()
    closing.join(timeout_s)
    if closing.is_alive():
        for exporter in exporters:
            exporter.shutdown()

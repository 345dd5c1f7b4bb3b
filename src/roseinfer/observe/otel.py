"""Sets up OpenTelemetry's SDK as the variables OTEL_… of the environment ask; our options are defaults for them.

The SDK is imported in the functions that need it: a server that exports nothing pays for it with neither time nor
memory. What a variable says that cannot be followed is refused at the start, where the SDK would log and go on.
"""

import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import unquote, urlsplit

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
_TOO_LARGE = 1 << 31  # for the clocks of the SDK
_LIMITS = (
    *("OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    *("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    *("OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_LINK_COUNT_LIMIT"),
    *("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT"),
)
_BOOLEANS = (
    *("OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_INSECURE"),
    *("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_METRICS_INSECURE"),
)
_COMPRESSIONS = {"http/protobuf": ("none", "gzip", "deflate"), "grpc": ("none", "gzip")}
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_:%")
_PAIR = re.compile(r"[!#-'*+.0-9A-Z^-z|~-]+[ \t]*=([ !#-+\-.-:<-\[\]-~]*)")  # as the SDK reads headers


def sdk_environment() -> Environment:
    """Returns what the SDK, too, reads; so it is not handed down from the command line.

    A variable that is set to nothing is not set, by the standard; the SDK's exporters for gRPC do not know that. Nor do
    all of it know that the line end of the file from which a value comes is no part of it.
    """
    for name, value in [(name, value) for name, value in os.environ.items() if name.startswith("OTEL_")]:
        if stripped := value.strip():
            os.environ[name] = stripped
        else:
            del os.environ[name]
    return os.environ


def warn(environment: Environment) -> None:
    """Logs what the standard has one go on without."""
    for name in _BOOLEANS:
        if given(environment, name)[1].lower() not in {"", "true", "false"}:
            logger.warning("%s is neither true nor false, and counts as false", name)
    if given(environment, "OTEL_LOGS_EXPORTER")[1] not in {"", "none"}:
        logger.warning("OTEL_LOGS_EXPORTER is not followed: the log goes to standard error alone")
    if given(environment, "OTEL_CONFIG_FILE")[1]:
        logger.warning("OTEL_CONFIG_FILE is not followed: the other variables decide")


def check_limits(environment: Environment) -> None:
    """Raises ConfigError for a limit that is none. To be called before the SDK is imported, which fails on some."""
    for name in _LIMITS:
        _, text = given(environment, name)
        if text and not (text.isascii() and text.isdigit()):
            raise ConfigError(f"{text!r} is no whole number", param=name)


def given(environment: Environment, *names: str) -> tuple[str, str]:
    """Returns the first of the variables that is set, and its value; an empty one is not set."""
    return next(((name, value) for name in names if (value := environment.get(name, "").strip())), ("", ""))


def exporter_names(signal: Signal, endpoint: str | None, environment: Environment) -> list[str]:
    """Returns what a signal is exported to: none where nothing asks for it. `endpoint` is the option's."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    _, names = given(environment, f"OTEL_{signal.upper()}_EXPORTER")
    if not names and signal == "traces" and (endpoint or given(environment, *_names(signal, "ENDPOINT"))[1]):
        names = "otlp"
    return [name for name in dict.fromkeys(map(str.strip, names.split(","))) if name not in {"", "none"}]


def _names(signal: Signal, kind: str) -> tuple[str, str]:
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_{kind}", f"OTEL_EXPORTER_OTLP_{kind}"


def make_exporters(signal: Signal, names: Iterable[str], endpoint: str | None, environment: Environment) -> list[Any]:
    """Returns the SDK's exporters of these names. Raises ConfigError for what the variables say wrongly."""
    _check_numbers(signal, environment)
    return [_make_exporter(signal, name, endpoint, environment) for name in names]


def _make_exporter(signal: Signal, name: str, endpoint: str | None, environment: Environment) -> Any:
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    arguments: dict[str, Any] = {}
    if name == "otlp":
        chosen_by, protocol = given(environment, *_names(signal, "PROTOCOL"))
        protocol = protocol or "http/protobuf"
        if protocol not in _PROTOCOLS:
            raise ConfigError(f"{protocol!r} is none of {', '.join(_PROTOCOLS)}", param=chosen_by)
        name, variable = _PROTOCOLS[protocol], chosen_by or variable
        arguments = _endpoint_argument(signal, protocol, endpoint, environment)
        arguments |= _compression_argument(signal, protocol, environment)
        _check_headers(signal, protocol, environment)
        _check_files(signal, environment)
    if name == _PROTOCOLS["grpc"]:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its library's lines are no lines of our log
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
    name, value = given(environment, *_names(signal, "ENDPOINT"))
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
        is_usable = endpoint.isprintable() and parts.scheme in {"http", "https"} and bool(host) and parts.port != 0
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
                is_usable = 0 < (int(text) if name in _WHOLE else float(text)) < _TOO_LARGE
            except ValueError:
                is_usable = False
            if not is_usable:
                kind = "whole number" if name in _WHOLE else "number"
                raise ConfigError(f"{text!r} is no {kind} above 0 and below {_TOO_LARGE}", param=name)


def _compression_argument(signal: Signal, protocol: str, environment: Environment) -> dict[str, Any]:
    name, value = given(environment, *_names(signal, "COMPRESSION"))
    value = value.lower() or "none"
    if value not in _COMPRESSIONS[protocol]:
        raise ConfigError(f"{value!r} is none of {', '.join(_COMPRESSIONS[protocol])}", param=name)
    # For gRPC the SDK does not know the word: 0 is `grpc.Compression.NoCompression`.
    return {"compression": 0} if (protocol, value) == ("grpc", "none") else {}


def _check_headers(signal: Signal, protocol: str, environment: Environment) -> None:
    """Raises ConfigError for what the SDK would leave out or fail to send; it does not repeat what may be a secret."""
    name, text = given(environment, *_names(signal, "HEADERS"))
    for number, pair in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        found = _PAIR.fullmatch(pair)
        value = unquote(found[1]) if found else ""
        largest = 0x7F if protocol == "grpc" else 0xFF  # of the characters that it can send
        if not found or not value.isprintable() or any(ord(character) > largest for character in value):
            raise ConfigError(f"header {number} is no name=value, encoded as in an address", param=name)


def _check_files(signal: Signal, environment: Environment) -> None:
    """Raises ConfigError for files of TLS that are not there or not what they should be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    (name, path), (certificate_name, certificate), (key_name, key) = [
        given(environment, *_names(signal, kind)) for kind in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    ]
    if key and not certificate:
        raise ConfigError("there is no certificate for it in OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", param=key_name)
    try:
        if path and not Path(path).is_dir():
            context.load_verify_locations(path)
        name, path = certificate_name, certificate
        if certificate:
            context.load_cert_chain(certificate, key or None, password="")  # else it would ask the terminal for one
    except OSError as error:
        raise ConfigError(f"the file {path!r} cannot be used: {error.strerror or error}", param=name) from None


def make_resource(version: str, server_pid: int | None = None) -> Any:
    """Returns what all spans and metrics say of this server; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win.

    `server_pid` is its front end's, where that is another process: a telemetry process that is started again is no
    other server, whose counters a collector would add to those of the one before.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    variable, text = given(sdk_environment(), "OTEL_RESOURCE_ATTRIBUTES")
    for pair in filter(None, map(str.strip, text.split(","))):
        if not pair.partition("=")[0].strip() or "=" not in pair:
            raise ConfigError(f"{pair!r} is no name=value", param=variable)
    ours = {
        semconv.SERVICE_NAME: semconv.PROVIDER,
        semconv.SERVICE_VERSION: version,
        semconv.SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{server_pid or os.getpid()}",
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
        # The exporter for gRPC says nothing twice in 20 s, and what it said for one signal is the reason for both.
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("opentelemetry."):
                logging.getLogger(name).filters.clear()

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

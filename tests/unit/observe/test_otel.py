"""Every variable of OpenTelemetry that docs/tracing.md promises, against a collector that listens."""

import importlib
import logging
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from roseinfer.config.options import Config, TracingConfig
from roseinfer.errors import ConfigError
from roseinfer.observe import otel
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.otel import exporter_names
from roseinfer.observe.tracing.tracing import Tracing, make_tracing
from tests.collector import ReceivingCollector, receiving, receiving_grpc
from tests.conftest import require_tool
from tests.unit.observe.facts import make_metrics, make_timeline

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
Listen = Callable[[], AbstractContextManager[ReceivingCollector]]


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_") or name.endswith("_CA_BUNDLE")]:
        monkeypatch.delenv(name)


class Server:
    """What a server would trace, by the environment and its options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None, **environment: str) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        config = Config(tracing=TracingConfig(endpoint=endpoint, ratio=1.0))
        present = otel.sdk_environment()
        names = exporter_names("traces", endpoint, present)
        self.metrics = make_metrics()
        self.tracing: Tracing | None = None
        if names:
            self.tracing = make_tracing(config, "1.2.3", self.metrics, Attribution(), names, present)

    def serve(self, *request_ids: str) -> None:
        """Requests from begin to end, of eight spans each."""
        assert self.tracing is not None
        for request_id in request_ids:
            timeline = make_timeline(request_id=request_id, tracestate="")
            self.tracing.on_start(timeline)
            self.tracing.on_finish(timeline)

    def serve_and_close(self) -> None:
        self.serve("r-1")
        assert self.tracing is not None
        self.tracing.close()


# --- where to ---------------------------------------------------------------------------------------------------------


def test_an_endpoint_in_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, **{ENDPOINT: collector.url}).serve_and_close()
    assert (len(collector.spans()), set(collector.paths)) == (8, {"/v1/traces"})


def test_the_environment_comes_before_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector, receiving() as other:
        Server(monkeypatch, other.url, **{ENDPOINT: f"{collector.url}/base/"}).serve_and_close()
    assert (len(collector.spans()), set(collector.paths), other.num_requests) == (8, {"/base/v1/traces"}, 0)


@pytest.mark.parametrize(("path", "posted_to"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/x/y", "/x/y")])
def test_the_option_is_enough_too(monkeypatch: pytest.MonkeyPatch, path: str, posted_to: str) -> None:
    with receiving() as collector:
        Server(monkeypatch, f"{collector.url}{path}").serve_and_close()
    assert (len(collector.spans()), set(collector.paths)) == (8, {posted_to})


def test_the_endpoint_of_traces_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector, receiving() as other:
        own = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/taken"}
        Server(monkeypatch, **{ENDPOINT: other.url, **own}).serve_and_close()
    assert (len(collector.spans()), set(collector.paths), other.num_requests) == (8, {"/taken"}, 0)


@pytest.mark.parametrize(
    "name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"], ids=["all", "traces"]
)
def test_over_grpc(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with receiving_grpc() as collector:
        headers = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b"}
        Server(monkeypatch, **{ENDPOINT: collector.url, name: "grpc", **headers}).serve_and_close()
    assert len(collector.spans()) == 8
    assert collector.headers[0]["api-key"] == "a b"


def test_over_grpc_to_the_option_and_without_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving_grpc() as collector:
        address = collector.url.removeprefix("http://")
        plain = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
        Server(monkeypatch, address, **plain).serve_and_close()
    assert len(collector.spans()) == 8


def test_a_busy_collector_over_grpc_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving_grpc((503, {})) as collector:
        server = Server(monkeypatch, **{ENDPOINT: collector.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
        server.serve("r-1")
        assert server.tracing is not None
        server.tracing._export.close(20.0)
    assert (collector.num_requests, len(collector.spans())) == (2, 8)


@pytest.mark.parametrize("listen", [receiving, receiving_grpc])
@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"])
def test_headers(monkeypatch: pytest.MonkeyPatch, listen: Listen, name: str) -> None:
    protocol = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc" if listen is receiving_grpc else "http/protobuf"}
    with listen() as collector:
        Server(
            monkeypatch, **{ENDPOINT: collector.url, name: "authorization=Bearer%20t,x=1", **protocol}
        ).serve_and_close()
    assert (collector.headers[0]["authorization"], collector.headers[0]["x"]) == ("Bearer t", "1")


def test_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, **{ENDPOINT: collector.url, "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}).serve_and_close()
    assert (collector.headers[0]["content-encoding"], len(collector.spans())) == ("gzip", 8)


@pytest.mark.parametrize(
    "given",
    [
        {"OTEL_EXPORTER_OTLP_COMPRESSION": "none"},
        {"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "none"},
        {"OTEL_EXPORTER_OTLP_COMPRESSION": "", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": " "},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": ""},
    ],
)
def test_over_grpc_none_and_nothing_are_values_too(monkeypatch: pytest.MonkeyPatch, given: Mapping[str, str]) -> None:
    with receiving_grpc() as collector:
        Server(
            monkeypatch, **{ENDPOINT: collector.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", **given}
        ).serve_and_close()
    assert len(collector.spans()) == 8
    assert "grpc-encoding" not in collector.headers[0]


def test_a_timeout_gives_a_batch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far below the ten seconds of the SDK, in which the test would end without it."""
    with receiving((503, {"Retry-After": "5"})) as collector:
        short = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.2", "OTEL_BSP_SCHEDULE_DELAY": "1"}
        server = Server(monkeypatch, **{ENDPOINT: collector.url, **short})
        server.serve("r-1")
        while not server.metrics.num_dropped_spans():
            pass
        assert collector.num_requests == 1
        assert server.tracing is not None
        server.tracing.close()


def test_a_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "crt"), str(tmp_path / "key")
    request = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=collector", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [require_tool("openssl"), "req", *request, *name, "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with receiving(tls=tls) as collector:
        Server(monkeypatch, **{ENDPOINT: collector.url}).serve_and_close()
        assert collector.spans() == []
        trusted = {"OTEL_EXPORTER_OTLP_CERTIFICATE": certificate}
        Server(monkeypatch, **{ENDPOINT: collector.url, **trusted}).serve_and_close()
        assert len(collector.spans()) == 8


@pytest.mark.parametrize(
    "environment", [{"OTEL_SDK_DISABLED": " True"}, {"OTEL_TRACES_EXPORTER": "none"}, {ENDPOINT: ""}, {}]
)
def test_without_or_switched_off_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]
) -> None:
    endpoint = "http://127.0.0.1:1" if environment and ENDPOINT not in environment else None
    assert Server(monkeypatch, endpoint, **environment).tracing is None


def test_an_exporter_by_name_needs_no_endpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with receiving() as collector:
        Server(monkeypatch, collector.url, OTEL_TRACES_EXPORTER="console, otlp").serve_and_close()
    assert len(collector.spans()) == 8
    monkeypatch.delenv(ENDPOINT, raising=False)
    assert exporter_names("traces", None, {"OTEL_TRACES_EXPORTER": "otlp"}) == ["otlp"]


# --- how --------------------------------------------------------------------------------------------------------------


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        batches = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3", "OTEL_BSP_SCHEDULE_DELAY": "1"}
        server = Server(monkeypatch, **{ENDPOINT: collector.url, **batches})
        server.serve("r-1")
        collector.wait_for(lambda found: len(found) == 8)  # nobody closes
        assert collector.num_requests >= 3
        assert server.tracing is not None
        server.tracing.close()


def test_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16"}
    with receiving() as collector:
        server = Server(monkeypatch, **{ENDPOINT: collector.url, **small, "OTEL_BSP_SCHEDULE_DELAY": "3600000"})
        server.serve("r-1", "r-2")
        assert server.metrics.num_dropped_spans() == 8
        assert server.tracing is not None
        server.tracing.close()
    assert len(collector.spans()) == 8


def test_an_exporter_that_is_named_twice_sends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, collector.url, OTEL_TRACES_EXPORTER="otlp, otlp").serve_and_close()
    assert len(collector.spans()) == 8


def test_a_batch_is_no_larger_than_a_queue_that_was_chosen_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, collector.url, OTEL_BSP_MAX_QUEUE_SIZE="100").serve_and_close()
    assert len(collector.spans()) == 8


def test_what_the_resource_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, collector.url).serve_and_close()
        plain = collector.resource()
    assert (plain["service.name"], plain["service.version"]) == ("roseinfer", "1.2.3")
    assert str(plain["service.instance.id"]).endswith(f":{os.getpid()}")
    with receiving() as collector:
        given = {"OTEL_RESOURCE_ATTRIBUTES": "service.version=9,service.name=lost,k8s.pod.name=a%20b"}
        Server(monkeypatch, collector.url, **given, OTEL_SERVICE_NAME="chat").serve_and_close()
        told = collector.resource()
    assert (told["service.name"], told["service.version"], told["k8s.pod.name"]) == ("chat", "9", "a b")
    assert told["service.instance.id"] == plain["service.instance.id"]


def test_limits_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, collector.url, OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="2").serve_and_close()
    assert {len(span.attributes) for span in collector.spans()} == {0, 2}


def test_a_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as collector:
        Server(monkeypatch, collector.url, OTEL_TRACES_SAMPLER="always_off").serve_and_close()
    assert collector.num_requests == 0


# --- what cannot be followed ------------------------------------------------------------------------------------------

NO_ADDRESSES = [
    "another",
    "ftp://example.com:1",
    "http://",
    "http://example.com:0",
    "http://example.com:x",
    "http://example.com:99999",
    "http://127.0.0.1@example.com",
    "http://example.com?q",
    f"http://{'a' * 64}.example.com",
    "http://example.com/tracés",
    "http://$(NODE_IP):4318",  # which Kubernetes replaces in `env` alone
    "http://${COLLECTOR}:4318",
    "http://example\n.com",
]


@pytest.mark.parametrize("is_grpc", [False, True])
def test_the_line_end_of_a_file_is_no_part_of_a_value(monkeypatch: pytest.MonkeyPatch, is_grpc: bool) -> None:
    with (receiving_grpc if is_grpc else receiving)() as collector:
        given = {
            ENDPOINT: f" {collector.url}\n",
            "OTEL_SERVICE_NAME": "chat\n",
            "OTEL_EXPORTER_OTLP_INSECURE": "true\n",
        }
        Server(monkeypatch, OTEL_EXPORTER_OTLP_PROTOCOL="grpc" if is_grpc else "", **given).serve_and_close()
        assert len(collector.spans()) == 8
        assert collector.resource()["service.name"] == "chat"


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Server(monkeypatch, url)
    assert (refusal.value.param, repr(url) in refusal.value.message) == ("tracing.endpoint", True)
    with pytest.raises(ConfigError) as refusal:
        Server(monkeypatch, **{ENDPOINT: url})
    assert (refusal.value.param, repr(url) in refusal.value.message) == (ENDPOINT, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "pigeon"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "tcp"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "inf"),  # with which every batch would fail
        ("OTEL_BSP_SCHEDULE_DELAY", "9" * 30),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/absent.pem"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", __file__),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", __file__),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", __file__),  # alone
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "ok=1,nonsense"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=1"),
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "a=b%0d%0ac"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=%E2%82%AC"),  # with which no batch could be sent
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=%ff"),
        ("OTEL_RESOURCE_ATTRIBUTES", "a=b,nonsense"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0.5"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "8"),  # less than a trace
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000"),  # more than the queue
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        ("OTEL_PROPAGATORS", "pigeon"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Server(monkeypatch, "http://127.0.0.1:1", **{name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_EXPORTER_OTLP_COMPRESSION", "deflate"), ("OTEL_EXPORTER_OTLP_HEADERS", "a=%C3%A9")]
)
def test_what_grpc_cannot_follow(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Server(monkeypatch, "http://127.0.0.1:1", **{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", name: value})
    assert (refusal.value.param, "a=" in refusal.value.message) == (name, False), "a header may be a secret"


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "unset"])
def test_a_limit_that_is_none_is_refused_before_the_sdk_is_imported(value: str) -> None:
    """Its import fails on a negative one, with which the telemetry process died, again and again."""
    program = (
        "from roseinfer.config.options import Config, TracingConfig; from roseinfer.errors import ConfigError\n"
        "from roseinfer.observe.observation import Observation, import_exporters\n"
        "config = Config(tracing=TracingConfig(endpoint='http://127.0.0.1:1'))\n"
        "import_exporters(config)\n"
        "try: Observation(config, '1', int, list)\n"
        "except ConfigError as error: print(error.param)"
    )
    environment = {**os.environ, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": value}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"


def test_every_outage_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """The exporter for gRPC leaves out what it has said in the last 20 s, be it of the other signal."""
    importlib.reload(importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.exporter"))
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    spans, metrics = otel.Failures("spans"), otel.Failures("metrics")
    for failures, what in ((spans, "traces"), (metrics, "metrics")):
        exporter.error("Failed to export %s", what)
        failures.note(is_taken=False)
        failures.close()
    reasons = [vars(record)["reason"] for record in caplog.records if record.levelno == logging.WARNING]
    assert reasons == ["Failed to export traces", "Failed to export metrics"]


def test_what_the_standard_has_one_go_on_without_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fine = {"OTEL_SDK_DISABLED": "FALSE", "OTEL_LOGS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_INSECURE": " true"}
    otel.warn(fine)
    assert not caplog.messages
    odd = {"OTEL_SDK_DISABLED": "yes", "OTEL_LOGS_EXPORTER": "otlp", "OTEL_CONFIG_FILE": "/otel.yaml"}
    otel.warn(odd)
    assert [message.split()[0] for message in caplog.messages] == list(odd)
    assert exporter_names("traces", "http://127.0.0.1:1", odd) == ["otlp"]


def test_grpc_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match=r"roseinfer\[otlp-grpc\]"):
        otel.make_exporters("traces", ["otlp"], None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_a_server_that_exports_nothing_does_not_import_the_sdk() -> None:
    program = (
        "import sys; from roseinfer.observe.observation import Observation; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'grpc', 'requests'))])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]"

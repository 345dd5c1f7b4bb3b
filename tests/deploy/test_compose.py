"""The parts of deploy/compose fit each other and the program: files, ports, names, labels. Nothing is started."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from roseinfer.config.sources import load
from roseinfer.observe.metrics.exemplars import Exemplar
from roseinfer.server.lifecycle import CONNECTIONS_CLOSE_S, ENGINE_CLOSE_S, FAREWELL_S
from tests.conftest import require_tool
from tests.repo.tree import ROOT

FOLDER = ROOT / "deploy" / "compose"
COMPOSE = FOLDER / "compose.yaml"
LISTENS_ON = {
    "prometheus": 9090,
    "grafana": 3000,
    "locust": 8089,
}  # their programs' defaults, which nothing here changes


def read(*names: str) -> Any:
    return yaml.safe_load(FOLDER.joinpath(*names).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """As Compose understands them, with every short form written out."""
    return resolved(COMPOSE)["services"]  # type: ignore[no-any-return]


def resolved(*files: Path, **environment: str) -> dict[str, Any]:
    """What `docker-compose config` makes of the files. It refuses what is no option, and a type that does not fit."""
    # Debian's docker-compose is the one before `name:` became an option.
    copies = [FOLDER / f".{file.name}" for file in files]
    try:
        for file, copy in zip(files, copies, strict=True):
            copy.write_text(re.sub(r"^name: \w+$", "", file.read_text(), flags=re.MULTILINE))
        named = [option for copy in copies for option in ("--file", str(copy))]
        command = [require_tool("docker-compose"), "--project-directory", str(FOLDER), *named, "config"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    finally:
        for copy in copies:
            copy.unlink()
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)  # type: ignore[no-any-return]


def mounts(services: dict[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Service, what of this repository is mounted, and where."""
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source, target, mode = volume.split(":")
            if source.startswith("/"):
                assert mode == "ro", volume
                yield name, Path(source), target


def urls(tree: Any) -> Iterator[str]:
    """Every URL in a tree of YAML."""
    match tree:
        case dict():
            for value in tree.values():
                yield from urls(value)
        case list():
            for value in tree:
                yield from urls(value)
        case str() if "://" in tree:
            yield tree
        case _:
            pass


def test_a_gpu_is_asked_for_when_wanted() -> None:
    both = resolved(COMPOSE, FOLDER / "compose.cuda.yaml", DEVICE="cuda", MODEL="an/other")["services"]["roseinfer"]
    assert both["build"]["args"]["DEVICE"] == "cuda"
    assert both["command"][-1] == "an/other"
    assert both["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_what_is_mounted_exists_and_is_ours(services: dict[str, Any]) -> None:
    mounted = list(mounts(services))
    assert {name for name, _, _ in mounted} == set(services)
    assert [str(source) for _, source, _ in mounted if not source.exists() or not source.is_relative_to(ROOT)] == []
    used = {source for _, source, _ in mounted}
    ours = {path for path in FOLDER.rglob("*.y*ml") if not path.name.startswith("compose.")}
    assert {path for path in ours if not used & {path, *path.parents}} == set(), "a file that nobody reads"


def test_only_this_machine_is_listened_on_and_each_where_its_program_listens(services: dict[str, Any]) -> None:
    ports = {**LISTENS_ON, "roseinfer": load().config.server.port}
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {name: [f"127.0.0.1:{port}:{port}/tcp"] for name, port in ports.items()}


def test_every_image_has_an_exact_version(services: dict[str, Any]) -> None:
    foreign = {service["image"] for service in services.values() if "build" not in service}
    assert len(foreign) == 4
    assert [image for image in foreign if not re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", image)] == []


def test_roseinfer_takes_its_configuration_and_may_finish_its_streams(services: dict[str, Any]) -> None:
    service = services["roseinfer"]
    serve, *options = service["command"]
    assert serve == "serve"
    local = [str(FOLDER / "roseinfer.yaml") if option.startswith("/etc/") else option for option in options]
    command = [sys.executable, "-m", "roseinfer", "config", "show", *local]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    config = load(file=FOLDER / "roseinfer.yaml").config
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.server.drain_timeout_s + FAREWELL_S + ENGINE_CLOSE_S + 2 * CONNECTIONS_CLOSE_S
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def test_addresses_lead_to_a_service_and_the_port_it_listens_on(services: dict[str, Any]) -> None:
    """From roseinfer to the collector to Tempo, and from Grafana to Tempo and Prometheus."""
    config = load(file=FOLDER / "roseinfer.yaml").config
    tempo, collector = read("tempo.yaml"), read("collector.yaml")
    listens = {
        ("collector", port_of(collector["receivers"])),
        ("tempo", port_of(tempo["distributor"]["receivers"])),
        ("tempo", tempo["server"]["http_listen_port"]),
        ("prometheus", LISTENS_ON["prometheus"]),
        ("roseinfer", config.server.port),
    }
    sources = read("grafana", "datasources", "sources.yaml")["datasources"]
    commands = [service.get("command") for service in services.values()]
    asked = [*urls(commands), *urls(sources), *urls(collector), str(config.tracing.endpoint)]
    assert {(urlsplit(url).hostname, urlsplit(url).port) for url in asked} == listens


def port_of(receivers: dict[str, Any]) -> int:
    return int(receivers["otlp"]["protocols"]["http"]["endpoint"].removeprefix("0.0.0.0:"))


def test_prometheus_takes_its_configuration_and_scrapes_the_operations_port(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "prometheus.yml", tmp_path)
    shutil.copytree(ROOT / "dashboards" / "rules", tmp_path / "rules")
    command = [require_tool("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.search(r"SUCCESS: [1-9]\d* rules found", result.stdout), result.stdout
    ours = next(job for job in read("prometheus.yml")["scrape_configs"] if job["job_name"] == "roseinfer")
    assert ours["static_configs"][0]["targets"] == [f"roseinfer:{load().config.server.ops_port}"]


def test_grafana_finds_dashboards_sources_and_the_trace_of_an_exemplar(services: dict[str, Any]) -> None:
    targets = {target: source for name, source, target in mounts(services) if name == "grafana"}
    (provider,) = read("grafana", "dashboards", "provider.yaml")["providers"]
    assert list(targets[provider["options"]["path"]].glob("*.json"))
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert "panels" in json.loads((targets[str(home.parent)] / home.name).read_text())

    by_uid = {source["uid"]: source for source in read("grafana", "datasources", "sources.yaml")["datasources"]}
    (link,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert by_uid[link["datasourceUid"]]["type"] == "tempo"
    assert link["name"] in Exemplar(0.0, 0, "a" * 32, 1, 1).labels
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    assert by_uid["prometheus"]["jsonData"]["timeInterval"] == read("prometheus.yml")["global"]["scrape_interval"]


def test_every_part_of_the_collectors_pipelines_is_configured_and_used() -> None:
    collector = read("collector.yaml")
    assert set(collector) == {"receivers", "processors", "exporters", "service"}
    for kind in ("receivers", "processors", "exporters"):
        used = {name for pipeline in collector["service"]["pipelines"].values() for name in pipeline[kind]}
        assert used == set(collector[kind])
    assert collector["service"]["pipelines"]["traces"]["processors"][0] == "memory_limiter", "it must be the first"

"""Turns values into rendered objects by asking helm_engine.py, which runs under a Python of its own."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "roseinfer"
SCHEMAS = Path(__file__).parent / "schemas"
PYTHON = ROOT / "build" / "helm-venv" / "bin" / "python"
OLDEST, NEWEST = "1.28", "1.37"  # of Kubernetes; the oldest is `kubeVersion` in Chart.yaml

Object = dict[str, Any]


class Refused(Exception):
    """Helm's words for values that it does not accept."""


@dataclass(frozen=True)
class Rendered:
    """What a release consists of."""

    objects: list[Object]
    notes: str

    def of(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str, suffix: str = "") -> Object:
        """The only object of that kind whose name ends so."""
        (found,) = [found for found in self.of(kind) if not suffix or found["metadata"]["name"].endswith(suffix)]
        return found

    @property
    def pod(self) -> Object:
        """The pod template of the Deployment."""
        template: Object = self.one("Deployment")["spec"]["template"]
        return template

    @property
    def server(self) -> Object:
        """The server's container."""
        (found,) = [each for each in self.pod["spec"]["containers"] if each["name"] == "server"]
        container: Object = found
        return container

    @property
    def config_text(self) -> str:
        """The program's configuration file, from the ConfigMap that the pod mounts."""
        (mounted,) = [each for each in self.pod["spec"]["volumes"] if each["name"] == "config"]
        maps = {each["metadata"]["name"]: each for each in self.of("ConfigMap")}
        text: str = maps[mounted["configMap"]["name"]]["data"]["config.yaml"]
        return text


class HelmProcess:
    """A process with the real Helm in it; half a second a question."""

    def __init__(self) -> None:
        command = [PYTHON, Path(__file__).with_name("helm_engine.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def render(self, values: Object, *, chart: Path = CHART, **cluster: Any) -> Rendered:
        """The release with these values. Raises Refused."""
        answer = self._ask("render", chart=str(chart), values=values, **cluster)
        if "error" in answer:
            raise Refused(answer["error"])
        return Rendered(answer["objects"], answer["notes"])

    def invalid(self, rendered: Rendered, version: str) -> list[str]:
        """What a Kubernetes of that version would say against the objects."""
        answer = self._ask("validate", objects=rendered.objects, version=version, schemas=str(SCHEMAS))
        errors: list[str] = answer["errors"]
        return errors

    def lint(self) -> list[Object]:
        errors: list[Object] = self._ask("lint", chart=str(CHART))["errors"]
        return errors

    def package(self, directory: Path) -> Path:
        return Path(self._ask("package", chart=str(CHART), directory=str(directory))["path"])

    def _ask(self, ask: str, **question: Any) -> Object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ask": ask, **question}) + "\n")
        self._process.stdin.flush()
        answer: Object = json.loads(self._process.stdout.readline())
        return answer


def examples() -> Iterator[Path]:
    """The values files that show one feature each."""
    yield from sorted((CHART / "ci").glob("*-values.yaml"))

"""Renders, checks and packages charts with the real Helm.

It runs in an environment of its own, since helm-sdkpy needs Python 3.12 (`make chart` sets it up in build/helm-venv).
That library is the Go engine of Helm without its `template` command, so a release is installed into a stub of
Kubernetes' API on the loopback, which stores the release record that Helm sends and nothing else.

Without arguments it answers questions, one JSON object a line on stdin and on stdout: see `answers`.
`lint CHART` and `package CHART DIRECTORY` are for people; the exit code is 1 when something is wrong.
"""

import asyncio
import base64
import functools
import gzip
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import helm_sdkpy
import jsonschema
import kubernetes_validate
import yaml

DEFAULTS = {"protocol": "TCP"}  # of the keys of items in lists
LINT_ERROR = 3  # Helm's severities: 1 is information, 2 a warning, 3 an error

Object = dict[str, Any]

# The kinds that there are; a client asks the API for them before it sends one.
CORE_KINDS = {
    "v1": ("Pod", "Service", "ConfigMap", "Secret", "ServiceAccount", "PersistentVolumeClaim", "Namespace"),
    "apps/v1": ("Deployment",),
    "batch/v1": ("Job",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy", "Ingress"),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
CUSTOM_KINDS = {
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "gateway.networking.k8s.io/v1": ("HTTPRoute", "BackendTLSPolicy"),
    "inference.networking.k8s.io/v1": ("InferencePool",),
}


def plural(kind: str) -> str:
    """As the API's paths have it."""
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


@dataclass
class Cluster:
    """The version and kinds of the stub's API, and the release records stored in it."""

    version: str = "1.37"
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    live: Sequence[Object] = ()  # what a template finds by `lookup`
    stored: list[bytes] = field(default_factory=list)

    def group_versions(self) -> list[str]:
        return [name for name in self.kinds if "/" in name]

    def answer(self, path: str) -> Object | None:
        """The discovery documents and the live objects; None for what there is not."""
        if path == "/version":
            major, minor = self.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(map(_group, self.group_versions()))}
        name = path.removeprefix("/apis/").removeprefix("/api/")
        if name in self.kinds:
            resources = [
                {"name": plural(kind), "kind": kind, "namespaced": kind != "Namespace", "verbs": ["create", "get"]}
                for kind in self.kinds[name]
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}
        if path.endswith("/secrets"):
            return {"kind": "SecretList", "apiVersion": "v1", "items": []}
        live = (each for each in self.live if path.endswith(f"/{plural(each['kind'])}/{each['metadata']['name']}"))
        return next(live, None)


def _group(group_version: str) -> Object:
    group, _, number = group_version.partition("/")
    version = {"groupVersion": group_version, "version": number}
    return {"name": group, "versions": [version], "preferredVersion": version}


class StubHandler(BaseHTTPRequestHandler):
    """Answers discovery, has the objects that it is told of, and accepts every object that is sent."""

    cluster: ClassVar[Cluster] = Cluster()
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client's acknowledgement of its head

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the name is http.server's
        pass

    def do_GET(self) -> None:
        found = self.cluster.answer(self.path.partition("?")[0])
        absent = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self._send(404 if found is None else 200, absent if found is None else found)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_json = body.startswith(b"{")
        if not is_json:  # Helm's own record, in protobuf
            self.cluster.stored.append(body)
        self._send(201, json.loads(body) if is_json else {"kind": "Secret", "apiVersion": "v1", "metadata": {}})

    def do_PUT(self) -> None:
        self.do_POST()

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_DELETE(self) -> None:
        self._send(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _send(self, status: int, answer: Object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Helm:
    """Helm with the stub as its cluster; both live as long as the process."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), StubHandler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _configuration(self, namespace: str) -> Any:
        host, port = self._server.server_address[:2]
        cluster = {"name": "stub", "cluster": {"server": f"http://{host!s}:{port}"}}
        context = {"name": "stub", "context": {"cluster": "stub", "user": "stub", "namespace": namespace}}
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stub",
            "clusters": [cluster],
            "contexts": [context],
            "users": [{"name": "stub", "user": {}}],
        }
        return helm_sdkpy.Configuration(namespace=namespace, kubeconfig=yaml.safe_dump(text))

    def render(self, question: Object) -> Object:
        """`{chart, values, version?, apis?, release?, namespace?, live?}` -> `{objects, notes}`, or `{error}`.

        `apis` are the custom group versions that the cluster has, all known ones when it is left out.
        """
        apis = question.get("apis", list(CUSTOM_KINDS))
        kinds = CORE_KINDS | {name: kinds for name, kinds in CUSTOM_KINDS.items() if name in apis}
        StubHandler.cluster = cluster = Cluster(question.get("version", "1.37"), kinds, question.get("live", ()))
        install = helm_sdkpy.Install(self._configuration(question.get("namespace", "serving")))
        release = question.get("release", "demo")
        try:
            asyncio.run(install.run(release, question["chart"], values=question["values"], wait=False))
        except helm_sdkpy.HelmError as error:
            return {"error": str(error)}
        record = _release(cluster.stored[0])
        hooks = [hook["manifest"] for hook in record.get("hooks", [])]
        texts = [record["manifest"], *hooks]
        try:
            objects = [found for text in texts for found in yaml.load_all(text, StrictLoader) if found is not None]
        except ValueError as error:
            return {"error": f"YAML parse error: {error}"}
        return {"objects": objects, "notes": record["info"].get("notes", "")}

    def lint(self, chart: str) -> list[Object]:
        """Messages of the severity of an error; Helm's library gives their severity and path, and no text."""
        result = asyncio.run(helm_sdkpy.Lint(self._configuration("serving")).run(chart))
        return [message for message in result.get("Messages") or [] if message["Severity"] >= LINT_ERROR]

    def package(self, chart: str, directory: str) -> str:
        """The path of the archive."""
        path: str = asyncio.run(helm_sdkpy.Package(self._configuration("serving")).run(chart, directory))
        return path


class StrictLoader(yaml.CSafeLoader):
    """Raises ValueError for a key that a mapping has twice: kubectl and Argo CD refuse it, and Helm takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} twice{node.start_mark}")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _release(record: bytes) -> Object:
    """The release inside the Secret that Helm stores: base64 of gzip of JSON, somewhere in a protobuf message."""
    found = re.search(rb"H4sI[A-Za-z0-9+/]+=*", record)
    assert found, "Helm stored no release"
    release: Object = json.loads(gzip.decompress(base64.b64decode(found.group())))
    return release


# A schema of Kubernetes has 25000 lines, and the library reads them for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def repeated(value: Any, schema: Object, definitions: Object, path: str) -> Iterator[str]:
    """Yields the lists with two items of one key: `path: key`.

    Of the two kinds of patches, a client's merges such a list by a single key of its items, and loses one of two that
    share it; the server's goes by several keys, and refuses them.
    """
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if isinstance(value, dict):
        for name, child in value.items():
            known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(known, dict):
                yield from repeated(child, known, definitions, f"{path}.{name}")
    elif isinstance(value, list):
        merged_by = schema.get("x-kubernetes-patch-merge-key")
        for keys in {(merged_by,) if merged_by else (), tuple(schema.get("x-kubernetes-list-map-keys", ()))}:
            found = [tuple(item.get(key, DEFAULTS.get(key)) for key in keys) for item in value if keys]
            yield from (f"{path}: two of {each}" for each in {*found} if found.count(each) > 1)
        for i, child in enumerate(value):
            yield from repeated(child, schema.get("items", {}), definitions, f"{path}.{i}")


def merge_conflicts(found: Object, version: str) -> Iterator[str]:
    """`repeated` of an object of Kubernetes' own, by its schema."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", found["apiVersion"])
    folder = f"kubernetes-json-schema/v{version}.0-local"
    contents = kubernetes_validate.utils.schema_contents
    schema = contents(f"{folder}/{found['kind'].lower()}-{group}.json", version)
    return repeated(found, schema, contents(f"{folder}/_definitions.json", version)["$defs"], "")


def validate(question: Object) -> Object:
    """`{objects, version, schemas}` -> `{errors}`: `Kind/name: path: what`, strictly, without a cluster.

    Core objects are held against Kubernetes' own schemas of that version, and have no lists that a patch would mix up;
    others against the file `Kind.json` in the directory `schemas`, and one that has no such file is an error.
    """
    errors = []
    for found in question["objects"]:
        name = f"{found['kind']}/{found['metadata']['name']}"
        schema_file = Path(question["schemas"]) / f"{found['kind']}.json"
        try:
            if found["apiVersion"] in CORE_KINDS:
                kubernetes_validate.validate(found, question["version"], strict=True)
                errors += [f"{name}: {each}" for each in merge_conflicts(found, question["version"])]
            elif schema_file.exists():
                jsonschema.validate(found, json.loads(schema_file.read_text()))
            else:
                errors.append(f"{name}: there is no {schema_file.name}")
        except jsonschema.ValidationError as error:
            errors.append(f"{name}: {'.'.join(map(str, error.path))}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            errors.append(f"{name}: {error.message}")
    return {"errors": errors}


def answers(helm: Helm) -> dict[str, Callable[[Object], Object]]:
    """The questions, by the name in `ask`."""
    return {
        "render": helm.render,
        "validate": validate,
        "lint": lambda question: {"errors": helm.lint(question["chart"])},
        "package": lambda question: {"path": helm.package(question["chart"], question["directory"])},
    }


def main(arguments: list[str]) -> int:
    helm = Helm()
    match arguments:
        case []:
            known = answers(helm)
            for line in sys.stdin:
                question = json.loads(line)
                print(json.dumps(known[question["ask"]](question)), flush=True)
        case ["lint", chart]:
            errors = helm.lint(chart)
            print(f"{chart}: {errors or 'no errors'}")
            return 1 if errors else 0
        case ["package", chart, directory]:
            Path(directory).mkdir(parents=True, exist_ok=True)
            print(helm.package(chart, directory))
        case _:
            print("usage: helm_engine.py [lint CHART | package CHART DIRECTORY]", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

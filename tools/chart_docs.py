"""Writes the generated parts of the Helm chart's schema, and its README.

Of values.schema.json, `config` is the program's schema and the thresholds are bounds of buckets; the rest of that file
is written by hand, and it says what each value means.
"""

import json
from collections.abc import Iterator
from typing import Any

import yaml

from generated_files import ROOT, filled
from roseinfer.config import docs as config_docs
from roseinfer.observe.metrics.histogram import TOKEN_S, WAIT_S

CHART = ROOT / "deploy" / "helm" / "roseinfer"
SCHEMA = CHART / "values.schema.json"

Schema = dict[str, Any]


def schema() -> str:
    """The text of values.schema.json with its generated parts made anew."""
    tree: Schema = json.loads(SCHEMA.read_text())
    properties = tree["properties"]
    config = _without_references(config_docs.json_schema())
    properties["config"] = config | {
        "description": "The program's own options, which [configuration](../../../docs/configuration.md) lists. What "
        "other values decide is refused here, unless it is the same."
    }
    slo = properties["prometheusRule"]["properties"]["slo"]["properties"]
    slo["ttft"]["properties"]["thresholdSeconds"]["enum"] = list(WAIT_S)
    slo["itl"]["properties"]["thresholdSeconds"]["enum"] = list(TOKEN_S)
    properties["models"]["items"] = _model(properties)
    tree["allOf"] = [_needed(tree, yaml.safe_load((CHART / "values.yaml").read_text()))]
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def _model(properties: Schema) -> Schema:
    """The schema of an entry of `models`: a name, and the chart's values but those of the release as a whole."""
    whole = {"global", "enabled", "models", "extraManifests", "fullnameOverride", "ingress"}
    name = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
    values: Schema = {value: {"$ref": f"#/properties/{value}"} for value in properties if value not in whole}
    backend = {value: {"$ref": f"#/properties/httpRoute/properties/{value}"} for value in ("weight", "backendTLS")}
    values["httpRoute"] = {"type": "object", "additionalProperties": False, "properties": backend}  # one route for all
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {"name": name, **values},
    }


def _needed(tree: Schema, defaults: Any) -> Schema:
    """What makes a null for what has a default an error that names it: Helm drops the default, and templates need it.

    A list, a map of free names and an empty text may be null, which is the same as empty. It stands apart from what
    each value may be, since an entry of `models` has only some of them.
    """
    needed = []
    inner = {}
    for name, child in tree["properties"].items():
        default = defaults.get(name)
        if "properties" in child and name != "config":
            inner[name] = _needed(child, default)
            needed.append(name)
        elif "null" in child["type"]:
            continue
        elif isinstance(default, bool | int | float) or (isinstance(default, str) and default):
            needed.append(name)
    return {"required": needed, "properties": {name: found for name, found in inner.items() if found}}


def _without_references(tree: Schema) -> Schema:
    """Replace each reference by the definition that it refers to."""
    definitions = tree.get("$defs", {})

    def expand(node: Any) -> Any:
        if isinstance(node, list):
            return [expand(child) for child in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return expand(definitions[node["$ref"].rpartition("/")[2]])
        return {name: expand(child) for name, child in node.items() if name not in {"$defs", "title"}}

    expanded: Schema = expand(tree)
    return expanded


def page() -> str:
    """The chart's README: a row for each value."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = [
        f"| `{path}` | {_shown(default)} | {description} |"
        for path, description, default in _values(json.loads(schema()), defaults)
    ]
    table = "\n".join(["| value | default | meaning |", "|---|---|---|", *rows, ""])
    return filled("deploy/helm/roseinfer/README.md", {"table of values": table})


def _values(tree: Schema, defaults: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, description, default) of everything that has a description, depth first; the program's tree is one row."""
    for name, value in tree["properties"].items():
        path = f"{prefix}{name}"
        default = (defaults or {}).get(name, "")
        if "description" in value:
            yield path, value["description"], default
        if "properties" in value and path != "config":
            yield from _values(value, default, f"{path}.")


def _shown(default: Any) -> str:
    if default == "":
        return ""
    text = json.dumps(default, ensure_ascii=False)
    return f"`{text}`" if len(text) <= 40 else "see `values.yaml`"

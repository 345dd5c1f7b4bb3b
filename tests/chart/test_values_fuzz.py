"""Whatever the values: manifests that Kubernetes accepts, or one sentence that names the value; no words of Go's."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart.helm_process import CHART, NEWEST, HelmProcess, Object, Refused

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# How Go's template engine and YAML's reader speak when a template fell over its values.
PANICS = re.compile(
    "nil pointer|wrong type|error calling (?!fail)|can't evaluate|interface conversion|runtime error|executing \"|"
    "YAML parse error|converting YAML|index out of range|invalid value"
)
NUM_MIXES = 80
OF_KUBERNETES = {  # a field of what is an object of its own
    "affinity": "nodeAffinity",
    "strategy": "type",
    "podSecurityContext": "runAsUser",
    "securityContext": "privileged",
}


def paths(tree: Object, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Object]]:
    """Every value of the schema that has a name; of the program's own options `config` alone."""
    for name, child in tree.get("properties", {}).items():
        path = (*before, name)
        yield path, child
        if path[0] != "config":
            yield from paths(child, path)


PATHS = dict(paths(SCHEMA))
OPTIONS = {name: tree for name, tree in SCHEMA["properties"]["config"]["properties"].items() if "properties" in tree}


def nested(path: tuple[str, ...], value: Any) -> Object:
    for name in reversed(path):
        value = {name: value}
    found: Object = value
    return found


def names(tree: Object, parent: str = "") -> Iterator[str]:
    """The last name of each value that is given; of `enabled` what is."""
    for name, child in tree.items():
        if isinstance(child, dict) and child:
            yield from names(child, name)
        else:
            yield parent if name == "enabled" else name


def complaint(helm: HelmProcess, values: Object) -> str | None:
    """What is wrong with how the chart takes these values; None when it takes or refuses them well."""
    try:
        release = helm.render(values)
    except Refused as refused:
        words = str(refused)
        is_named = any(name in words for name in names(values))
        return None if is_named and not PANICS.search(words) else words
    invalid = helm.invalid(release, NEWEST)
    return "; ".join(invalid) or None


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_null_is_a_default_or_is_named(helm: HelmProcess, path: tuple[str, ...]) -> None:
    """In the place of a value, in a list, and in a map of free names."""
    assert complaint(helm, nested(path, None)) is None
    kind = PATHS[path].get("type")
    if kind == "array":
        assert complaint(helm, nested(path, [None])) is None
    if kind == "object" and "properties" not in PATHS[path]:
        assert complaint(helm, nested(path, {OF_KUBERNETES.get(path[-1], "a"): None})) is None


@pytest.mark.parametrize("section", sorted(OPTIONS))
def test_a_null_in_the_programs_options_is_a_default_or_is_named(helm: HelmProcess, section: str) -> None:
    assert complaint(helm, {"config": {section: None}}) is None
    for option in OPTIONS[section]["properties"]:
        assert complaint(helm, {"config": {section: {option: None}}}) is None, option


def chosen(schema: Object, draw: random.Random) -> Any:
    """Something that the schema allows, extremes above all, and now and then a null."""
    if draw.random() < 0.05:
        return None
    if "enum" in schema:
        return draw.choice(schema["enum"])
    kind = schema.get("type", "object")
    kind = draw.choice(kind) if isinstance(kind, list) else kind
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1), schema.get("maximum")
    texts = ["", "a", "10", "1Gi", "15s", "50%", "/models/a", "a.b/c", "https://example.com", "10.0.0.0/8", "x" * 63]
    fitting = [each for each in texts if re.search(schema.get("pattern", ""), each)]
    candidates: dict[str, list[Any]] = {
        "boolean": [True, False],
        "integer": [low, low + 1, min(7, high or 7), high or 100_000],
        "number": [max(low, 0.25), high or schema.get("exclusiveMaximum", 2) / 2],
        "string": [each for each in fitting if len(each) >= schema.get("minLength", 0)] or ["a"],
        "array": [[]],  # of Kubernetes' own objects, which are not of this schema
        "object": [{}],
        "null": [None],
    }
    items = schema.get("items", {})
    if "enum" in items or items.get("type") == "string":
        count = draw.randint(schema.get("minItems", 0), 2)
        candidates["array"] = [list(dict.fromkeys(chosen(items, draw) for _ in range(count)))]
    return draw.choice(candidates[kind])


@pytest.mark.parametrize("seed", range(NUM_MIXES))
def test_a_mix_of_values_is_rendered_or_refused_in_words(helm: HelmProcess, seed: int) -> None:
    draw = random.Random(seed)
    leaves = [
        path for path, child in PATHS.items() if "properties" not in child and path[0] not in {"config", "global"}
    ]
    values: Object = {}
    for path in draw.sample(leaves, draw.randint(1, 12)):
        node = values
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = chosen(PATHS[path], draw)
    assert complaint(helm, values) is None, values

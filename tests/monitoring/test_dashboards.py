"""The committed dashboards and rules are those that the catalogue gives, and they name only series that are exposed."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from monitoring import queries
from monitoring.outputs import CHART_FILES, FOLDER, PLACEHOLDERS, ROOT, chart_rules, files
from monitoring.panels import SHOWN
from monitoring.promql import own_labels, row_of
from monitoring.scaling import DEMAND_THRESHOLD
from monitoring.stand_ins import SAMPLES
from roseinfer.config.options import options
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.metrics.catalogue import PHASES
from roseinfer.observe.metrics.exemplars import WITH_EXEMPLARS
from roseinfer.records import LifecycleState
from tests.monitoring.expressions import comparisons, grouping_labels, selectors

BOARDS = queries.dashboards()
RULE_FILES = {
    name: yaml.safe_load((ROOT / FOLDER / "rules" / f"{name}.yaml").read_text()) for name in ("recording", "alerts")
}
RULES = [rule for content in RULE_FILES.values() for group in content["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
ALERTS = [rule for rule in RULES if "alert" in rule]
SCALING = [(ROOT / FOLDER / name).read_text() for name in ("autoscaling.promql", "queue_wait.promql")]

OF_TARGET = {"namespace", "pod", "instance", "job"}  # labels that the scraper adds
OF_RECORDED = {"namespace", "job", "model_name", "objective"}
BUILT_IN = {"__rate_interval", "__range"}
FOREIGN = {"up": OF_TARGET, "ALERTS": {*OF_TARGET, "alertname", "alertstate", "severity", "model_name"}}
for sample in SAMPLES:
    # With honorLabels a GPU's workload is in `pod` and `namespace`, without in `exported_pod` and `exported_namespace`.
    FOREIGN[sample.name] = FOREIGN.get(sample.name, set()) | {
        *sample.labels,
        *(label.removeprefix("exported_") for label in sample.labels),
    }


def data_panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, board in BOARDS.items():
        for panel in queries.panels(board):
            if panel["type"] != "text":
                yield name, panel


def expressions() -> dict[str, str]:
    """Every expression that is shipped, by where it stands."""
    shown = {
        f"{name}: {panel['title']} {index}": target.expression
        for name, panel in data_panels()
        for index, target in enumerate(queries.targets(panel, "1m", "1h"))
    }
    annotations = {
        f"{name}: {each['name']}": queries.filled(each["expr"], "1m", "1h")
        for name, board in BOARDS.items()
        for each in board["annotations"]["list"]
    }
    ruled = {f"rule {index}": rule["expr"] for index, rule in enumerate(RULES)}
    scaling = {f"scaling {index}": text.splitlines()[-1] for index, text in enumerate(SCALING)}
    return shown | annotations | ruled | scaling


def labels_of(name: str) -> set[str]:
    """The labels that a series can have; a KeyError for a name that is not exposed."""
    if name in RECORDED:
        return OF_RECORDED
    return FOREIGN[name] if name in FOREIGN else set(own_labels(name)) | OF_TARGET


def test_what_is_committed_is_what_is_generated() -> None:
    stale = [str(path) for path, text in files().items() if (ROOT / path).read_text() != text]
    assert stale == [], "run `make dashboards`"
    committed = {path.relative_to(ROOT) for path in (ROOT / FOLDER).rglob("*") if path.is_file()}
    assert committed == {path for path in files() if not path.is_relative_to(CHART_FILES)}


def test_there_is_a_dashboard_for_each_audience_with_an_address_of_its_own() -> None:
    assert set(BOARDS) == {"service", "engine", "jitter", "rollout", "gpu"}
    assert {name: board["uid"] for name, board in BOARDS.items()} == {name: f"roseinfer-{name}" for name in BOARDS}


@pytest.mark.parametrize("name", BOARDS)
def test_ids_are_unique_and_panels_do_not_overlap(name: str) -> None:
    panels = BOARDS[name]["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_has_a_unit_and_says_what_to_do() -> None:
    for name, panel in data_panels():
        where = f"{name}: {panel['title']}"
        assert panel["fieldConfig"]["defaults"]["unit"], where
        assert len(panel["description"].split()) >= 10, where
        assert panel["datasource"]["uid"] == "${datasource}", where
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]), where


def test_options_that_are_advised_exist() -> None:
    """In descriptions and in the runbook; `cache.*` is a section."""
    sections = {path.partition(".")[0] for path in options()}
    name = re.compile(rf"(?<![\w./-])({'|'.join(sections)})\.(\w+)")
    texts = [panel["description"] for _, panel in data_panels()] + [(ROOT / "docs" / "operations.md").read_text()]
    advised = {".".join(found.groups()) for text in texts for found in name.finditer(text)}
    advised = {each for each in advised if not each.endswith((".md", ".py"))}
    assert len(advised) >= 10
    assert advised <= set(options())


def test_rates_are_over_the_interval_that_grafana_computes() -> None:
    for name, panel in data_panels():
        for target in panel["targets"]:
            ranges = set(re.findall(r"\[([^\]]+)\]", target["expr"]))
            assert ranges <= {"$__rate_interval", "$__range", "30d"}, f"{name}: {panel['title']}"


@pytest.mark.parametrize("name", BOARDS)
def test_variables_that_are_used_are_defined(name: str) -> None:
    defined = {variable["name"] for variable in BOARDS[name]["templating"]["list"]}
    assert {"datasource", "namespace", "pod", "model_name"} <= defined
    texts = [target["expr"] for panel in queries.panels(BOARDS[name]) for target in panel.get("targets", ())]
    texts += [
        variable["query"]["query"] for variable in BOARDS[name]["templating"]["list"] if variable["type"] == "query"
    ]
    texts += [
        link["url"]
        for panel in queries.panels(BOARDS[name])
        for link in panel["fieldConfig"]["defaults"].get("links", ())
    ]
    used = {variable for text in texts for variable in re.findall(r"\$\{?(\w+)", text)}
    assert used <= defined | BUILT_IN


@pytest.mark.parametrize(("where", "expression"), expressions().items())
def test_names_and_labels_are_those_of_a_registry(where: str, expression: str) -> None:
    found = selectors(expression)
    assert found or re.fullmatch(r"vector\([\d.]+\)", expression)
    available: set[str] = set()
    for selector in found:
        available |= labels_of(selector.name)
        for label, _, value in selector.matchers:
            assert label in labels_of(selector.name), f"{where}: {selector.name} has no label {label}"
            for closed in row_of(selector.name).labels if selector.name.startswith("roseinfer_") else ():
                if closed.name == label and closed.values:
                    assert set(value.split("|")) <= set(closed.values), f"{where}: {label}={value}"
    assert grouping_labels(expression) <= available, where


def test_a_threshold_in_seconds_is_the_bound_of_a_bucket() -> None:
    """So that what an alert says is exact and not interpolated."""
    quantiles = {rule["record"]: rule["expr"] for rule in RULES if "histogram_quantile" in rule["expr"]}
    num_checked = 0
    for rule in RULES:
        for selector in selectors(rule["expr"]):
            for label, _, value in selector.matchers:
                if label == "le":
                    assert float(value) in row_of(selector.name).buckets, rule["expr"]
                    num_checked += 1
        for comparison in comparisons(rule["expr"]):
            if comparison.left in quantiles:
                (histogram,) = {each.name for each in selectors(quantiles[comparison.left])}
                assert comparison.number in row_of(histogram).buckets, rule["expr"]
                num_checked += 1
    assert num_checked >= 10
    for variable in BOARDS["service"]["templating"]["list"][-2:]:
        histogram = {"ttft": "time_to_first_token", "itl": "inter_token_latency"}[variable["name"]]
        assert {float(each) for each in variable["query"].split(",")} <= {
            *row_of(f"roseinfer_{histogram}_seconds_bucket").buckets
        }


def test_exemplars_are_asked_of_what_has_them_and_of_all_of_that() -> None:
    shown = set()
    for name, panel in data_panels():
        for target in queries.targets(panel, "1m", "1h"):
            if target.exemplar:
                families = {each.name.removesuffix("_bucket") for each in selectors(target.expression)}
                assert families <= WITH_EXEMPLARS, f"{name}: {panel['title']}"
                shown |= families
    assert shown == WITH_EXEMPLARS


def test_the_jitter_dashboard_leads_from_a_jump_to_a_cause_a_trace_and_the_timeline() -> None:
    panels = {panel["title"]: panel for panel in queries.panels(BOARDS["jitter"])}
    first, *_ = panels.values()
    assert first["title"] == "Inter-token latency"
    assert any(target["exemplar"] for target in first["targets"])
    assert "${operations}/debug/timeline" in {link["url"] for link in first["fieldConfig"]["defaults"]["links"]}
    assert "sum by (cause)" in panels["Slow gaps by cause"]["targets"][0]["expr"]
    advice = panels["What changes it"]["options"]["content"]
    assert all(f"| `{cause}` | {cause.row.remedy} |" in advice for cause in Cause)


def overrides_of(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each series that has properties of its own, those."""
    return {
        each["matcher"]["options"]: {one["id"]: one["value"] for one in each["properties"]}
        for each in panel["fieldConfig"].get("overrides", ())
    }


def test_a_cause_has_one_colour_in_every_panel() -> None:
    panels = [panel for _, panel in data_panels() if set(overrides_of(panel)) & set(Cause)]
    assert len(panels) >= 8
    for panel in panels:
        shown = {target["legendFormat"] for target in panel["targets"]}
        causes = set(Cause) if "{{cause}}" in shown else shown
        colours = {name: of["color"]["fixedColor"] for name, of in overrides_of(panel).items()}
        assert colours == {cause: Cause(cause).row.color for cause in causes}, panel["title"]


def test_the_service_page_begins_with_what_fires_and_shows_the_worst_pod_and_the_objective() -> None:
    panels = {panel["title"]: panel for panel in queries.panels(BOARDS["service"])}
    assert [*panels][:2] == ["Alerts that fire", "Which, and whose"]
    for title, objective in (("Time to first token", "$ttft"), ("Inter-token latency", "$itl")):
        shown = {target["legendFormat"]: target["expr"] for target in panels[title]["targets"]}
        assert {"p50", "p99", "p99 of the worst pod"} <= set(shown)
        assert shown["objective"] == f"vector({objective})"
        assert overrides_of(panels[title])["objective"]["color"]["fixedColor"] == "red"


def test_panels_of_a_closed_set_show_all_of_it() -> None:
    panels = {(name, panel["title"]): panel for name, panel in data_panels()}
    (mapping,) = panels["rollout", "Lifecycle"]["fieldConfig"]["defaults"]["mappings"]
    assert [each["text"] for each in mapping["options"].values()] == list(LifecycleState)
    by_phase = panels["engine", "Step time by phase"]["targets"]
    assert [target["legendFormat"] for target in by_phase] == [f"{phase} p99" for phase in PHASES]
    limit = panels["rollout", "Demand of a replica"]["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
    assert limit["value"] == DEMAND_THRESHOLD


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_its_runbook_and_to_a_dashboard(alert: dict[str, Any]) -> None:
    notes = alert["annotations"]
    assert alert["labels"]["severity"] in {"page", "ticket", "info"}
    assert notes["summary"]
    assert "{{ $value" in notes["description"] or "$labels" in notes["description"]
    file, _, anchor = notes["runbook_url"].partition("#")
    headings = re.findall(r"^### (\w+)$", (ROOT / file).read_text(), re.MULTILINE)
    assert alert["alert"] in headings
    assert anchor == alert["alert"].lower()
    assert notes["dashboard_url"].removeprefix("/d/roseinfer-") in BOARDS


def test_the_runbook_has_no_section_of_an_alert_that_is_none() -> None:
    headings = re.findall(r"^### (Roseinfer\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alert["alert"] for alert in ALERTS)


def test_the_lines_of_the_runbook_say_whom_they_ask_and_with_which_key() -> None:
    """An operator pastes them: server, key and pod are variables that the top of the runbook sets."""
    runbook = (ROOT / "docs" / "operations.md").read_text().partition("## Runbook")[2]
    setup, _, sections = runbook.partition("\n### ")
    lines = re.findall(r"`((?:curl|kubectl|roseinfer) [^`]+ [^`]+)`", sections)
    asking = [line for line in lines if line.startswith("curl")]
    assert len(asking) >= 4
    assert all('"$OPS/debug/' in line and '-H "Authorization: Bearer $KEY"' in line for line in asking)
    assert all('--namespace "$NAMESPACE"' in line and '"$POD"' in line for line in lines if line.startswith("kubectl"))
    used = {name for line in lines for name in re.findall(r"\$(\w+)", line)}
    assert used <= set(re.findall(r"\b([A-Z_]+)=", setup))


def test_the_rules_of_the_chart_are_the_same_with_placeholders() -> None:
    text = chart_rules()
    groups = text[text.index("groups:") :]
    assert all(placeholder in groups for placeholder in PLACEHOLDERS)
    for placeholder, default in PLACEHOLDERS.items():
        groups = groups.replace(placeholder, default)
    assert "@" not in groups
    filled = yaml.safe_load(groups)["groups"]
    plain = [group for content in RULE_FILES.values() for group in content["groups"]]
    for group in (*filled, *plain):
        for rule in group["rules"]:
            rule["expr"] = str(promql.parse(rule["expr"].replace("{}", "").replace(",}", "}")))
    assert filled == plain


def test_what_no_server_exposes_is_refused() -> None:
    refused = {
        "rate(roseinfer_step_secs_bucket[5m])": (KeyError, "roseinfer_step_secs_bucket is no series"),
        "roseinfer_step_seconds": (KeyError, "roseinfer_step_seconds is no series"),
        'roseinfer_requests_total{colour="red"}': (AssertionError, "has no label colour"),
        'sum(rate(roseinfer_requests_total{finish_reason=~"stop|bored"}[5m]))': (
            AssertionError,
            "has no finish_reason .*bored",
        ),
        'roseinfer_requests_total{finish_reason!="stop"}': (AssertionError, "only = and =~"),
    }
    for query, (error, message) in refused.items():
        with pytest.raises(error, match=message):
            SHOWN.complete(query)


def test_first_tokens_are_those_of_streams() -> None:
    """An answer in one piece is written when it is complete, which says nothing of its first token."""
    found = [selector for expression in expressions().values() for selector in selectors(expression)]
    found = [each for each in found if each.name.startswith("roseinfer_time_to_first_token_seconds")]
    assert len(found) > 20
    assert {value for each in found for label, _, value in each.matchers if label == "streamed"} == {"true"}
    assert all("streamed" in {label for label, _, _ in each.matchers} for each in found)

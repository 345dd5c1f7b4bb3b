"""Parses metrics pages: what holds now, and what happened between two of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from roseinfer.errors import InvalidRequest
from roseinfer.observe.metrics.histogram import Histogram

Labels = frozenset[tuple[str, str]]
_PREFIX = "roseinfer_"


@dataclass(frozen=True, slots=True)
class Page:
    """One page: sample name -> labels, that of the model left out -> value."""

    samples: Mapping[str, Mapping[Labels, float]]
    model_name: str

    @classmethod
    def parse(cls, text: str) -> "Page":
        """Parses a page. Raises InvalidRequest if it is none of ours."""
        samples: dict[str, dict[Labels, float]] = {}
        model_name = ""
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples if family.name.startswith(_PREFIX) else ():
                    labels = frozenset(item for item in sample.labels.items() if item[0] != "model_name")
                    samples.setdefault(sample.name, {})[labels] = sample.value
                    model_name = sample.labels.get("model_name", model_name)
        except ValueError as error:
            raise InvalidRequest(f"The metrics page cannot be read: {error}.") from None
        if not samples:
            raise InvalidRequest("The metrics page names nothing of roseinfer.")
        return cls(samples, model_name)

    def value(self, name: str, **labels: str) -> float:
        """Returns a sample; 0 for what is not on the page."""
        return self.samples.get(name, {}).get(frozenset(labels.items()), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Returns the samples of one name that differ in one label."""
        found = self.samples.get(name, {})
        return {dict(labels)[label]: value for labels, value in found.items() if label in dict(labels)}


def grown(newer: Page, older: Page, name: str, **labels: str) -> float:
    """Returns how much a counter grew; all of it if the server began anew in between."""
    now, then = newer.value(name, **labels), older.value(name, **labels)
    return now - then if now >= then else now


def grown_by_label(newer: Page, older: Page, name: str, label: str) -> dict[str, float]:
    """Returns how much each child of a counter grew, without those that did not."""
    growth = {child: grown(newer, older, name, **{label: child}) for child in newer.by_label(name, label)}
    return {child: count for child, count in growth.items() if count > 0}


def between(newer: Page, older: Page, name: str, **labels: str) -> Histogram:
    """Returns the observations of a histogram's series that came between two pages; `labels` are all but `le`."""
    bounds = {float(bound): bound for bound in newer.by_label(f"{name}_bucket", "le")}
    ladder = sorted(bounds)
    histogram = Histogram([bound for bound in ladder if bound < math.inf])
    cumulative = [int(grown(newer, older, f"{name}_bucket", le=bounds[bound], **labels)) for bound in ladder]
    if cumulative:
        histogram.counts = [count - below for count, below in zip(cumulative, [0, *cumulative], strict=False)]
    return histogram

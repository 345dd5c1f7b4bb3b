"""Completes PromQL by the labels that select servers, and refuses names and labels that no server exposes.

Boards, rules and queries name series without those labels: `roseinfer_requests_total{finish_reason="stop"}`. An
alternative of a closed set, `code=~"overloaded|not_ready"`, must be a value of that label.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from roseinfer.errors import RoseinferError
from roseinfer.observe.metrics.catalogue import CATALOGUE, OTHER, REJECTION_CODES
from roseinfer.observe.metrics.row import InfoAtScrape, Row
from roseinfer.records import FinishReason

ROWS = {row.name: row for row in CATALOGUE}
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


def _codes(root: type[RoseinferError]) -> Iterator[tuple[str, int]]:
    if root.code is not None:
        yield root.code, root.status
    for leaf in root.__subclasses__():
        yield from _codes(leaf)


# A refusal with 429 or 5xx is the server's; `other` is an unforeseen 500. The other codes are mistakes of clients.
_OURS = {OTHER, *(code for code, status in _codes(RoseinferError) if status == 429 or status >= 500)}
_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT)
_SERVED = tuple(reason for reason in FinishReason if reason not in (*_FAILED, FinishReason.REJECTED))
WORDS = {
    "@BY@": "namespace, job, model_name",  # of a service, which all of its servers are together
    "@REFUSED_BY_US@": "|".join(code for code in REJECTION_CODES if code in _OURS),
    "@FAILED@": "|".join(_FAILED),
    "@SERVED@": "|".join(_SERVED),
    "@SERVED_OR_FAILED@": "|".join((*_SERVED, *_FAILED)),
}

_SELECTOR = re.compile(r"(roseinfer[_:][\w:]+|DCGM_FI_\w+)(?:{([^}]*)})?")
_MATCHER = re.compile(r'(\w+)=~?"([^"]*)"')


def row_of(name: str) -> Row:
    """The row whose series is called `name`; a KeyError if there is none."""
    if name in ROWS and ROWS[name].kind != "histogram":
        return ROWS[name]
    family = next((name.removesuffix(suffix) for suffix in OF_HISTOGRAMS if name.endswith(suffix)), name)
    if family in ROWS and ROWS[family].kind == "histogram" and family != name:
        return ROWS[family]
    raise KeyError(f"{name} is no series of the catalogue")


def own_labels(name: str) -> frozenset[str]:
    """The labels that our server gives to a series; those of the target come from Prometheus."""
    row = row_of(name)
    labels = {label.name for label in row.labels}
    labels |= {"model_name"} if row.is_per_model else set()
    labels |= {"le"} if name.endswith("_bucket") else set()
    labels |= set(row.source.names) if isinstance(row.source, InfoAtScrape) else set()
    return frozenset(labels)


class Selection(NamedTuple):
    """The matchers that choose servers, models, recorded series and GPUs; any of `gpus` chooses one."""

    pods: str = ""
    models: str = ""
    recorded: str = ""
    gpus: tuple[str, ...] = ("",)

    def complete(self, query: str) -> str:
        """The query with these matchers, and the values that @WORDS@ stand for.

        A name or label that the catalogue lacks is a KeyError or an AssertionError.
        """
        for word, values in WORDS.items():
            query = query.replace(word, values)
        return _SELECTOR.sub(self._completed, query)

    def _completed(self, selector: re.Match[str]) -> str:
        name, matchers = selector[1], selector[2] or ""
        if name.startswith("DCGM_FI_"):
            chosen = [_joined(name, matchers, gpu) for gpu in self.gpus]
            return chosen[0] if len(chosen) == 1 else f"({' or '.join(chosen)})"
        if name.startswith("roseinfer:"):
            return _joined(name, matchers, self.recorded)
        _check(name, matchers)
        return _joined(name, matchers, self.models if row_of(name).is_per_model else "", self.pods)


def _joined(name: str, *matchers: str) -> str:
    inside = ",".join(filter(None, matchers))
    return f"{name}{{{inside}}}" if inside else name


def _check(name: str, matchers: str) -> None:
    assert "!" not in matchers, f"{name}{{{matchers}}}: only = and =~"
    row, labels = row_of(name), own_labels(name)
    for label, value in _MATCHER.findall(matchers):
        assert label in labels, f"{name} has no label {label}"
        if (known := next((own.values for own in row.labels if own.name == label), ())) and "$" not in value:
            unknown = set(value.split("|")) - set(known)
            assert not unknown, f"{name} has no {label} {unknown}"

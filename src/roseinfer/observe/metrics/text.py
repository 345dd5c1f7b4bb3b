"""Encodes metrics as Prometheus' text, or as OpenMetrics.

prometheus_client says how a family is written. From one page to the next it has the same series and mostly the same
numbers, so its text is kept, and other numbers are put behind the beginnings of its lines: that takes a tenth of the
time of a page.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from roseinfer.observe.metrics.histogram import Histogram
from roseinfer.observe.metrics.protobuf import Exemplars, Values
from roseinfer.observe.metrics.row import Row

_MAX_FORMATS = 4  # that are kept: a scraper may name any version in its Accept header

_Encode = Callable[[Collector], bytes]
_written: Callable[[float], str] = lru_cache(1024)(floatToGoString)  # the buckets above the largest value are equal
_Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class TextEncoder:
    """Encodes pages of one model. May be called in any thread; two at once are allowed, if wasteful."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._known: dict[str, dict[str, _Family]] = {}  # by type of content, by name

    def encode(self, accept: str, families: Iterable[tuple[Row, Values, Exemplars]]) -> tuple[bytes, str]:
        """Returns the page and its type, in the format that the Accept header asks for."""
        encode, content_type, ending = _encoder(accept)
        if content_type not in self._known and len(self._known) >= _MAX_FORMATS:
            self._known = {}
        known = self._known.setdefault(content_type, {})
        texts: list[bytes] = []
        for row, values, exemplars in families:
            family = known.get(row.name)
            text = None if family is None else family.kept(values, exemplars)
            if text is None:
                series = (*values.items(),) if row.kind == "info" else (*values,)
                if family is None or family.series != series:
                    family = known[row.name] = _Family(encode, row, self._model_name, series, values)
                text = family.write(values, exemplars)
            texts.append(text)
        return b"".join((*texts, ending)), content_type


class _Family:
    """A family with these series, in one format."""

    def __init__(self, encode: _Encode, row: Row, model_name: str, series: object, values: Values) -> None:
        self.series = series
        self._encode, self._row, self._model_name = encode, row, model_name
        lines = self._encoded(values, {}).decode().splitlines()
        comments = [line for line in lines if line.startswith("#")]
        heads = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
        self._template = "".join(f"{line.replace('%', '%%')}\n" for line in comments)
        self._template += "".join(f"{head.replace('%', '%%')} %s\n" for head in heads)
        self._last: tuple[Values, Exemplars, bytes] | None = None

    def kept(self, values: Values, exemplars: Exemplars) -> bytes | None:
        """Returns the last text, if it was of these values; a histogram that is the same object has not changed."""
        last = self._last
        return last[2] if last is not None and last[0] == values and last[1] == exemplars else None

    def write(self, values: Values, exemplars: Exemplars) -> bytes:
        """Returns their text, and keeps it."""
        if any(map(any, exemplars.values())):
            text = self._encoded(values, exemplars)
        else:
            text = (self._template % (*map(_written, _numbers(self._row, values)),)).encode()
        self._last = values, exemplars, text
        return text

    def _encoded(self, values: Values, exemplars: Exemplars) -> bytes:
        family = _family(self._row, values, self._model_name, exemplars)
        return self._encode(_Families([family])).removesuffix(self._encode(_Families()))


class _Families(Collector):
    """Families that are made already, for an encoder."""

    def __init__(self, families: Sequence[Metric] = ()) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


@lru_cache(_MAX_FORMATS)
def _encoder(accept: str) -> tuple[_Encode, str, bytes]:
    """Returns how families are written, the type of the page, and what a page ends with."""
    # prometheus_client (0.26) escapes names that need it not, by these two, and a bucket's so that it has no family.
    accept = re.sub(r"escaping\s*=\s*(values|dots)", "escaping=underscores", accept)
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # its way to say that a version in the header is no number
        encode, content_type = choose_encoder("")
    # prometheus_client (0.26) writes the colon of a sample's name, and no other, as an underscore in OpenMetrics.
    return lambda collector: encode(collector).replace(b"\nvllm_", b"\nvllm:"), content_type, encode(_Families())


def _numbers(row: Row, values: Values) -> list[float]:
    """Returns what the lines of a family end in, in their order."""
    if row.kind == "info":
        return [1.0] if values else []
    numbers: list[float] = []
    for value in values.values():
        if isinstance(value, Histogram):
            cumulative = value.cumulative_counts()
            numbers += (*cumulative, cumulative[-1], value.total)
        else:
            assert isinstance(value, int | float)
            numbers.append(value)
    return numbers


_FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(row: Row, values: Values, model_name: str, exemplars: Exemplars) -> Metric:
    """Returns the family of one row. `values` are by label values or, for an info, the labels of its one series."""
    labels = {"model_name": model_name} if row.is_per_model else {}
    constant = list(labels.values())
    names = [*labels, *(label.name for label in row.labels)]
    if row.kind == "info":
        info = InfoMetricFamily(row.name.removesuffix("_info"), row.help, labels=names)
        if values:
            info.add_metric(constant, {name: str(value) for (name,), value in values.items()})
        return info
    metric = _FAMILIES[row.kind](row.name, row.help, labels=names, unit=row.stated_unit)
    for child, value in values.items():
        series = [*constant, *child]
        if isinstance(metric, HistogramMetricFamily):
            assert isinstance(value, Histogram)
            metric.add_metric(series, _buckets(value, exemplars.get(child, ())), value.total)
        else:
            assert isinstance(value, int | float)
            metric.add_metric(series, value)
    return metric


def _buckets(histogram: Histogram, exemplars: Sequence[Exemplar | None]) -> list[_Bucket]:
    bounds = (*map(repr, histogram.bounds), "+Inf")
    buckets: list[_Bucket] = list(zip(bounds, histogram.cumulative_counts(), strict=True))
    for index, exemplar in enumerate(exemplars):
        if exemplar is not None:
            buckets[index] = (bounds[index], buckets[index][1], exemplar)
    return buckets

"""A phase's name and step number in, an NVTX range out; knows nothing of engines, models or other telemetry.

Everything a range needs but its payload is built once: `domain.push_range` with prepared attributes costs some 60 ns,
`nvtx.annotate` with names about 1 µs. The ranges of domain `roseinfer` are the whole step, the fields of `PhaseTimes`
within it and garbage collections; the payload is the step's id, which step records and spans carry too, so an outlier
on a dashboard leads to its frame in Nsight.
"""

import logging
from typing import Protocol

from roseinfer.records import PhaseTimes
from roseinfer.runtime.stopwatch import RangeMarker

logger = logging.getLogger(__name__)

DOMAIN = "roseinfer"
RANGES = ("step", *PhaseTimes.__struct_fields__, "gc")


class Attributes(Protocol):
    """The part of `nvtx` event attributes that changes from range to range."""

    payload: int


class Domain(Protocol):
    """The part of an `nvtx` domain that is used here."""

    def get_event_attributes(self, *, message: str, category: str) -> Attributes | None:
        """Prepared attributes; None from the stand-in that nvtx gives when no tool is attached."""

    def push_range(self, attributes: Attributes) -> None: ...

    def pop_range(self) -> None: ...


class NvtxMarker:
    """The `RangeMarker` that speaks NVTX. Ranges nest by thread; one instance serves one engine."""

    def __init__(self, domain: Domain, attributes: dict[str, Attributes]) -> None:
        self._domain = domain
        self._attributes = attributes

    def push(self, name: str, payload: int) -> None:
        attributes = self._attributes[name]
        attributes.payload = payload
        self._domain.push_range(attributes)

    def pop(self) -> None:
        self._domain.pop_range()


def make_marker(enabled: bool, domain: Domain | None = None) -> RangeMarker | None:
    """A marker for steps, phases and collections; None when not wanted or when no profiler is attached to hear it.

    nvtx decides when a domain is made whether a tool listens, so one that attaches later would hear nothing anyway.
    """
    if not enabled:
        return None
    if domain is None:
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
    attributes: dict[str, Attributes] = {}
    for name in RANGES:
        prepared = domain.get_event_attributes(message=name, category=name)
        if prepared is None:
            logger.warning("observe.nvtx is on, but no profiler was attached at start; no ranges are marked")
            return None
        attributes[name] = prepared
    return NvtxMarker(domain, attributes)

"""Marks steps, their phases and garbage collections as NVTX ranges, for Nsight Systems.

Everything a range needs but its payload is built once: `domain.push_range` with prepared attributes costs some 60 ns,
`nvtx.annotate` with names about 1 µs. The ranges of domain `roseinfer` are the whole step, the fields of `PhaseTimes`
within it and garbage collections; the payload is the step's id, which step records and spans carry too, so an outlier
on a dashboard leads to its frame in Nsight.
"""

import logging
from typing import Any

from roseinfer.records import PhaseTimes

logger = logging.getLogger(__name__)

DOMAIN = "roseinfer"
RANGES = ("step", *PhaseTimes.__struct_fields__, "gc")


class NvtxMarker:
    """The marker of `engine/core/stopwatch.py`. Ranges nest by thread; one instance serves one engine."""

    def __init__(self, domain: Any, attributes: dict[str, Any]) -> None:  # of the package `nvtx`, which has no types
        self._domain = domain
        self._attributes = attributes

    def push(self, name: str, payload: int) -> None:
        attributes = self._attributes[name]
        attributes.payload = payload
        self._domain.push_range(attributes)

    def pop(self) -> None:
        self._domain.pop_range()


def make_marker(enabled: bool, domain: Any = None) -> NvtxMarker | None:
    """Returns a marker for steps, phases and collections; None when not wanted, or when no profiler is attached.

    nvtx decides when a domain is made whether a tool listens, so one that attaches later would hear nothing anyway.
    """
    if not enabled:
        return None
    if domain is None:
        import nvtx

        domain = nvtx.get_domain(DOMAIN)
    attributes: dict[str, Any] = {}
    for name in RANGES:
        prepared = domain.get_event_attributes(message=name, category=name)
        if prepared is None:  # from the stand-in that nvtx gives when no tool is attached
            logger.warning("observe.nvtx is on, but no profiler was attached at start; no ranges are marked")
            return None
        attributes[name] = prepared
    return NvtxMarker(domain, attributes)

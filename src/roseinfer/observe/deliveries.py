"""The way of a token from the engine to the socket, into causes; knows no step."""

from collections import deque
from collections.abc import Iterable

from roseinfer.records import Cause, Delivery

_MAX_INTERRUPTIONS = 512


class Interruptions:
    """When the front end's interpreter did something else than serve, newest last."""

    def __init__(self, known: Iterable[tuple[int, int, Cause]] = ()) -> None:
        self._known: deque[tuple[int, int, Cause]] = deque(known, maxlen=_MAX_INTERRUPTIONS)

    def add(self, start_ns: int, end_ns: int, cause: Cause) -> None:
        self._known.append((start_ns, end_ns, cause))

    def within(self, start_ns: int, end_ns: int) -> list[tuple[int, int, Cause]]:
        """Those that overlap the interval, cut to it, in the order of time and none twice over."""
        found = []
        for begin, end, cause in reversed(list(self._known)):  # a copy: a collection may add one at any allocation
            if end > start_ns and begin < end_ns:
                found.append((max(begin, start_ns), min(end, end_ns), cause))
        apart: list[tuple[int, int, Cause]] = []
        for begin, end, cause in sorted(found):
            begin = max(begin, apart[-1][1]) if apart else begin  # noqa: PLW2901 - a collection within a scrape
            if end > begin:
                apart.append((begin, end, cause))
        return apart

    @property
    def last_end_ns(self) -> int:
        return self._known[-1][1] if self._known else 0


def delivery_segments(
    delivery: Delivery, start_ns: int, interruptions: Interruptions, until_ns: int | None = None
) -> list[tuple[Cause, int]]:
    """The way of a token from `start_ns` on, or from when it was known, to its write, or to `until_ns` before that."""
    arrival = delivery.arrival
    waiting = Cause.CLIENT_BACKPRESSURE if delivery.was_paused else Cause.EVENT_LOOP
    stages = (
        (Cause.ENGINE_OUTBOX, arrival.sent_ns),
        (Cause.EVENT_LOOP, delivery.resumed_ns),
        (Cause.DETOKENIZE, delivery.encoded_ns),
        (waiting, delivery.written_ns),
    )
    segments: list[tuple[Cause, int]] = []
    at = max(start_ns, arrival.tokens_ns)
    end = delivery.written_ns if until_ns is None else until_ns
    for cause, stage_end in stages:
        stop = min(stage_end, end)
        if stop <= at:
            continue
        if at < interruptions.last_end_ns:
            for begin, over, other in interruptions.within(at, stop):
                segments += [(cause, begin - at), (other, over - begin)]
                at = over
        segments.append((cause, stop - at))
        at = stop
    return segments

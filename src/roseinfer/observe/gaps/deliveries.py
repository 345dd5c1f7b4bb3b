"""Splits the time of a token's way from the engine to the socket into causes."""

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.interruptions import LiveInterruptions, RecordedInterruptions
from roseinfer.records import Delivery


def delivery_segments(
    delivery: Delivery, start_ns: int, interruptions: LiveInterruptions | RecordedInterruptions
) -> list[tuple[Cause, int]]:
    """Splits the way of a token to its write, from `start_ns` or from when it was known, whichever is later.

    Only what the front end's interpreter did can be interrupted there: not the engine, nor the waiting for a client.
    """
    arrival = delivery.arrival
    stopped_ns = max(arrival.tokens_ns, arrival.sent_ns - arrival.delayed_ns)
    collecting_ns = max(stopped_ns, arrival.sent_ns - arrival.gc_ns)
    waiting_ns = max(stopped_ns, collecting_ns - arrival.wait_ns)
    reading = Cause.ENGINE_OUTBOX if arrival.was_held else Cause.EVENT_LOOP
    writing = Cause.CLIENT_BACKPRESSURE if delivery.was_paused else Cause.EVENT_LOOP
    segments: list[tuple[Cause, int]] = []
    at = max(start_ns, arrival.tokens_ns)
    for cause, stop, is_ours in (
        (Cause.SCHEDULE, stopped_ns, False),
        (Cause.CPU_THROTTLED, waiting_ns, False),
        (Cause.CPU_WAIT, collecting_ns, False),
        (Cause.GC, arrival.sent_ns, False),
        (reading, arrival.read_ns, True),
        (Cause.EVENT_LOOP, delivery.resumed_ns, True),
        (Cause.DETOKENIZE, delivery.encoded_ns, True),
        (writing, delivery.written_ns, not delivery.was_paused),
    ):
        if stop <= at:
            continue
        for begin, over, other in interruptions.within(at, stop) if is_ours else ():
            segments += [(cause, begin - at), (other, over - begin)]
            at = over
        segments.append((cause, stop - at))
        at = stop
    return segments

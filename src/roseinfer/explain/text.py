"""Writes an explanation as lines of text, 100 columns wide."""

import textwrap
from collections.abc import Iterator

from roseinfer.explain.explanation import Explanation, OptionAdvice, SlowGaps, ms, percent

_WIDTH = 100
_CLOCKS = {
    "wire": "between writes to the socket",
    "engine": "between tokens in the engine",
    "ledger": "as requests had them on average",
}


def lines(explanation: Explanation) -> Iterator[str]:
    """Yields the lines of the whole report."""
    found = explanation
    if found.cpu_limit is not None or found.num_throttled:
        yield _cpu_limit(found)
    yield (
        f"{found.num_gaps} gaps {_CLOCKS[found.clock]}, of {found.num_requests} requests in {found.span_s:.3g} s, "
        f"{found.num_slow_gaps} of them slow"
    )
    yield f"source: {found.source}" + (f", saved by the rule: {found.trigger}" if found.trigger else "")
    yield "modes:  " + (", ".join(_modes(found)) or "none: the gaps are scattered")
    yield f"p50 {ms(found.p50_s)}, p99 {ms(found.p99_s)}, widest {ms(found.widest_s)}"
    if found.num_draft_tokens:
        accepted = percent(found.num_accepted_tokens / found.num_draft_tokens)
        yield f"drafts: {found.num_draft_tokens} tokens, {found.num_accepted_tokens} accepted ({accepted})"
    yield ""
    yield from _causes(found)
    yield ""
    yield "The widest gaps:"
    for group in found.widest:
        yield from _slow_gaps(group)
    if found.knobs:
        yield ""
        yield "What would change it:"
        for advice in found.knobs:
            yield from _advice(advice)
    yield ""
    left = found.unexplained
    yield (
        f"Unexplained: {ms(left.seconds)} of p99 - p50 ({percent(left.share)}); "
        f"{percent(found.unknown_share)} of the time of all gaps is unknown."
    )


def _cpu_limit(found: Explanation) -> str:
    of_cores = (
        "" if found.cpu_limit is None else f" of {found.cpu_limit:.3g} {'core' if found.cpu_limit == 1 else 'cores'}"
    )
    slow = "1 slow gap" if found.num_slow_gaps == 1 else f"{found.num_slow_gaps} slow gaps"
    if found.num_throttled:
        return f"A CPU limit{of_cores} stopped the server: {found.num_throttled} of {slow} are its doing."
    return f"The server has a CPU limit{of_cores}; it is the cause of none of {slow}."


def _modes(found: Explanation) -> Iterator[str]:
    for place, mode in enumerate(found.modes):
        of_gaps = " of gaps" if place == 0 else ""
        yield f"{ms(mode.seconds)} ({percent(mode.share)}{of_gaps})"


def _causes(found: Explanation) -> Iterator[str]:
    if not found.causes:
        yield "p99 is no longer than p50: there is no tail to explain."
        return
    if found.has_few_slow_gaps:
        yield _few_slow_gaps(found)
    yield f"p99 - p50 = {ms(found.p99_s - found.p50_s)} went to"
    for share, without in zip(found.causes, found.without, strict=True):
        if share.share < 0.005:
            continue
        part = f"{ms(share.seconds):>9}  {percent(share.share):>5}"
        yield f"  {share.cause:<20} {part}   p99 without it {ms(without.p99_s)}"


def _few_slow_gaps(found: Explanation) -> str:
    number = found.num_slow_votes
    if not found.num_slow_gaps:
        return "No gap is slow: what follows is about gaps that are not."
    if not number:
        return f"Of the {found.num_votes} gaps around p99 none is slow: what follows is about gaps that are not."
    are_slow = "1 is slow" if number == 1 else f"{number} are slow"
    return f"Of the {found.num_votes} gaps around p99 only {are_slow}: what follows is in part about gaps that are not."


def _slow_gaps(found: SlowGaps) -> Iterator[str]:
    gaps = "1 gap" if found.num_gaps == 1 else f"{found.num_gaps} gaps"
    where = f"step {found.step_id}, {gaps}" if found.step_id else f"request {', '.join(found.waiting)}"
    head = f"  {ms(found.widest_s):>8}  {where}, {found.cause}: "
    yield from textwrap.wrap(head + found.sentence, _WIDTH, subsequent_indent=" " * 12, drop_whitespace=True)


def _advice(found: OptionAdvice) -> Iterator[str]:
    name = found.option or "no option"
    value = found.meaning or (_value(found.value) if found.value is not None else "")
    now = f" (now {value})" if found.option and value else ""
    yield f"  {found.cause}: {name}{now}"
    yield from textwrap.wrap(found.advice, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

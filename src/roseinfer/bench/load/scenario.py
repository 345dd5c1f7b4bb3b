"""Turns a scenario file into users, arrivals and requests; `bench serve` and Locust read the same. Sends nothing.

A user sends requests as a Poisson process of `rate_per_user` a second, answered or not the ones before. So the load of
n users is a Poisson process of n times that rate whatever tool makes it. Those who join in a `burst` send their first
request at once, together.
"""

import random
import re
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import yaml
from msgspec import Meta

from roseinfer.bench.load.options import Lengths
from roseinfer.bench.load.plan import NS_PER_S, SHARED_KEY, PlannedRequest, Segment
from roseinfer.config.sources import yaml_problem
from roseinfer.errors import ConfigError
from roseinfer.messages import TokenCount
from roseinfer.runtime.validation import Misfit, convert

PARAM = "--scenario"
MAX_REQUESTS = 1_000_000

_TokenRange = TokenCount | str
_RANGE = re.compile(r"[1-9]\d{0,9}(-[1-9]\d{0,9})?")
_Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A name that is not known is a mistake."""


class Phase(_Strict, frozen=True):
    """A stretch of time. In a `ramp` the number of users goes to `users` in a line, else it is so from the start."""

    kind: Literal["steady", "ramp", "burst"]
    users: Annotated[int, Meta(ge=0, le=100_000)]
    duration_s: Annotated[float, Meta(gt=0, le=86_400)]


class LongShare(_Strict, frozen=True):
    """A share of the requests has a long prompt instead."""

    share: Annotated[float, Meta(gt=0, le=1)]
    prompt_tokens: _TokenRange
    max_tokens: _TokenRange

    def __post_init__(self) -> None:
        """Raises Misfit."""
        _check_ranges(self)


class Limits(_Strict, frozen=True):
    """What a good request keeps."""

    ttft_ms: _Milliseconds | None = None
    tpot_ms: _Milliseconds | None = None


class Drawn(NamedTuple):
    """The prompt and the length of the answer of one request."""

    segments: tuple[Segment, ...]
    max_tokens: int


class Scenario(_Strict, frozen=True):
    """One file. Lengths are a number of tokens, or a range such as `16-64` of which each is equally likely."""

    description: str
    phases: Annotated[tuple[Phase, ...], Meta(min_length=1)]
    rate_per_user: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # requests a second
    endpoint: Literal["completions", "chat"] = "completions"
    prompt_tokens: _TokenRange = 16
    max_tokens: _TokenRange = 128
    shared_prefix_share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of each prompt but the long ones
    long_prompts: LongShare | None = None
    ignore_eos: bool = True
    stream_interval: Annotated[int, Meta(ge=1, le=1024)] | None = None
    objective: Limits = Limits()

    def __post_init__(self) -> None:
        """Raises Misfit."""
        _check_ranges(self)
        if not any(phase.users for phase in self.phases):
            raise Misfit("none of them has a user", ("phases",))
        if (
            most := sum(self._rate(index) * phase.duration_s for index, phase in enumerate(self.phases))
        ) > MAX_REQUESTS:
            raise Misfit(f"about {most:.0f} requests, and at most {MAX_REQUESTS} are allowed", ("phases",))

    @property
    def duration_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)

    def phase_at(self, offset_s: float) -> Phase | None:
        """The phase so long after the start; None when all are over."""
        index = bisect_right(self._ends_s(), offset_s)
        return self.phases[index] if index < len(self.phases) else None

    def users_at(self, offset_s: float) -> int:
        """How many users there are so long after the start; 0 at the end."""
        ends_s = self._ends_s()
        index = bisect_right(ends_s, offset_s)
        if index == len(self.phases):
            return 0
        phase = self.phases[index]
        if phase.kind != "ramp":
            return phase.users
        before, passed = self._users_before(index), 1 - (ends_s[index] - offset_s) / phase.duration_s
        return round(before + (phase.users - before) * passed)

    def draw(self, source: random.Random, key: int) -> Drawn:
        """One request; its prompt beyond the shared beginning is the sequence named `key`."""
        long = self.long_prompts
        if long is not None and source.random() < long.share:
            prompt, output, shared_share = lengths(long.prompt_tokens), lengths(long.max_tokens), 0.0
        else:
            prompt, output, shared_share = (
                lengths(self.prompt_tokens),
                lengths(self.max_tokens),
                self.shared_prefix_share,
            )
        num_tokens = source.randint(*prompt)
        num_shared = int(num_tokens * shared_share)
        parts = (Segment(SHARED_KEY, num_shared), Segment(key, num_tokens - num_shared))
        return Drawn(tuple(part for part in parts if part.num_tokens), source.randint(*output))

    def plan(self, seed: int) -> list[PlannedRequest]:
        """The requests in the order in which they are due; raises ConfigError when chance has left none.

        Arrivals at a rate that changes are those at its maximum, each kept with the probability rate / maximum
        (thinning; Lewis and Shedler, 1979).
        """
        arrivals, draws = random.Random(f"arrivals {seed}"), random.Random(f"lengths {seed}")
        offsets_s: list[float] = []
        for index, (phase, end_s) in enumerate(zip(self.phases, self._ends_s(), strict=True)):
            offset_s = end_s - phase.duration_s
            if phase.kind == "burst":
                offsets_s += [offset_s] * max(0, phase.users - self._users_before(index))
            rate = self._rate(index)
            while rate and (offset_s := offset_s + arrivals.expovariate(rate)) < end_s:
                if arrivals.random() * rate < self.users_at(offset_s) * self.rate_per_user:
                    offsets_s.append(offset_s)
        if not offsets_s:
            raise ConfigError(f"no request falls into its {self.duration_s:g} s", param=PARAM)
        planned = []
        for index, offset_s in enumerate(offsets_s):
            segments, max_tokens = self.draw(draws, 1 + index)
            offset_ns = round(offset_s * NS_PER_S)
            planned.append(PlannedRequest(offset_ns=offset_ns, segments=segments, max_tokens=max_tokens))
        return planned

    def echo(self) -> dict[str, Any]:
        """All of it as plain data: two results can be compared when theirs are equal."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))  # as it will be read again
        return plain

    def _ends_s(self) -> list[float]:
        return list(accumulate(phase.duration_s for phase in self.phases))

    def _users_before(self, index: int) -> int:
        return self.phases[index - 1].users if index else 0

    def _rate(self, index: int) -> float:
        """The highest of a phase, in requests a second."""
        phase = self.phases[index]
        most = max(phase.users, self._users_before(index)) if phase.kind == "ramp" else phase.users
        return most * self.rate_per_user


def _check_ranges(given: "Scenario | LongShare") -> None:
    """Check that the texts that give lengths are ranges. Raises Misfit."""
    for name, value in (("prompt_tokens", given.prompt_tokens), ("max_tokens", given.max_tokens)):
        if not _RANGE.fullmatch(str(value)):
            raise Misfit(f"expected a number of tokens or a range such as 16-64, got {value!r}", (name,))
        low, high = lengths(value)
        if high < low:
            raise Misfit(f"{high} is less than {low}, got {value!r}", (name,))


def lengths(value: int | str) -> Lengths:
    """`16` or `"16-64"`."""
    low, _, high = str(value).partition("-")
    return Lengths(int(low), int(high or low))


def load_scenario(file: Path) -> Scenario:
    """Raises ConfigError, one sentence that names the field."""
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param=PARAM) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {yaml_problem(error)}", param=PARAM) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file}: expected a mapping of fields, got {tree!r}"[:200], param=PARAM)
    try:
        return convert(tree, Scenario)
    except Misfit as misfit:
        raise ConfigError(f"{file}: {misfit}", param=PARAM) from None

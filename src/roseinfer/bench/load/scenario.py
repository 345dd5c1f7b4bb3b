"""Reads scenario files, which `bench serve` and Locust share: users, arrivals and requests.

A user sends requests as a Poisson process of `rate_per_user` a second, whether or not earlier ones have been answered,
so n users are a Poisson process of n times that rate. Users who join in a `burst` send their first request together.
"""

import argparse
import random
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from roseinfer.bench.load.plan import NS_PER_S, PlannedRequest, Segment, prompt_segments, refuse_flags
from roseinfer.bench.options import MAX_REQUESTS, lengths_of
from roseinfer.config.sources import NO_YAML, read_yaml, yaml_problem
from roseinfer.errors import ConfigError
from roseinfer.messages import TokenCount
from roseinfer.runtime.validation import Misfit, convert

PARAM = "--scenario"

_TokenRange = TokenCount | str
_SAID_BY_SCENARIO = (
    *("num_requests", "duration", "prompt_tokens", "max_tokens", "shared_prefix_share", "long_prompt_tokens"),
    *("num_long", "long_at", "long_max_tokens", "chat", "ignore_eos", "stream_interval"),
)
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
        most = sum(self._rate(index) * phase.duration_s for index, phase in enumerate(self.phases))
        if most > MAX_REQUESTS:
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
        asked: Scenario | LongShare
        long = self.long_prompts
        if long is not None and source.random() < long.share:
            asked, shared_share = long, 0.0
        else:
            asked, shared_share = self, self.shared_prefix_share
        prompt, output = lengths_of(str(asked.prompt_tokens)), lengths_of(str(asked.max_tokens))
        segments = prompt_segments(source.randint(*prompt), shared_share, key)
        return Drawn(segments, source.randint(*output))

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
        try:
            lengths_of(str(value))
        except argparse.ArgumentTypeError as error:
            raise Misfit(str(error), (name,)) from None


def load_scenario(file: Path) -> Scenario:
    """Raises ConfigError, one sentence that names the field."""
    try:
        tree = read_yaml(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param=PARAM) from None
    except NO_YAML as error:
        raise ConfigError(f"{file} is not YAML: {yaml_problem(error)}", param=PARAM) from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file}: expected a mapping of fields, got {tree!r}"[:200], param=PARAM)
    try:
        return convert(tree, Scenario)
    except Misfit as misfit:
        raise ConfigError(f"{file}: {misfit}", param=PARAM) from None


def apply_scenario(arguments: argparse.Namespace) -> None:
    """Read the file of `--scenario`, if there is one, into the arguments, and set what it says of requests.

    Limits of the objective are the file's where no flag gives them. Raises ConfigError for a flag that the file sets.
    """
    if arguments.scenario is None:
        return
    said = [name for name in _SAID_BY_SCENARIO if name in arguments]
    refuse_flags(arguments, said, "has no meaning beside --scenario: the file says it")
    scenario = load_scenario(arguments.scenario)
    arguments.scenario_file, arguments.scenario = arguments.scenario, scenario
    arguments.prompt_tokens, arguments.max_tokens = scenario.prompt_tokens, scenario.max_tokens
    arguments.shared_prefix_share = scenario.shared_prefix_share
    arguments.chat, arguments.ignore_eos = scenario.endpoint == "chat", scenario.ignore_eos
    arguments.stream_interval = scenario.stream_interval
    if arguments.slo_ttft_ms is None:
        arguments.slo_ttft_ms = scenario.objective.ttft_ms
    if arguments.slo_tpot_ms is None:
        arguments.slo_tpot_ms = scenario.objective.tpot_ms

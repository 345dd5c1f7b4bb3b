"""Predicts how long requests wait for their first batch: the one prediction behind refusals, Retry-After and /debug.

The prediction is Little's law over what was measured. With C places and requests that hold one for S seconds, places
become free at C / S a second, so a request with Q before it waits Q * S / C. Nor is a prompt read before those in front
of it, at the speed at which steps read prompts. S is known late, from requests that have ended, so it is counted in
steps, times what a step takes now: an engine that has become slow is noticed a few steps later. When the measures are
wrong all the same, the prediction is never less than the oldest waiter has already waited, unless later requests have
overtaken that one: then it waits for reasons of its own, such as its priority or a grammar that is being compiled.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import Self

import msgspec

from roseinfer.config.options import SchedulerConfig
from roseinfer.messages import MOST_URGENT, PRIORITY_WAIT_S, Request
from roseinfer.records import BlockedBy, QueueReport, StartEstimate, StepRecord

MAX_RETRY_AFTER_S = 60
MIN_STARTS = 8  # places that must have become free before a start is estimated
_MEMORY = 64  # requests, or steps with prompts, over which a measure is remembered
_NUM_RECENT = 32  # steps that say what a step takes now
_NUM_STEPS = 4096  # steps whose moments are kept; who holds a place for longer had the pace of these
_WRONG = 2.0  # times the prediction: a longer wait shows that the measures are wrong
_DECILE = 1.2816  # standard deviations between the median and the tenth or ninetieth percentile


class _Mean:
    """A mean that forgets, and the spread of its values; both are 0 before anything was measured."""

    def __init__(self) -> None:
        self._sum = self._sum_of_squares = self._weight = 0.0
        self.count = 0

    def add_value(self, value: float, weight: float = 1.0) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._sum, self._weight = self._sum * keep + value * weight, self._weight * keep + weight
        self._sum_of_squares = self._sum_of_squares * keep + value * value * weight
        self.count += 1

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    @property
    def variation(self) -> float:
        """Standard deviation over mean."""
        if not self.value:
            return 0.0
        return math.sqrt(max(0.0, self._sum_of_squares / self._weight - self.value**2)) / self.value


class _Unread(msgspec.Struct, gc=False):
    """A sequence without a first token."""

    since_ns: int
    turn_ns: int  # of its place in the queue: when it would have come, were all equally urgent
    num_prompt_tokens: int
    has_started: bool = False


class QueueEstimate:
    """Counts what is in the engine, and measures how fast it goes. `num_places` sequences run at once.

    Under the admission policy `priority` each level is worth `priority_wait_s` of waiting; under others it is 0.
    `is_order_exact` says that no later request goes first, so that a place in the queue is certain.
    """

    def __init__(
        self,
        num_places: int,
        clock: Callable[[], int] = time.monotonic_ns,
        priority_wait_s: float = 0.0,
        *,
        is_order_exact: bool = True,
    ) -> None:
        self._clock = clock
        self._level_ns = int(priority_wait_s * 1e9)
        self._is_order_exact = is_order_exact
        self._unread: dict[str, _Unread] = {}  # oldest first
        self._newest_begun_ns = 0  # arrival of the newest request that has a first token
        self.num_sequences = 0
        self.num_tokens = 0  # of prompts, and of all that may be generated
        self.num_unread_tokens = 0  # of prompts whose first token is not known yet
        self._num_places = num_places
        self._num_usable_places = num_places  # fewer when KV blocks run out first
        self._place_s = _Mean()  # how long a sequence holds its place
        self._pace_s = _Mean()  # how long a step took meanwhile
        self._busy_s = 0.0  # how long the engine has been busy, up to the begin of its last step
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)  # the same at the begin of each step
        self._last_step: StepRecord | None = None
        self._token_s = _Mean()  # how long a step with prompts takes for each prompt token

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The estimate for an engine with this scheduler."""
        return cls(
            config.limits.max_active_seqs,
            priority_wait_s=PRIORITY_WAIT_S if config.admission == "priority" else 0.0,
            is_order_exact=config.admission == "fifo",
        )

    # --- what happens -----------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Note a request that was sent to the engine."""
        now_ns, num_prompt_tokens = self._clock(), len(request.prompt_token_ids)
        turn_ns = now_ns + request.priority * self._level_ns
        self._unread[request.request_id] = _Unread(now_ns, turn_ns, num_prompt_tokens)
        self.num_sequences += 1
        self.num_tokens += num_prompt_tokens + request.params.max_tokens
        self.num_unread_tokens += num_prompt_tokens

    def note_started(self, request_ids: Iterable[str]) -> None:
        """Note requests that are in a batch for the first time."""
        for request_id in request_ids:
            if (unread := self._unread.get(request_id)) is not None:
                unread.has_started = True

    def note_first_token(self, request_id: str) -> None:
        if (unread := self._pop_unread(request_id)) is not None:
            self._newest_begun_ns = max(self._newest_begun_ns, unread.since_ns)

    def remove_request(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Note a request that has ended, with a first token or without."""
        self._pop_unread(request_id)
        self.num_sequences -= 1
        self.num_tokens -= num_prompt_tokens + max_tokens

    def _pop_unread(self, request_id: str) -> _Unread | None:
        unread = self._unread.pop(request_id, None)
        if unread is not None:
            self.num_unread_tokens -= unread.num_prompt_tokens
        return unread

    def measure_place(self, held_ns: int) -> None:
        """Measure a sequence that has just ended by itself, `held_ns` after it was first in a batch."""
        held_s = held_ns / 1e9
        self._place_s.add_value(held_s)
        num_steps = len(self._steps_s) - bisect_left(self._steps_s, self._busy_s - held_s)
        if num_steps > 1:
            self._pace_s.add_value((self._steps_s[-1] - self._steps_s[-num_steps]) / (num_steps - 1))

    def measure_step(self, record: StepRecord) -> None:
        is_short_of_blocks = record.blocked_by is BlockedBy.KV_BLOCKS
        self._num_usable_places = max(1, record.num_running) if is_short_of_blocks else self._num_places
        if not record.num_decode_seqs + record.num_prefill_seqs:  # idle: all that there is waits for its grammar
            self._end_last_step()
            return
        if record.num_prefill_tokens:
            # Weighted by tokens, so that the mean is time by tokens and not a mean of speeds.
            took_s = (record.end_ns - record.start_ns) / 1e9
            self._token_s.add_value(took_s / record.num_prefill_tokens, record.num_prefill_tokens)
        if self._last_step is not None and _left_work(self._last_step):  # it lasted until this one began
            self._busy_s += (record.start_ns - self._last_step.start_ns) / 1e9
        else:
            self._end_last_step()
        self._steps_s.append(self._busy_s)
        self._last_step = record

    def restart(self) -> None:
        """Note that another engine replaces one that died: the time between them was no step of either."""
        self._end_last_step()
        self._num_usable_places = self._num_places

    def _end_last_step(self) -> None:
        """Count the last step for what it took, since the engine rested after it."""
        if (last := self._last_step) is not None:
            self._busy_s += (last.end_ns - last.start_ns) / 1e9
            self._last_step = None

    # --- what is expected -------------------------------------------------------------------------------------------

    @property
    def is_measured(self) -> bool:
        """Whether enough places became free for their mean to say something: one request may be unlike all others."""
        return self._place_s.count >= MIN_STARTS

    def predict_wait_s(self, priority: int = MOST_URGENT) -> float:
        """Predict the seconds until a request that comes now would start.

        Where priorities count, requests that it would overtake are not in its way; while its own is not known, it is
        taken for the most urgent. Before anything was measured it is 0, or what one without a place has waited.
        """
        now_ns = self._clock()
        turn_ns = now_ns + priority * self._level_ns
        behind = [each for each in self._unread.values() if each.turn_ns > turn_ns] if self._level_ns else []
        # Some of those behind may have a place already: all places are taken if there are enough for them. With three
        # behind of which two read their prompts in the two places that there are, none is ahead by turn, and two are.
        num_ahead = max(self.num_sequences - len(behind), min(self.num_sequences, self._num_usable_places))
        num_tokens = self.num_unread_tokens - sum(each.num_prompt_tokens for each in behind)
        waited_s = self._waited_s(now_ns, turn_ns) if num_ahead > self._num_usable_places else 0.0
        return self._predict_s(num_ahead, num_tokens, self._slowness(now_ns), waited_s)

    def retry_after_s(self, limit_s: float = 0.0, *, priority: int) -> int:
        """Whole seconds after which a wait is likely to be within the limit: the excess; at least until one place.

        `priority` is that of the request that is to come back.
        """
        excess_s = self.predict_wait_s(priority) - limit_s
        place_s = self._place_s.value / self._num_usable_places
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(max(excess_s, place_s))))

    def report(self) -> QueueReport:
        """Return the requests that have not started, in the order of the queue, each with its estimate."""
        now_ns = self._clock()
        slowness = self._slowness(now_ns)
        waiting = [each for each in self._unread.values() if not each.has_started]
        num_ahead = self.num_sequences - len(waiting)
        num_tokens = self.num_unread_tokens - sum(each.num_prompt_tokens for each in waiting)
        oldest_ns = now_ns  # arrival of the oldest that no later one has overtaken
        estimates: dict[str, StartEstimate | None] = {}
        for request_id, each in sorted(self._unread.items(), key=lambda item: item[1].turn_ns):
            if each.since_ns >= self._newest_begun_ns:
                oldest_ns = min(oldest_ns, each.since_ns)
            if not each.has_started:
                waited_s = (now_ns - oldest_ns) / 1e9 if num_ahead >= self._num_usable_places else 0.0
                estimates[request_id] = self._estimate(num_ahead, num_tokens, slowness, waited_s)
                num_ahead += 1
                num_tokens += each.num_prompt_tokens
        return QueueReport(estimates, self._is_order_exact)

    def _estimate(self, num_ahead: int, num_tokens: int, slowness: float, waited_s: float) -> StartEstimate | None:
        """The prediction, and the spread of a sum of as many times in a place as must pass; None before MIN_STARTS."""
        if not self.is_measured:
            return None
        predicted_s = self._predict_s(num_ahead, num_tokens, slowness, waited_s)
        place_s, num_queued = self._places_s(num_ahead, slowness)
        spread_s = _DECILE * place_s * self._place_s.variation / math.sqrt(max(1, num_queued))
        low_s, high_s = max(0.0, predicted_s - spread_s), predicted_s + spread_s
        return StartEstimate(predicted_s, low_s, high_s, min(self._place_s.count, _MEMORY))

    def _predict_s(self, num_ahead: int, num_tokens: int, slowness: float, waited_s: float) -> float:
        """Predict from the requests ahead, their prompt tokens that are unread, and what the oldest has waited."""
        place_s, _ = self._places_s(num_ahead, slowness)
        predicted_s = max(place_s, num_tokens * self._token_s.value)
        return waited_s if waited_s > _WRONG * predicted_s else predicted_s

    def _places_s(self, num_ahead: int, slowness: float) -> tuple[float, int]:
        """How long it takes until enough places are free, and how many these are."""
        num_queued = max(0, num_ahead + 1 - self._num_usable_places)
        return num_queued * self._place_s.value * slowness / self._num_usable_places, num_queued

    def _slowness(self, now_ns: int) -> float:
        """What a step takes now, over what it took while the sequences that were measured held their places."""
        if not self._pace_s.value or len(self._steps_s) < 2:
            return 1.0
        num_steps = min(_NUM_RECENT, len(self._steps_s) - 1)
        recent_s = self._steps_s[-1] - self._steps_s[-1 - num_steps]
        if self._last_step is not None and _left_work(self._last_step):  # the next is under way, and may take long
            since_s = (now_ns - self._last_step.start_ns) / 1e9
            recent_s = max(recent_s, (recent_s + since_s) * num_steps / (num_steps + 1))
        return recent_s / num_steps / self._pace_s.value

    def _waited_s(self, now_ns: int, turn_ns: int) -> float:
        """How long the oldest before this turn has waited, if no later request has a first token either."""
        for each in self._unread.values():
            if each.since_ns >= self._newest_begun_ns and each.turn_ns <= turn_ns:
                return (now_ns - each.since_ns) / 1e9
        return 0.0


def _left_work(step: StepRecord) -> bool:
    return step.num_running + step.num_waiting > 0

"""What the engine has been given and has not finished, into how long the next request would wait. Knows no tokens.

The prediction is Little's law over what was measured: with C places and requests that hold one for S seconds, places
become free at C / S a second, so who has Q before it waits Q * S / C. And nobody's prompt is read before those in
front of it, at the speed at which steps read prompts. S is known late, from requests that have ended, so it is counted
in steps, times what a step takes now: an engine that has become slow is noticed a few steps later. Where measures are
wrong all the same, nobody is told less than what somebody before it has waited already, unless others have gone past
that one: it waits for reasons of its own then, such as its priority or a grammar that is being compiled.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import msgspec

from roseinfer.messages import MOST_URGENT, Request
from roseinfer.records import BlockedBy, StepRecord

MAX_RETRY_AFTER_S = 60
_MEMORY = 64  # requests, or steps with prompts, over which a measure is remembered
_NUM_RECENT = 32  # steps that say what a step takes now
_NUM_STEPS = 4096  # steps whose moments are kept; who holds a place for longer had the pace of these
_WRONG = 2.0  # times what was predicted: who has waited for longer tells that measures are wrong


class _Mean:
    """A mean that forgets; before anything was measured there is none."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._sum, self._weight = self._sum * keep + value * weight, self._weight * keep + weight

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


class _Unread(msgspec.Struct, frozen=True, gc=False):
    """A sequence without a first token."""

    since_ns: int
    turn_ns: int  # since when it would have to wait to stand where it does, if all were equally urgent
    num_prompt_tokens: int


class Backlog:
    """Counts of what is in the engine, and the measures of how fast it goes. `num_places` sequences run at once.

    Under the admission policy `priority` each level is worth `priority_wait_s` of waiting; under others it is 0.
    """

    def __init__(
        self, num_places: int, clock: Callable[[], int] = time.monotonic_ns, priority_wait_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._level_ns = int(priority_wait_s * 1e9)
        self._unread: dict[str, _Unread] = {}  # oldest first
        self._newest_begun_ns = 0  # since when the newest of those had been here that have got a first token
        self.num_sequences = 0
        self.num_tokens = 0  # of prompts, and what may come to be generated
        self.num_unread_tokens = 0  # of prompts whose first token is not known yet
        self._num_places = num_places
        self._num_usable_places = num_places  # fewer when KV blocks run out first
        self._place_s = _Mean()  # a sequence holds its place
        self._pace_s = _Mean()  # a step took while it did
        self._busy_s = 0.0  # that the engine has been busy for, up to the begin of its last step
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)  # the same at the begin of each step
        self._last_step: StepRecord | None = None
        self._token_s = _Mean()  # a step with prompts takes, by prompt token

    def add(self, request: Request) -> None:
        """The engine has been given a sequence."""
        now_ns, num_prompt_tokens = self._clock(), len(request.prompt_token_ids)
        turn_ns = now_ns + request.priority * self._level_ns
        self._unread[request.request_id] = _Unread(now_ns, turn_ns, num_prompt_tokens)
        self.num_sequences += 1
        self.num_tokens += num_prompt_tokens + request.params.max_tokens
        self.num_unread_tokens += num_prompt_tokens

    def note_first_token(self, request_id: str) -> None:
        """It has waited long enough."""
        if (unread := self._forget_unread(request_id)) is not None:
            self._newest_begun_ns = max(self._newest_begun_ns, unread.since_ns)

    def remove(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """It has ended, with a first token or without."""
        self._forget_unread(request_id)
        self.num_sequences -= 1
        self.num_tokens -= num_prompt_tokens + max_tokens

    def _forget_unread(self, request_id: str) -> _Unread | None:
        unread = self._unread.pop(request_id, None)
        if unread is not None:
            self.num_unread_tokens -= unread.num_prompt_tokens
        return unread

    def measure_place(self, held_ns: int) -> None:
        """A sequence has just come to its end by itself, so long after it was first in a batch."""
        held_s = held_ns / 1e9
        self._place_s.add(held_s)
        num_steps = len(self._steps_s) - bisect_left(self._steps_s, self._busy_s - held_s)
        if num_steps > 1:
            self._pace_s.add((self._steps_s[-1] - self._steps_s[-num_steps]) / (num_steps - 1))

    def measure_step(self, record: StepRecord) -> None:
        is_short_of_blocks = record.blocked_by is BlockedBy.KV_BLOCKS
        self._num_usable_places = max(1, record.num_running) if is_short_of_blocks else self._num_places
        if not record.num_decode_seqs + record.num_prefill_seqs:  # a rest: all that there is waits for its grammar
            self._end_last_step()
            return
        if record.num_prefill_tokens:
            # Weighted by tokens, so that the mean is time by tokens and not a mean of speeds.
            took_s = (record.end_ns - record.start_ns) / 1e9
            self._token_s.add(took_s / record.num_prefill_tokens, record.num_prefill_tokens)
        if self._last_step is not None and _left_work(self._last_step):  # it lasted until this one began
            self._busy_s += (record.start_ns - self._last_step.start_ns) / 1e9
        else:
            self._end_last_step()
        self._steps_s.append(self._busy_s)
        self._last_step = record

    def restart(self) -> None:
        """Another engine takes the place of the one that died: the time between them was no step of either."""
        self._end_last_step()
        self._num_usable_places = self._num_places

    def _end_last_step(self) -> None:
        """It took what it took: a rest came after it."""
        if (last := self._last_step) is not None:
            self._busy_s += (last.end_ns - last.start_ns) / 1e9
            self._last_step = None

    def _slowness(self, now_ns: int) -> float:
        """What a step takes now, against what it took while those held their places that have ended."""
        if not self._pace_s.value or len(self._steps_s) < 2:
            return 1.0
        num_steps = min(_NUM_RECENT, len(self._steps_s) - 1)
        recent_s = self._steps_s[-1] - self._steps_s[-1 - num_steps]
        if self._last_step is not None and _left_work(self._last_step):  # the next is under way, and may take long
            since_s = (now_ns - self._last_step.start_ns) / 1e9
            recent_s = max(recent_s, (recent_s + since_s) * num_steps / (num_steps + 1))
        return recent_s / num_steps / self._pace_s.value

    def predict_wait_s(self, priority: int = MOST_URGENT) -> float:
        """Seconds until a request that comes now would have its first token, but for reading its own prompt.

        Where priorities count, whoever it would go before is not in its way; while its own is not known, it is taken
        for the most urgent there is. Before anything was measured it is 0, or what somebody without a place has waited.
        """
        now_ns = self._clock()
        turn_ns = now_ns + priority * self._level_ns
        behind = [each for each in self._unread.values() if each.turn_ns > turn_ns] if self._level_ns else []
        # Some of those behind may have a place already: all places are taken if there are enough for them. With three
        # behind of which two read their prompts in the two places that there are, nobody is ahead by turn, and two are.
        num_ahead = max(self.num_sequences - len(behind), min(self.num_sequences, self._num_usable_places))
        num_queued = max(0, num_ahead + 1 - self._num_usable_places)
        place_s = num_queued * self._place_s.value * self._slowness(now_ns) / self._num_usable_places
        num_tokens = self.num_unread_tokens - sum(each.num_prompt_tokens for each in behind)
        predicted_s = max(place_s, num_tokens * self._token_s.value)
        waited_s = self._waited_s(now_ns, turn_ns) if num_ahead > self._num_usable_places else 0.0
        return waited_s if waited_s > _WRONG * predicted_s else predicted_s

    def _waited_s(self, now_ns: int, turn_ns: int) -> float:
        """What the oldest before this turn has waited for a first token that nobody who came later has got either."""
        for each in self._unread.values():
            if each.since_ns >= self._newest_begun_ns and each.turn_ns <= turn_ns:
                return (now_ns - each.since_ns) / 1e9
        return 0.0

    def retry_after_s(self, limit_s: float = 0.0, *, priority: int) -> int:
        """Whole seconds after which a wait is likely to be within the limit: the excess; at least until one place.

        `priority` is that of the request that is to come back.
        """
        excess_s = self.predict_wait_s(priority) - limit_s
        place_s = self._place_s.value / self._num_usable_places
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(max(excess_s, place_s))))


def _left_work(step: StepRecord) -> bool:
    return step.num_running + step.num_waiting > 0

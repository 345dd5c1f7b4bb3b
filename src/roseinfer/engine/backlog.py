"""What the engine has been given and has not finished, into how long the next request would wait. Knows no tokens.

The prediction is Little's law over what was measured: with C places and requests that hold one for S seconds, places
become free at C / S a second, so who has Q before it waits Q * S / C. And nobody's prompt is read before those in
front of it, at the speed at which steps read prompts. Measures lag behind an engine that has become slow; so nobody is
told less than what the oldest of those who wait has waited already.
"""

import math
import time
from collections.abc import Callable

from roseinfer.records import BlockedBy, StepRecord

MAX_RETRY_AFTER_S = 60
_MEMORY = 64  # requests, or steps with prompts, over which a measure is remembered


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


class Backlog:
    """Counts of what is in the engine, and the measures of how fast it goes. `num_places` sequences run at once."""

    def __init__(self, num_places: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._unread: dict[str, tuple[int, int]] = {}  # oldest first: since when, and tokens of the prompt
        self.num_sequences = 0
        self.num_tokens = 0  # of prompts, and what may come to be generated
        self.num_unread_tokens = 0  # of prompts whose first token is not known yet
        self._num_places = num_places
        self._num_usable_places = num_places  # fewer when KV blocks run out first
        self._place_s = _Mean()  # a sequence holds its place
        self._token_s = _Mean()  # a step with prompts takes, by prompt token

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """The engine has been given a sequence."""
        self._unread[request_id] = self._clock(), num_prompt_tokens
        self.num_sequences += 1
        self.num_tokens += num_prompt_tokens + max_tokens
        self.num_unread_tokens += num_prompt_tokens

    def note_first_token(self, request_id: str) -> None:
        _, num_prompt_tokens = self._unread.pop(request_id, (0, 0))
        self.num_unread_tokens -= num_prompt_tokens

    def remove(self, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """It has ended, with a first token or without."""
        self.note_first_token(request_id)
        self.num_sequences -= 1
        self.num_tokens -= num_prompt_tokens + max_tokens

    def measure_place(self, held_ns: int) -> None:
        """A sequence came to its end by itself, so long after it was first in a batch."""
        self._place_s.add(held_ns / 1e9)

    def measure_step(self, record: StepRecord) -> None:
        if record.num_prefill_tokens:
            # Weighted by tokens, so that the mean is time by tokens and not a mean of speeds.
            took_s = (record.end_ns - record.start_ns) / 1e9
            self._token_s.add(took_s / record.num_prefill_tokens, record.num_prefill_tokens)
        is_short_of_blocks = record.blocked_by is BlockedBy.KV_BLOCKS
        self._num_usable_places = max(1, record.num_running) if is_short_of_blocks else self._num_places

    def predict_wait_s(self, num_ahead: int = 0) -> float:
        """Seconds until a request that comes now would have its first token, but for reading its own prompt.

        `num_ahead`: so many are before it at least, whether or not the engine has heard of them. 0 before anything was
        measured.
        """
        num_ahead = max(num_ahead, self.num_sequences)
        num_queued = max(0, num_ahead + 1 - self._num_usable_places)
        place_s = num_queued * self._place_s.value / self._num_usable_places
        return max(place_s, self.num_unread_tokens * self._token_s.value, self._waited_s())

    def _waited_s(self) -> float:
        """What the oldest without a first token has waited; 0 while all have a place, and just need some steps."""
        if self.num_sequences <= self._num_usable_places or not self._unread:
            return 0.0
        since_ns, _ = next(iter(self._unread.values()))
        return (self._clock() - since_ns) / 1e9

    def retry_after_s(self, limit_s: float = 0.0, num_ahead: int = 0) -> int:
        """Whole seconds after which a wait is likely to be within the limit: the excess; at least until one place."""
        excess_s = self.predict_wait_s(num_ahead) - limit_s
        place_s = self._place_s.value / self._num_usable_places
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(max(excess_s, place_s))))

"""A runner without a model: computes deterministic tokens from what it finds in its own paged memory.

It writes every token id into the slot of its "KV cache" that the block table names, and computes the next token from
all it reads back through the table. So a wrong block, a lost token or a stale prefix changes the output, just as in a
real model, and two schedules of one request agree only if both kept their blocks right.

It computes as late as it can: nothing before a result is waited for, and then batch after batch in the order of the
launches, like a device that lags behind its host. So a step that is scheduled before the one in front of it was read
finds nothing computed in advance.
"""

import hashlib
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from roseinfer.engine.core.batch import (
    POOLED_UNIT,
    Int32Array,
    Pooled,
    SampledTokens,
    ScheduledBatch,
    ScoredRow,
    Scores,
    SlotBinding,
    Watch,
)
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.messages import Pooling, TokenLogprobs

POOLED_SIZE = 8  # of an embedding
Drawn = tuple[int, Int32Array, int, bool]  # of a row: its slot, what it read, its token, whether its last was drafted


class _FakeLaunched:
    graph_rows = 0
    h2d_bytes = 0

    def __init__(self, runner: "FakeRunner", batch: ScheduledBatch, ready_at: float) -> None:
        self.batch = batch
        self.ready_at = ready_at
        self.sampled: SampledTokens | None = None  # None until it has been computed
        self._runner = runner

    def wait(self) -> SampledTokens:
        self._runner.compute_until(self)
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        assert self.sampled is not None
        return self.sampled


class FakeRunner:
    """`latency_s` seconds pass between launch and result, plus `latency_per_token_s` for each computed token."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        latency_s: float = 0.0,
        latency_per_token_s: float = 0.0,
        repeats: bool = False,
    ) -> None:
        """With `repeats` most tokens follow from the last two alone, so that texts repeat themselves."""
        self._repeats = repeats
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._memory: Int32Array = np.full(num_blocks * block_size, -1, np.int32)
        self._last_token: Int32Array = np.full(num_slots, -1, np.int32)
        self._bindings: dict[int, SlotBinding] = {}
        self._said: dict[int, list[int]] = {}  # by slot, where penalties count it
        self._launched: deque[_FakeLaunched] = deque()  # those not computed yet
        self._ready_at = 0.0  # of the batch launched last
        self.latency_s = latency_s
        self.latency_per_token_s = latency_per_token_s

    def launch(self, batch: ScheduledBatch, _watch: Watch = unwatched) -> _FakeLaunched:
        """See Runner."""
        delay_s = self.latency_s + self.latency_per_token_s * batch.num_tokens
        self._ready_at = max(self._ready_at, time.monotonic()) + delay_s
        launched = _FakeLaunched(self, replace(batch, block_table=batch.block_table.copy()), self._ready_at)
        self._launched.append(launched)
        return launched

    def compute_until(self, launched: _FakeLaunched) -> None:
        """Compute what was launched up to and with this batch."""
        while launched.sampled is None:
            oldest = self._launched.popleft()
            oldest.sampled = self._compute(oldest.batch)

    def _compute(self, batch: ScheduledBatch) -> SampledTokens:
        for binding in batch.bindings:
            self._bindings[binding.slot] = binding
            self._said[binding.slot] = [] if binding.token_ids is None else binding.token_ids.tolist()
        token_ids = np.concatenate([self._last_token[batch.slots[: batch.num_device_rows]], batch.token_ids])
        sampled: list[int] = []
        drawn: list[Drawn] = []
        logprobs: list[TokenLogprobs | None] = []
        scores: list[Scores] = []
        scored = {row.row: row for row in batch.scored}
        pooled: list[Pooled] = []
        poolings = {row.row: row.pooling for row in batch.pooled}
        offset = 0
        masks = {} if batch.masks is None else dict(zip(batch.masks.rows, batch.masks.bits(), strict=True))
        for row, (slot, start, count, samples) in enumerate(
            zip(batch.slots.tolist(), batch.starts.tolist(), batch.num_new_tokens.tolist(), batch.samples, strict=True)
        ):
            places = self._places(batch.block_table[slot], start + count)
            self._memory[places[start:]] = token_ids[offset : offset + count]
            offset += count
            if row in scored:
                scores.append(self._score(self._memory[places], start, scored[row]))
            if row in poolings:
                pooled.append(self._pool(self._memory[places], start, poolings[row]))
                sampled += [0] * bool(samples)  # not read
                logprobs += [None] * bool(samples)
            elif samples:
                token_id = self._next_token(self._memory[places], self._bindings[slot])
                mask = masks.get((slot, start + count))
                while mask is not None and not mask[token_id // 32] >> (token_id % 32) & 1:
                    token_id = (token_id + 1) % self._vocab_size
                assert token_id not in _barred_ids(self._bindings[slot], start + count), "the mask leaves nothing"
                is_drafted = batch.drafted is not None and bool(batch.drafted[row] >= 0)
                drawn.append((slot, self._memory[places], token_id, is_drafted))
                self._last_token[slot] = token_id
                sampled.append(token_id)
                is_asked = self._bindings[slot].params.num_logprobs is not None
                logprobs.append(TokenLogprobs(-1.0, 1, [token_id], [-1.0]) if is_asked else None)
        self._note(drawn)
        has_logprobs = any(entry is not None for entry in logprobs)
        return SampledTokens(
            np.array(sampled, np.int32), logprobs if has_logprobs else None, tuple(scores), tuple(pooled)
        )

    def _places(self, block_ids: Int32Array, num_tokens: int) -> Int32Array:
        """Where the first `num_tokens` tokens of a sequence lie in memory."""
        positions = np.arange(num_tokens, dtype=np.int32)
        places: Int32Array = block_ids[positions // self._block_size] * self._block_size + positions % self._block_size
        return places

    def _score(self, history: Int32Array, start: int, row: ScoredRow) -> Scores:
        """Make scores from all that was read before a token, and from the token."""
        assert (history >= 0).all(), "a KV entry was read before it was written"
        digests = [
            hashlib.blake2b(history[:end].tobytes() + token_id.to_bytes(4, "little"), digest_size=2).digest()
            for end, token_id in enumerate(row.next_token_ids.tolist(), start + 1)
        ]
        logprobs = -np.array([int.from_bytes(digest, "little") / 1000 for digest in digests])
        top = np.arange(row.num_likeliest) + np.zeros((len(digests), 1))
        return Scores(logprobs, top.astype(np.int32), logprobs[:, None] - top)

    def _pool(self, history: Int32Array, start: int, pooling: Pooling) -> Pooled:
        """Make numbers of all that was read: with `last` once, with `mean` for each token from `start` on."""
        assert (history >= 0).all(), "a KV entry was read before it was written"
        ends = [len(history)] if pooling == "last" else range(start + 1, len(history) + 1)
        digests = [hashlib.blake2b(history[:end].tobytes(), digest_size=POOLED_SIZE).digest() for end in ends]
        rows = np.array([list(digest) for digest in digests], np.int64)
        pooled: Pooled = rows[0].astype(np.float32) if pooling == "last" else rows.sum(0) * round(1 / POOLED_UNIT)
        return pooled

    def _note(self, drawn: Sequence[Drawn]) -> None:
        """Count what was said, as a sampler does: the ids of the slot's binding, drafted ones, and then those drawn."""
        drawn = [row for row in drawn if self._said[row[0]]]
        for slot, history, _, is_drafted in drawn:
            if is_drafted:
                self._said[slot][len(history) - 1 :] = history[-1:].tolist()
            assert self._said[slot][: len(history)] == history.tolist(), "a penalty counts what is not the text"
        for slot, history, token_id, _ in drawn:
            self._said[slot][len(history) : len(history) + 1] = [token_id]

    def _next_token(self, history: Int32Array, binding: SlotBinding) -> int:
        assert (history >= 0).all(), "a KV entry was read before it was written"
        barred, params = _barred_ids(binding, len(history)), binding.params
        if self._repeats and len(history) % 11:
            history = history[-2:] % 5
        seed = 0 if params.is_greedy else params.seed or 0
        digest = hashlib.blake2b(history.tobytes(), digest_size=8, salt=seed.to_bytes(8, "little")).digest()
        token_id = int.from_bytes(digest, "little") % self._vocab_size
        while token_id in barred:
            token_id = (token_id + 1) % self._vocab_size
        return token_id


def _barred_ids(binding: SlotBinding, num_known: int) -> set[int]:
    """The tokens that may not come next, since `min_tokens` are not reached."""
    if num_known - binding.num_prompt_tokens >= binding.params.min_tokens:
        return set()
    return {*binding.eos_token_ids, *binding.params.stop_token_ids}

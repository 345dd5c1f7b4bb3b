"""Scheduled batches into sampled tokens: stages rows, runs the model over its paged cache, samples. Never sees text.

A step's tokens travel packed, without padding to a longest row; the token a slot sampled last waits on the device.
Where linears ask for it, the number of tokens is rounded up by letting the last one travel more than once: nobody
reads what becomes of a copy. On a GPU a step whose rows all decode is one CUDA graph, filled up to its size.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import msgspec
import numpy as np
import torch

from roseinfer.config.tree import Config, RunnerConfig
from roseinfer.engine.core.batch import Int32Array, ScheduledBatch, ScoredRow, SlotBinding, Watch
from roseinfer.messages import SamplingParams
from roseinfer.model import warm_batches
from roseinfer.model.device_stream import Stream, open_stream, sent
from roseinfer.model.graphs import CudaGraphs, graph_sizes
from roseinfer.model.loading import LoadedModel, OnProgress, load_model
from roseinfer.model.results import LaunchedBatch, Results
from roseinfer.model.sampling.logprobs import PromptScores
from roseinfer.model.sampling.sampler import Sampler
from roseinfer.model.staging import InputStaging, StagedStep, StagingSizes
from roseinfer.records import LifecycleState
from roseinfer.runtime.stopwatch import UNWATCHED

_MAX_SCORED_ROWS = 128  # at a time: 26 MB of logits of GPT-2's vocabulary
_MAX_WARM_ROWS = 1024  # beyond, a step takes many times as long as the building of its kernels
# What bad parameters raise on the host, before anything of theirs is on the device.
_FAULTS_OF_ONE = (ArithmeticError, LookupError, TypeError, ValueError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The most that a step may bring."""

    num_slots: int
    max_decode_rows: int  # rows of a step that does nothing but decode
    max_tokens: int


class ModelRunner:
    """The torch `Runner`. Owns the KV cache, the sampler and the last token of each slot; one thread uses it."""

    def __init__(
        self, loaded: LoadedModel, stream: Stream, limits: RunnerLimits, config: RunnerConfig, on_progress: OnProgress
    ) -> None:
        self.info = loaded.info
        self._model = loaded.model
        self._attention = loaded.attention
        self._placement = loaded.placement
        self._limits = limits
        self._is_host = stream.is_host
        self._captures_at_startup = config.cuda_graphs == "startup"
        self._on_progress = on_progress
        padded_rows, device, num_slots = cache(loaded.placement.padded_rows), stream.device, limits.num_slots
        sizes = StagingSizes(
            num_slots=num_slots,
            max_rows=padded_rows(num_slots),
            max_tokens=padded_rows(max(limits.max_tokens, loaded.info.max_model_len, num_slots)),
            max_model_len=loaded.info.max_model_len,
            block_size=loaded.info.block_size,
            spare_block=loaded.info.num_blocks,
        )
        self._staging = InputStaging(stream, sizes, padded_rows)
        self._results = Results(stream, num_slots)
        # One slot more than batches name, for the rows that fill up a graph.
        self._sampler = Sampler(num_slots + 1, loaded.model.vocab_size, device, loaded.placement.kernels)
        self._last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._graph_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # where a graph leaves its tokens
        self._failed_slots = set[int]()  # whose parameters could not be used: their rows have no tokens
        self._graphs: CudaGraphs | None = None
        if config.cuda_graphs != "off" and not stream.is_host and loaded.attention.is_capturable:
            fill, sizes_of_graphs = partial(self._staging.stage_decode, None), graph_sizes(limits.max_decode_rows)
            self._graphs = CudaGraphs(stream, sizes_of_graphs, fill, self._decode)
            self.info = msgspec.structs.replace(loaded.info, graph_sizes=list(sizes_of_graphs))

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, watch: Watch = UNWATCHED) -> LaunchedBatch:
        """See Runner."""
        self._bind(batch.bindings)
        launched = self._launch_graph(batch, watch) or self._launch_eager(batch, watch)
        launched.h2d_bytes = self._staging.num_sent_bytes
        if self._failed_slots:
            launched.fail(np.flatnonzero(np.isin(_sampled(batch)[0], list(self._failed_slots))))
        return launched

    def _launch_graph(self, batch: ScheduledBatch, watch: Watch) -> LaunchedBatch | None:
        """The step as one CUDA graph, if there is one that can hold it."""
        if self._graphs is None or batch.num_device_rows < batch.num_rows:
            return None
        if not self._sampler.can_capture(*_sampled(batch)):
            return None
        size = self._graphs.size_for(batch.num_rows, watch)
        if not size:
            return None
        with watch("stage"):
            self._staging.stage_decode(batch, size, watch)
        with watch("forward"):
            self._graphs.replay(size)
        return self._results.fetch(self._graph_tokens[: batch.num_rows], None, graph_rows=size)

    def _launch_eager(self, batch: ScheduledBatch, watch: Watch) -> LaunchedBatch:
        """The step operation by operation."""
        slots, next_positions = _sampled(batch)
        with watch("stage"):
            step = self._staging.stage(batch, watch)
        with watch("forward"):
            hidden = self._hidden(step)
            scores = self._score(hidden, step.packed.query_starts, batch.scored) if batch.scored else None
            logits = self._logits(step, hidden)
        with watch("sample"):
            tokens, logprobs = self._sampler.sample(logits, slots, next_positions, batch.masks)
            self._last_token.index_copy_(0, step.sampled_slots, tokens.clamp(min=0))  # a failed row's is never used
            return self._results.fetch(tokens, logprobs, scores=scores)

    @torch.inference_mode()
    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """The forward pass alone: fills the KV cache, returns logits [rows that sample, vocab_size]."""
        self._bind(batch.bindings)
        step = self._staging.stage(batch)
        return self._logits(step, self._hidden(step))

    def _bind(self, bindings: Iterable[SlotBinding]) -> None:
        for binding in bindings:
            self._staging.bind(binding.slot)
            self._failed_slots.discard(binding.slot)
            try:
                self._sampler.bind(binding)
            except _FAULTS_OF_ONE:
                _log.exception("the parameters of a request cannot be used; it fails, and no other")
                self._failed_slots.add(binding.slot)
                self._sampler.bind(
                    SlotBinding(binding.slot, SamplingParams(temperature=0.0), binding.num_prompt_tokens, ())
                )

    def _hidden(self, step: StagedStep) -> torch.Tensor:
        """The last hidden row of each token of a staged step; its keys and values are in the cache afterwards."""
        attend = self._attention.prepare(step.packed)
        if step.num_gathered:
            torch.index_select(self._last_token, 0, step.slots, out=step.token_ids[: step.num_gathered])
        return self._model.forward(step.token_ids, step.positions, attend)

    def _logits(self, step: StagedStep, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_samples, vocab_size] of the rows that sample, in the type that the model gives them."""
        if not step.num_samples:
            return hidden.new_empty(0, self.vocab_size)
        if step.sampled_tokens is not None:
            hidden = hidden.index_select(0, step.sampled_tokens)
        return self._model.logits(hidden)[: step.num_samples]

    def _score(self, hidden: torch.Tensor, query_starts: Int32Array, scored: Sequence[ScoredRow]) -> PromptScores:
        """Log-probabilities of what follows the rows' tokens, some at a time, since all logits would be large."""
        spans = [query_starts[row.row] + np.arange(len(row.next_token_ids)) for row in scored]
        tokens, targets = np.concatenate(spans), np.concatenate([row.next_token_ids for row in scored])
        counts = np.repeat(np.array([row.num_likeliest for row in scored], np.int32), [len(span) for span in spans])
        size, pieces = min(_MAX_SCORED_ROWS, self._limits.max_decode_rows), []
        for start in range(0, len(tokens), size):
            some = tokens[start : start + size]
            filled = np.pad(some, (0, self._placement.padded_rows(len(some)) - len(some)), "edge").astype(np.int64)
            rows = hidden.index_select(0, sent(filled, hidden.device))
            ids = sent(targets[start : start + size].astype(np.int64), hidden.device)
            logits = self._model.logits(rows)[: len(some)]
            pieces.append(self._sampler.score(logits, ids, counts[start : start + size]))
        return PromptScores(scored, pieces)

    def _decode(self, num_rows: int) -> None:
        """A whole step of so many decoding rows, from staged integers to sampled tokens: what a graph records."""
        step = self._staging.decode_step(num_rows)
        self._staging.put_last_blocks(num_rows)
        logits = self._logits(step, self._hidden(step))
        tokens = self._sampler.sample_captured(logits, step.slots, self._staging.next_positions(num_rows))
        self._last_token.index_copy_(0, step.slots, tokens.clamp(min=0))
        self._graph_tokens[:num_rows].copy_(tokens)

    def warm_up(self, max_num_tokens: int) -> None:
        """Meet every number of rows that steps of up to `max_num_tokens` bring, and each kind of sampling, once.

        Only before the first request: it writes into the first blocks of the cache.
        """
        graphs, self._graphs = self._graphs, None  # first as the steps that no graph serves
        self._build_linears(max_num_tokens)
        prompt_length = min(64, self.info.max_model_len - 1)
        prompt = np.zeros(prompt_length, np.int32)
        if not self._is_host:
            self._warm_sampling()
        for params in warm_batches.KINDS:
            binding = SlotBinding(0, params, prompt_length, (), prompt)
            batch = self._prompt_batch(prompt_length, (binding,))
            self.launch(msgspec.structs.replace(batch, scored=(ScoredRow(0, prompt, 1),))).wait()
            self.launch(warm_batches.decode_batch(1, prompt_length)).wait()
        # The largest steps touch every page of the buffers that grow, and a graph needs them where they will stay.
        for num_tokens in sorted(self._prompt_sizes(max_num_tokens), reverse=True):
            self.launch(self._prompt_batch(num_tokens)).wait()
        for num_rows in sorted(self._decode_sizes(), reverse=True):
            self.launch(warm_batches.decode_batch(num_rows)).wait()
        self._graphs = graphs
        if graphs is not None and self._captures_at_startup:
            with torch.inference_mode():
                graphs.capture_all(partial(self._on_progress, LifecycleState.WARMUP, "cuda_graphs"))
            # Each capture has torch give back the memory that it kept for the next step. What does not fit beside the
            # graphs fails here, and not in a stream.
            self.launch(self._prompt_batch(max_num_tokens)).wait()
            self._warm_sampling()
        self._last_token.zero_()

    def _warm_sampling(self) -> None:
        """A draw and masks that take as much memory as any: the sampler's buffers have their size from then on.

        On a GPU it keeps those that it outgrows, and what does not fit is to fail here, not in a stream. The slots are
        plain again afterwards.
        """
        num_slots = self._limits.num_slots
        for batch in (warm_batches.largest_draw, warm_batches.masked_draw):
            self.launch(batch(num_slots, self.vocab_size)).wait()
        self._bind(SlotBinding(slot, SamplingParams(temperature=0.0), 0, ()) for slot in range(num_slots))

    def _prompt_sizes(self, max_num_tokens: int) -> set[int]:
        """Numbers of prompt tokens that a step is run with. A GPU loads a kernel when a size first asks for it."""
        if self._placement.device.type == "cpu":
            return {max_num_tokens}
        return {max_num_tokens, *(1 << power for power in range(max_num_tokens.bit_length()))}

    def _decode_sizes(self) -> set[int]:
        """Numbers of rows with one token that a step is run with, as far as they are different for a device.

        A GPU's kernels are compiled for ranges of them. Beside rows that decode there may be the last tokens of
        prompts, so there may be more rows than a graph has: up to one for each slot.
        """
        num_slots, max_decode_rows = self._limits.num_slots, self._limits.max_decode_rows
        if self._is_host:
            return {max_decode_rows}
        return {*graph_sizes(max_decode_rows), *graph_sizes(num_slots)}

    def _prompt_batch(self, num_tokens: int, bindings: tuple[SlotBinding, ...] = ()) -> ScheduledBatch:
        """Prompts of zeros, each as long as one may be but the last, all over the first blocks of the pool."""
        longest = self.info.max_model_len - 1
        num_rows = min(-(-num_tokens // longest), self._limits.num_slots)
        lengths = np.full(num_rows, longest, np.int32)
        lengths[-1] = min(num_tokens - longest * (num_rows - 1), longest)
        return ScheduledBatch(
            step_id=0,
            slots=np.arange(num_rows, dtype=np.int32),
            starts=np.zeros(num_rows, np.int32),
            num_new_tokens=lengths,
            samples=np.ones(num_rows, np.bool_),
            num_device_rows=0,
            token_ids=np.zeros(lengths.sum(), np.int32),
            block_table=np.tile(np.arange(longest, dtype=np.int32), (num_rows, 1)),
            bindings=bindings,
        )

    def _build_linears(self, max_num_tokens: int) -> None:
        """Run the linears of a layer, and the head, with every number of rows that they will be run with."""
        padded_rows = self._placement.padded_rows
        if padded_rows(1) == 1:
            return  # numbers of rows are taken as they come, so there is nothing that would be built for each
        for linears, limit in (
            (self._model.layer_linears, max_num_tokens),
            ([self._model.head], self._limits.max_decode_rows),
        ):
            for num_rows in sorted({padded_rows(count) for count in range(1, min(limit, _MAX_WARM_ROWS) + 1)}):
                for linear in linears:
                    linear.warm_up(num_rows)


def _sampled(batch: ScheduledBatch) -> tuple[Int32Array, Int32Array]:
    """Slots of the rows that sample, and where each one's next token will stand."""
    ends = batch.starts + batch.num_new_tokens
    if batch.num_device_rows == batch.num_rows:
        return batch.slots, ends
    return batch.slots[batch.samples], ends[batch.samples]


def load_runner(config: Config, max_active_seqs: int, on_progress: OnProgress) -> ModelRunner:
    """Weights, cache and runner as configured, for slots 0..max_active_seqs-1; not yet warmed up.

    Raises ConfigError when the checkpoint cannot be used, or does not fit.
    """
    loaded = load_model(config, max_active_seqs, on_progress)
    limits = RunnerLimits(
        num_slots=max_active_seqs,
        max_decode_rows=min(config.scheduler.limits.max_num_seqs, max_active_seqs),
        max_tokens=config.scheduler.limits.max_num_batched_tokens,
    )
    stream = open_stream(loaded.placement.device, is_pinned=config.runner.staging == "pinned")
    return ModelRunner(loaded, stream, limits, config.runner, on_progress)

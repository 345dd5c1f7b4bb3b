"""Runs scheduled batches: stages rows, runs the model over its paged cache, samples tokens.

A step's tokens are packed, without padding to a longest row; the token that a slot sampled last is read on the device.
Where linears need it, the number of tokens is rounded up by repeating the last one, and the results of the repetitions
are not read. On a GPU most steps are one CUDA graph, filled up to its size (`model/steps/graphs.py`).
"""

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

import msgspec
import numpy as np
import torch

from roseinfer.config.options import Config, RunnerConfig
from roseinfer.engine.core.batch import (
    MAX_STEP_DRAFTS,
    NO_TOKEN,
    Int32Array,
    ScheduledBatch,
    ScoredRow,
    SlotBinding,
    Watch,
)
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.errors import ConfigError
from roseinfer.messages import SamplingParams
from roseinfer.model.attention.base import Attend
from roseinfer.model.device_stream import CudaStream, Stream
from roseinfer.model.loading import LoadedModel, OnProgress, load_model
from roseinfer.model.pooling import pool
from roseinfer.model.sampling.edit_table import MaskArea
from roseinfer.model.sampling.logprobs import PromptScores, rows_by_count
from roseinfer.model.sampling.sampler import Sampler
from roseinfer.model.steps.graphs import CudaGraphs, GraphSize, decode_graph_sizes, prompt_graph_sizes
from roseinfer.model.steps.replay import Replays
from roseinfer.model.steps.results import LaunchedBatch, Results
from roseinfer.model.steps.staging import InputStaging, StagedStep, StagingSizes
from roseinfer.model.steps.warm_up_batches import (
    WARM_UP_KINDS,
    decode_batch,
    largest_draw,
    masked_draw,
    prompt_batch,
    unheld_draw,
)
from roseinfer.records import LifecycleState
from roseinfer.runtime.step_costs import StepSize

_MAX_SCORED_ROWS = 128  # at a time: 26 MB of logits of GPT-2's vocabulary
_MEASURED_ROWS, _MEASURED_TOKENS = 8, 32  # in the warm-up: a model of billions takes a second for them
_MAX_WARM_ROWS = 1024  # a larger step takes many times as long as building its kernels
# Errors of a request's parameters on the host, before anything of theirs is on the device.
_PARAMETER_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The largest step."""

    num_slots: int
    max_decode_rows: int  # rows of a step that does nothing but decode
    max_tokens: int


class _ScoredPiece:
    """Some of a step's tokens that are scored together."""

    def __init__(self, counts: Int32Array) -> None:
        self.counts = counts  # of the likeliest tokens, of each
        self.on_device: tuple[torch.Tensor, ...] = ()  # hidden rows, their next tokens, rows of equal counts

    def receive(self, *on_device: torch.Tensor) -> None:
        self.on_device = on_device


class _FirstLayerDone(Exception):
    """Ends the forward pass of a warm-up."""


class ModelRunner:
    """The torch `Runner`. Owns the KV cache, the sampler and the last token of each slot; one thread uses it."""

    def __init__(
        self, loaded: LoadedModel, stream: Stream, limits: RunnerLimits, config: RunnerConfig, on_progress: OnProgress
    ) -> None:
        self.info = loaded.info
        self._model = loaded.model
        self._attention = loaded.attention
        self._placement = loaded.placement
        self._packed_cache = loaded.packed_cache
        self._limits = limits
        self._is_host = stream.is_host
        self._captures_at_startup = config.cuda_graphs == "startup"
        self._on_progress = on_progress
        padded_rows, device, num_slots = cache(loaded.placement.padded_rows), stream.device, limits.num_slots
        sizes = StagingSizes(
            num_slots=num_slots,
            max_rows=padded_rows(num_slots + MAX_STEP_DRAFTS),
            max_tokens=padded_rows(max(limits.max_tokens, loaded.info.max_model_len, num_slots)),
            max_model_len=loaded.info.max_model_len,
            block_size=loaded.info.block_size,
            spare_block=loaded.info.num_blocks,
        )
        # One slot more than batches name, for the rows that fill up a graph.
        mask_area = None if stream.is_host else MaskArea(num_slots + 1, loaded.model.vocab_size)
        self._staging = InputStaging(stream, sizes, padded_rows, mask_area)
        self._results = Results(stream, num_slots + MAX_STEP_DRAFTS)
        self._sampler = Sampler(
            num_slots + 1,
            loaded.model.vocab_size,
            device,
            loaded.placement.kernels,
            loaded.info.max_model_len,
            self._staging.outbox,
            None if stream.is_host else self._staging.masks,
        )
        self._last_token = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._graph_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # results of graphs
        self._graph_tokens_of = cache(lambda num_rows: self._graph_tokens[:num_rows])
        self._failed_slots = set[int]()  # their owners' parameters could not be used
        self._graphs: CudaGraphs | None = None
        self._max_graph_context = loaded.max_graph_context
        is_capturable, kernels = loaded.attention.is_capturable and loaded.model.is_capturable, loaded.placement.kernels
        self._replay = Replays(loaded.model, kernels) if kernels is not None and is_capturable else None
        if config.cuda_graphs != "off" and not stream.is_host and is_capturable:
            decode = [
                GraphSize(num_rows, num_rows, is_decode=True) for num_rows in decode_graph_sizes(limits.max_decode_rows)
            ]
            prompts = [GraphSize(*size) for size in prompt_graph_sizes(limits.max_tokens, num_slots)]
            self._graphs = CudaGraphs(stream, (*decode, *prompts), partial(self._stage_graph, None), self._compute)
            self._report_graphs(self._graphs)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def launch(self, batch: ScheduledBatch, watch: Watch = unwatched) -> LaunchedBatch:
        self._bind(batch.bindings)
        launched = self._launch_graph(batch, watch) or self._launch_eager(batch, watch)
        launched.h2d_bytes = self._staging.arenas.num_sent_bytes
        if self._failed_slots:
            launched.failed_rows = np.flatnonzero(np.isin(_sampled(batch)[0], list(self._failed_slots)))
        return launched

    def _launch_graph(self, batch: ScheduledBatch, watch: Watch) -> LaunchedBatch | None:
        """Launch the step as one CUDA graph, if there is one for it."""
        if self._graphs is None or batch.scored or batch.pooled or batch.drafted is not None:
            return None
        slots, next_positions = _sampled(batch)
        if not self._sampler.can_capture(slots, next_positions):
            return None
        is_decode = batch.num_device_rows == batch.num_rows
        if not is_decode and int((batch.starts + batch.num_new_tokens).max()) > self._max_graph_context:
            return None
        size = self._graphs.size_for(batch.num_tokens, batch.num_rows, watch, is_decode=is_decode)
        if size is None:
            return None
        with watch("stage"):
            self._sampler.refresh(slots, next_positions)
            self._stage_graph(batch, size, watch)
        with watch("forward"):
            self._graphs.replay(size)
        logprobs = self._sampler.captured_logprobs(slots)
        return self._results.fetch(self._graph_tokens_of(len(slots)), logprobs, graph_rows=size.num_rows)

    @torch.inference_mode()
    def _launch_eager(self, batch: ScheduledBatch, watch: Watch) -> LaunchedBatch:
        """Launch the step operation by operation."""
        slots, next_positions = _sampled(batch)
        with watch("stage"):
            pieces = self._send_scored(_first_tokens(batch), batch.scored) if batch.scored else []
            step = self._staging.stage(batch, watch)
        with watch("capture" if self._will_record(batch, step) else "forward"):
            scores: PromptScores | None = None
            pooled: Sequence[torch.Tensor] = ()
            if batch.scored or batch.pooled:
                hidden = self._hidden(step)
                scores = self._score(hidden, batch.scored, pieces) if batch.scored else None
                pooled = pool(hidden, batch.pooled, _first_tokens(batch))
                if pooled and all(any(each.row == row for each in batch.pooled) for row in batch.samples.nonzero()[0]):
                    return self._results.fetch(_ends(step, hidden), None, scores=scores, pooled=pooled)
                logits = self._logits_of(step, _sampled_rows(step, hidden))
            else:
                logits = self._logits(step)
        with watch("sample"):
            drafted = None if batch.drafted is None else batch.drafted[batch.samples]
            on_device = None if step.next_positions is None else (step.sampled_slots, step.next_positions)
            tokens, logprobs = self._sampler.sample(logits, slots, next_positions, batch.masks, drafted, on_device)
            self._last_token.index_copy_(0, step.sampled_slots, tokens.clamp(min=0))  # a failed row's is never used
            return self._results.fetch(tokens, logprobs, scores=scores, pooled=pooled)

    @torch.inference_mode()
    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """The forward pass alone: fills the KV cache, returns logits [rows that sample, vocab_size].

        They are valid until the next step.
        """
        self._bind(batch.bindings)
        step = self._staging.stage(batch)
        return self._logits(step)

    def _bind(self, bindings: Iterable[SlotBinding]) -> None:
        for binding in bindings:
            self._staging.bind(binding.slot)
            self._failed_slots.discard(binding.slot)
            try:
                self._sampler.bind(binding)
            except _PARAMETER_ERRORS:
                _log.exception("the parameters of a request cannot be used; it fails, and no other")
                self._failed_slots.add(binding.slot)
                self._sampler.bind(
                    SlotBinding(binding.slot, SamplingParams(temperature=0.0), binding.num_prompt_tokens, ())
                )

    def _will_record(self, batch: ScheduledBatch, step: StagedStep) -> bool:
        """Whether the step will be recorded for others to repeat it, as the first one with its number of rows."""
        can_replay = _can_replay(step) and not batch.scored and not batch.pooled
        return self._replay is not None and can_replay and not self._replay.has_seen(len(step.token_ids))

    def _logits(self, step: StagedStep) -> torch.Tensor:
        """Run a staged step; logits [num_samples, vocab_size] of the rows that sample, valid until the next step."""
        if self._replay is None or not _can_replay(step):
            return self._logits_of(step, self._hidden(step, step.sampled_tokens))
        return self._replay.logits(step.token_ids, step.positions, self._begin(step))[: step.num_samples]

    def _hidden(self, step: StagedStep, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run a staged step up to hidden rows, of the `wanted` tokens or of all, and write keys and values of all."""
        return self._model.forward(step.token_ids, step.positions, self._begin(step), wanted)

    def _begin(self, step: StagedStep) -> Attend:
        attend = self._attention.prepare(step.packed)
        step.gather(self._last_token)
        return attend

    def _logits_of(self, step: StagedStep, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the hidden rows that sample."""
        if not step.num_samples:
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self._model.logits(hidden)[: step.num_samples]

    def _send_scored(self, starts: Int32Array, scored: Sequence[ScoredRow]) -> list["_ScoredPiece"]:
        """Put what `_score` needs on the device, in the copy of the step: filled when that is staged."""
        spans = [starts[row.row] + np.arange(len(row.next_token_ids)) for row in scored]
        tokens, targets = np.concatenate(spans), np.concatenate([row.next_token_ids for row in scored])
        counts = np.repeat(np.array([row.num_likeliest for row in scored], np.int32), [len(span) for span in spans])
        size = min(_MAX_SCORED_ROWS, self._limits.max_decode_rows)
        pieces = []
        for start in range(0, len(tokens), size):
            piece = _ScoredPiece(counts[start : start + size])
            rows, targeted = tokens[start : start + size], targets[start : start + size]
            num_added = self._placement.padded_rows(len(rows)) - len(rows)
            equal = [of_count for _count, of_count in rows_by_count(piece.counts)]
            indices = [np.pad(rows, (0, num_added), "edge"), targeted, *equal]
            self._staging.outbox.put(piece.receive, *(array.astype(np.int64) for array in indices))
            pieces.append(piece)
        return pieces

    def _score(self, hidden: torch.Tensor, scored: Sequence[ScoredRow], pieces: list["_ScoredPiece"]) -> PromptScores:
        """Log-probabilities of the rows' next tokens, some at a time, since all logits would be large."""
        scores = []
        for piece in pieces:
            rows, ids, *same = piece.on_device
            logits = self._model.logits(hidden.index_select(0, rows))[: len(ids)]
            scores.append(self._sampler.score(logits, ids, piece.counts, same))
        return PromptScores(scored, scores)

    def _stage_graph(self, batch: ScheduledBatch | None, size: GraphSize, watch: Watch = unwatched) -> None:
        """Send a batch, or None of any request, filled up to the size of a graph."""
        if size.is_decode:
            self._staging.stage_decode(batch, size.num_rows, watch)
        else:
            self._staging.stage_prompts(batch, size, watch)

    @torch.inference_mode()
    def _compute(self, size: GraphSize) -> None:
        """A whole step, from staged integers to sampled tokens: the work of a graph."""
        if size.is_decode:
            step = self._staging.decode_step(size.num_rows)
            self._staging.put_last_blocks(size.num_rows)
        else:
            step = self._staging.prompt_step(size)
        logits = self._logits(step)
        assert step.next_positions is not None
        tokens = self._sampler.sample_captured(logits, step.sampled_slots, step.next_positions)
        self._last_token.index_copy_(0, step.sampled_slots, tokens.clamp(min=0))
        self._graph_tokens[: size.num_rows].copy_(tokens)

    def warm_up(self, max_num_tokens: int) -> list[tuple[StepSize, int]]:
        """Run each kind of sampling, and steps of every size up to `max_num_tokens`, once; then begin to keep weights.

        Call it before the first request: it writes into the first blocks of the cache. Packed weights are written to
        their file only now, since writing gigabytes takes a processor that the steps want. Returns the nanoseconds of
        some steps, on a CPU. Raises ConfigError for weights of which no token can be drawn.
        """
        graphs, self._graphs = self._graphs, None  # the steps that no graph serves come first
        self._build_linears(max_num_tokens)
        prompt_length = min(8 if self._is_host else 64, self.info.max_model_len - 1)
        prompt = np.zeros(prompt_length, np.int32)
        if not self._is_host:
            self._warm_sampling()
        for params in WARM_UP_KINDS:
            binding = SlotBinding(0, params, prompt_length, (), prompt)
            batch = self._prompt_batch(prompt_length, (binding,))
            self.launch(msgspec.structs.replace(batch, scored=(ScoredRow(0, prompt, 1),))).wait()
            if NO_TOKEN in self.launch(decode_batch(1, prompt_length)).wait().token_ids:
                raise ConfigError(
                    f"The model's logits are not finite in {self.info.dtype}: weights are NaN, infinite or too large.",
                    param="model.path",
                )
        # The largest steps come first: they touch every page of the buffers that grow, and graphs need their addresses.
        if not self._is_host:
            for num_tokens in sorted(self._prompt_sizes(max_num_tokens), reverse=True):
                self.launch(self._prompt_batch(num_tokens)).wait()
        for num_rows in sorted(self._decode_sizes(), reverse=True):
            self.launch(decode_batch(num_rows)).wait()
        if self._is_host:  # the memory of the rows' logits is free again, and suffices
            self._run_first_layer(self._prompt_batch(max_num_tokens))
        self._graphs = graphs
        if graphs is not None and self._captures_at_startup:
            graphs.capture_all(partial(self._on_progress, LifecycleState.WARMUP, "cuda_graphs"))
            self._report_graphs(graphs)
            # Each capture makes torch return the memory that it kept for the next step. A step that does not fit beside
            # the graphs fails here, and not in a stream.
            self.launch(self._prompt_batch(max_num_tokens)).wait()
            self._warm_sampling()
        costs = self._measure(prompt_length) if self._is_host else []
        self._last_token.zero_()
        if self._packed_cache is not None:
            self._packed_cache.write_soon()
        return costs

    def _measure(self, context: int) -> list[tuple[StepSize, int]]:
        """Time steps that differ in rows and prompt tokens, so that the first burst of prompts is cut as later ones."""
        num_rows = min(_MEASURED_ROWS, self._limits.max_decode_rows)
        one, prompt = decode_batch(1, context), self._prompt_batch(min(_MEASURED_TOKENS, self._limits.max_tokens))
        costs = []
        for batch in (one, decode_batch(num_rows), prompt, one):
            began_ns = time.monotonic_ns()
            self.launch(batch).wait()
            ends, num_decodes = batch.starts + batch.num_new_tokens, batch.num_device_rows
            size = StepSize(num_decodes, batch.num_tokens - num_decodes, int(ends.sum()))
            costs.append((size, time.monotonic_ns() - began_ns))
        return costs

    def _report_graphs(self, graphs: CudaGraphs) -> None:
        decode, prompts = graphs.sizes(is_decode=True), graphs.sizes(is_decode=False)
        self.info = msgspec.structs.replace(
            self.info,
            decode_graph_sizes=[size.num_rows for size in decode],
            prompt_graph_sizes=[(size.num_tokens, size.num_rows) for size in prompts],
            graph_bytes=graphs.num_bytes,
            max_graph_bytes=graphs.max_bytes or 0,
        )

    def _warm_sampling(self) -> None:
        """Run the largest draw and masks: a GPU keeps outgrown buffers, and what does not fit must fail here.

        The slots are greedy again afterwards.
        """
        num_slots = self._limits.num_slots
        for batch in (largest_draw, masked_draw, unheld_draw):
            self.launch(batch(num_slots, self.vocab_size)).wait()
        self._bind(SlotBinding(slot, SamplingParams(temperature=0.0), 0, ()) for slot in range(num_slots))

    @torch.inference_mode()
    def _run_first_layer(self, batch: ScheduledBatch) -> None:
        """Run a step up to the attention of the second layer, which would touch the same buffers as the first."""
        step = self._staging.stage(batch)
        attend = self._attention.prepare(step.packed)

        def attend_first(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if layer:
                raise _FirstLayerDone
            return attend(layer, q, k, v)

        with suppress(_FirstLayerDone):
            self._model.forward(step.token_ids, step.positions, attend_first)

    def _prompt_sizes(self, max_num_tokens: int) -> set[int]:
        """Numbers of prompt tokens to run steps with. A GPU loads a kernel when a size first needs it."""
        return {max_num_tokens, *(1 << power for power in range(max_num_tokens.bit_length()))}

    def _decode_sizes(self) -> set[int]:
        """Numbers of rows of one token to run steps with, decoding or ends of prompts: one for each GPU kernel."""
        if self._is_host:
            return {self._limits.max_decode_rows}
        return {*decode_graph_sizes(self._limits.max_decode_rows), *decode_graph_sizes(self._limits.num_slots)}

    def _prompt_batch(self, num_tokens: int, bindings: tuple[SlotBinding, ...] = ()) -> ScheduledBatch:
        return prompt_batch(num_tokens, self.info.max_model_len - 1, self._limits.num_slots, bindings)

    def _build_linears(self, max_num_tokens: int) -> None:
        """Run the linears of a layer, and the head, with every number of rows for which oneDNN builds a kernel."""
        padded_rows = self._placement.padded_rows
        if padded_rows(1) == 1:
            return  # no kernel is built for a number of rows
        for linears, limit in (
            (self._model.layer_linears, max_num_tokens),
            ([self._model.head], self._limits.max_decode_rows),
        ):
            for num_rows in sorted({padded_rows(count) for count in range(1, min(limit, _MAX_WARM_ROWS) + 1)}):
                for linear in linears:
                    linear.warm_up(num_rows)


def _first_tokens(batch: ScheduledBatch) -> Int32Array:
    """Index of each row's first token, drafted tokens being rows of their own, and then the number of all tokens."""
    return np.cumsum(np.append(np.int32(0), batch.num_new_tokens), dtype=np.int32)


def _sampled_rows(step: StagedStep, hidden: torch.Tensor) -> torch.Tensor:
    """Those of the hidden rows of all tokens that sample."""
    return hidden if step.sampled_tokens is None else hidden.index_select(0, step.sampled_tokens)


def _ends(step: StagedStep, hidden: torch.Tensor) -> torch.Tensor:
    """In place of tokens where every row that ends is pooled: `NO_TOKEN` for a row that failed, else 0."""
    return torch.where(_sampled_rows(step, hidden)[: step.num_samples].isfinite().all(1), 0, NO_TOKEN)


def _can_replay(step: StagedStep) -> bool:
    """Whether all its tokens are those of decoding rows."""
    return step.num_gathered == len(step.token_ids)


def _sampled(batch: ScheduledBatch) -> tuple[Int32Array, Int32Array]:
    """Slots of the rows that sample, and the positions of their next tokens."""
    ends = batch.starts + batch.num_new_tokens
    if batch.num_device_rows == batch.num_rows:
        return batch.slots, ends
    return batch.slots[batch.samples], ends[batch.samples]


def load_runner(config: Config, max_active_seqs: int, on_progress: OnProgress) -> ModelRunner:
    """Load weights, cache and runner, without a warm-up. Raises ConfigError for a checkpoint that cannot be used."""
    loaded = load_model(config, max_active_seqs, on_progress)
    limits = RunnerLimits(
        num_slots=max_active_seqs,
        max_decode_rows=min(config.scheduler.limits.max_num_seqs, max_active_seqs),
        max_tokens=config.scheduler.limits.max_num_batched_tokens,
    )
    device, is_pinned = loaded.placement.device, config.runner.staging == "pinned"
    stream = Stream() if device.type == "cpu" else CudaStream(device, is_pinned=is_pinned)
    return ModelRunner(loaded, stream, limits, config.runner, on_progress)

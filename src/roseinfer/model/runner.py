"""Scheduled batches into sampled tokens: packs rows, runs the model over its paged cache, samples. Never sees text.

A step's tokens travel packed, without padding to a longest row; the token a slot sampled last waits on the device.
The number of rows is rounded up by letting the last token travel more than once (see `layers.padded_rows`): a copy
computes and writes what the original does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.config import Config
from roseinfer.engine.batch import SampledTokens, ScheduledBatch, SlotBinding
from roseinfer.errors import ConfigError
from roseinfer.messages import EngineInfo, SamplingParams
from roseinfer.model.attention import AttentionBackend, PackedTokens, choose_attention
from roseinfer.model.device import default_num_threads, dtype_name, resolve_device, resolve_dtype
from roseinfer.model.kv_cache import KVCache, plan_num_blocks
from roseinfer.model.layers import Placement, padded_rows
from roseinfer.model.registry import CausalLM, build_model
from roseinfer.model.sampler import LogprobRows, Sampler
from roseinfer.model.weights import Checkpoint, resolve_checkpoint
from roseinfer.records import LifecycleState

IntArray = npt.NDArray[np.integer[Any]]
OnProgress = Callable[[LifecycleState, str, str], None]  # state, stage, one phrase for a person

_MAX_WARM_ROWS = 128  # beyond, a step takes many times as long as the building of its kernels


class LaunchedBatch:
    """A batch whose tokens are sampled on the device, or will be."""

    def __init__(self, token_ids: torch.Tensor, logprobs: LogprobRows | None) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs

    def wait(self) -> SampledTokens:
        """See Launched."""
        token_ids = self._token_ids.to(torch.int32).numpy(force=True)
        logprobs = None if self._logprobs is None else self._logprobs.to_host(len(token_ids))
        return SampledTokens(token_ids, logprobs)


class ModelRunner:
    """The torch `Runner`. Owns the KV cache, the sampler and the last token of each slot; one thread uses it."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, info: EngineInfo, num_slots: int) -> None:
        self.info = info  # without start-up times, which whoever loads the runner knows
        self._model = model
        self._attention = attention
        self._device = torch.device(info.device)
        self._sampler = Sampler(num_slots, model.vocab_size, self._device)
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=self._device)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedBatch:
        """See Runner."""
        for binding in batch.bindings:
            self._sampler.bind(binding)
        logits = self.logits(batch)
        slots = batch.slots[batch.samples]
        next_positions = (batch.starts + batch.num_new_tokens)[batch.samples]
        tokens, logprobs = self._sampler.sample(logits, slots, next_positions)
        self._last_token[self._tensor(slots)] = tokens
        return LaunchedBatch(tokens, logprobs)

    @torch.inference_mode()
    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """The forward pass alone: fills the KV cache, returns logits [rows that sample, vocab_size] float32."""
        ends = np.cumsum(batch.num_new_tokens)
        index = _padded(np.arange(batch.num_tokens))
        row_of_token = np.repeat(np.arange(batch.num_rows), batch.num_new_tokens)[index]
        positions = (index - (ends - batch.num_new_tokens - batch.starts)[row_of_token]).astype(np.int32)
        attend = self._attention.prepare(PackedTokens(batch.slots[row_of_token], positions, batch.block_table))
        token_ids = torch.cat(
            (
                self._last_token[self._tensor(batch.slots[: batch.num_device_rows])],
                self._tensor(batch.token_ids),
            )
        )
        hidden = self._model.forward(token_ids[self._tensor(index)], self._tensor(positions), attend)
        sampled = (ends - 1)[batch.samples]
        if not len(sampled):
            return torch.empty(0, self.vocab_size, device=self._device)
        return self._model.logits(hidden[self._tensor(_padded(sampled))])[: len(sampled)]

    def warm_up(self, max_num_tokens: int) -> None:
        """Meet every number of rows that steps of up to `max_num_tokens` bring, and each kind of sampling, once.

        Only before the first request: it writes into the first blocks of the cache.
        """
        for num_rows in _row_counts(min(max_num_tokens, _MAX_WARM_ROWS)):
            for linear in self._model.layer_linears:
                linear.warm_up(num_rows)
        for num_rows in _row_counts(min(len(self._last_token), _MAX_WARM_ROWS)):
            self._model.head.warm_up(num_rows)
        prompt_length = min(64, self.info.max_model_len - 1)
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9, num_logprobs=1)):
            for start, num_new_tokens, num_device_rows in ((0, prompt_length, 0), (prompt_length, 1, 1)):
                binding = SlotBinding(0, params, prompt_length, ())
                self.launch(_solo_batch(binding, start, num_new_tokens, num_device_rows)).wait()
        self._last_token.zero_()

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _padded(rows: IntArray) -> IntArray:
    """The rows, the last one repeated up to a number of rows that linears are run with."""
    return np.pad(rows, (0, padded_rows(len(rows)) - len(rows)), mode="edge")


def _row_counts(limit: int) -> list[int]:
    """Every number of rows that 1..limit rows are padded to."""
    return sorted({padded_rows(num_rows) for num_rows in range(1, limit + 1)})


def _solo_batch(binding: SlotBinding, start: int, num_new_tokens: int, num_device_rows: int) -> ScheduledBatch:
    """One row of zeros for the binding's slot, over the first blocks of the pool."""
    return ScheduledBatch(
        step_id=0,
        slots=np.array([binding.slot], np.int32),
        starts=np.array([start], np.int32),
        num_new_tokens=np.array([num_new_tokens], np.int32),
        samples=np.array([True]),
        num_device_rows=num_device_rows,
        token_ids=np.zeros(num_new_tokens - num_device_rows, np.int32),
        block_table=np.arange(start + num_new_tokens, dtype=np.int32)[None],
        bindings=(binding,),
    )


def load_runner(config: Config, max_active_seqs: int, on_progress: OnProgress) -> ModelRunner:
    """Weights, cache and runner as configured, for slots 0..max_active_seqs-1; not yet warmed up.

    Raises ConfigError when the checkpoint cannot be used, or does not fit.
    """
    device = resolve_device(config.runner.device)
    placement = Placement(device, resolve_dtype(config.model.dtype, device))
    if device.type == "cpu":
        torch.set_num_threads(config.runner.num_threads or default_num_threads(placement.dtype))
    on_progress(LifecycleState.LOADING, "checkpoint", config.model.path)
    directory = resolve_checkpoint(config.model.path, config.model.revision)
    on_progress(LifecycleState.LOADING, "weights", f"to {device.type} as {dtype_name(placement.dtype)}")
    with Checkpoint(directory) as checkpoint:
        model = build_model(checkpoint, placement)
        eos_token_ids = checkpoint.eos_token_ids(model.vocab_size)
    max_model_len = _max_model_len(config.model.max_model_len, model)
    num_blocks = plan_num_blocks(config.cache, model.cache_shape, placement, max_model_len, max_active_seqs)
    on_progress(LifecycleState.LOADING, "kv_cache", f"{num_blocks} blocks of {config.cache.block_size} tokens")
    cache = KVCache(model.cache_shape, num_blocks, config.cache.block_size, placement)
    attention = choose_attention(config.runner.attention, cache, model.num_heads)
    info = EngineInfo(
        checkpoint_dir=str(directory),
        model_type=model.model_type,
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=list(eos_token_ids),
        device=device.type,
        dtype=dtype_name(placement.dtype),
        attention=attention.name,
        linear="onednn" if placement.packs_linears else "torch",
        num_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
        startup_s={},
    )
    return ModelRunner(model, attention, info, max_active_seqs)


def _max_model_len(configured: int | None, model: CausalLM) -> int:
    if configured is not None and configured > model.max_positions:
        raise ConfigError(
            f"max_model_len is {configured}, but the model has only {model.max_positions} positions.",
            param="model.max_model_len",
        )
    return configured or model.max_positions

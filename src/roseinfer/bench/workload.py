"""What a benchmark asks of the engine: prompts, sampling, and the KV blocks that all of it needs. Runs nothing."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from roseinfer.config import Config
from roseinfer.config_sources import LoadedConfig
from roseinfer.messages import SamplingParams

_MAX_SPECIAL_TOKENS = 2  # what a tokenizer puts around a text


def make_prompts(base: str, num_requests: int, repeats: Sequence[int], *, is_unique: bool) -> list[str]:
    """Request i has the base prompt repeats[i % len] times, joined by spaces, and its number when it must be unique."""
    prompts = [" ".join([base] * repeats[i % len(repeats)]) for i in range(num_requests)]
    return [f"{prompt} #{i}" for i, prompt in enumerate(prompts)] if is_unique else prompts


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    return make_prompts(
        arguments.prompt, arguments.num_requests, arguments.prompt_repeats, is_unique=arguments.unique_prompts
    )


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    """Greedy unless `--do-sample`."""
    return SamplingParams(
        temperature=arguments.temperature if arguments.do_sample else 0.0,
        top_k=arguments.top_k if arguments.do_sample else 0,
        top_p=arguments.top_p if arguments.do_sample else 1.0,
        max_tokens=arguments.max_new_tokens,
        ignore_eos=arguments.no_stop_on_eos,
    )


def num_blocks_for(prompts: Sequence[str], max_new_tokens: int, block_size: int, max_active_seqs: int) -> int:
    """Blocks with which the planned requests never preempt each other.

    Only active sequences hold blocks, so the longest of them count. A prompt is at most one token for each byte, in
    every vocabulary we read. One more block for each distinct prompt, whose last, partial block a cache could hold.
    """
    lengths = sorted(len(prompt.encode()) + _MAX_SPECIAL_TOKENS + max_new_tokens for prompt in prompts)
    needed = sum(-(-length // block_size) for length in lengths[-max_active_seqs:])
    return max(2, needed + len(set(prompts)))


def with_planned_blocks(loaded: LoadedConfig, prompts: Sequence[str], max_new_tokens: int) -> Config:
    """The configuration with as many KV blocks as the workload needs, unless somebody gave a number."""
    config, scheduler = loaded.config, loaded.config.scheduler
    if "cache.num_blocks" in loaded.sources:
        return config
    rows = max(scheduler.max_num_seqs, scheduler.max_prefill_seqs or 0)
    num_blocks = num_blocks_for(prompts, max_new_tokens, config.cache.block_size, scheduler.max_active_seqs or rows)
    return replace(config, cache=replace(config.cache, num_blocks=num_blocks))

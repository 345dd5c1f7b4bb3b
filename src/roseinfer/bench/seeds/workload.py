"""The workload of a benchmark of the engine: prompts, sampling, and the KV blocks that they need."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from roseinfer.config.sources import LoadedConfig
from roseinfer.config.tree import Config
from roseinfer.messages import SamplingParams


def make_prompts(base: str, num_requests: int, repeats: Sequence[int], *, is_unique: bool) -> list[str]:
    """Request i has the base prompt repeats[i % len] times, joined by spaces, and its number when it must be unique."""
    prompts = [" ".join([base] * repeats[i % len(repeats)]) for i in range(num_requests)]
    return [f"{prompt} #{i}" for i, prompt in enumerate(prompts)] if is_unique else prompts


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    return make_prompts(
        arguments.prompt, arguments.num_requests, arguments.prompt_repeats, is_unique=arguments.unique_prompts
    )


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    """Greedy unless `--do-sample`; then each run draws the same tokens."""
    return SamplingParams(
        temperature=arguments.temperature if arguments.do_sample else 0.0,
        top_k=arguments.top_k if arguments.do_sample else 0,
        top_p=arguments.top_p if arguments.do_sample else 1.0,
        max_tokens=arguments.max_new_tokens,
        ignore_eos=arguments.no_stop_on_eos,
        seed=0,
    )


def with_all_active(loaded: LoadedConfig, num_requests: int) -> Config:
    """The configuration, in which every request may be active at once unless an option limits that.

    The seeds had no limit there: all that were admitted hold KV, and share the rows of a decode step in turn.
    """
    config, scheduler = loaded.config, loaded.config.scheduler
    if "scheduler.max_active_seqs" in loaded.sources:
        return config
    active = max(num_requests, scheduler.max_num_seqs, scheduler.max_prefill_seqs or 0)
    return replace(config, scheduler=replace(scheduler, max_active_seqs=active))


def num_blocks_for(prompts: Sequence[Sequence[int]], max_new_tokens: int, block_size: int, max_active_seqs: int) -> int:
    """Blocks with which the planned requests never preempt each other.

    Only active sequences hold blocks, so the longest of them count; and the partial last block of each distinct prompt,
    which a prefix cache could keep beside them.
    """
    lengths = sorted(len(prompt) + max_new_tokens for prompt in prompts)
    partial = {tuple(prompt) for prompt in prompts if len(prompt) % block_size}
    return sum(-(-length // block_size) for length in lengths[-max_active_seqs:]) + len(partial)

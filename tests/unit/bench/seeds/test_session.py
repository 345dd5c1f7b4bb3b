"""Prompts as the seeds made them, and KV blocks enough for all of them."""

import argparse
import shlex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.bench import options
from roseinfer.bench.seeds import session
from roseinfer.config.flags import Parser, values_given
from roseinfer.config.sources import LoadedConfig, build
from roseinfer.messages import SamplingParams


def parse(*arguments: str) -> tuple[argparse.Namespace, LoadedConfig]:
    parser = Parser(prog="bench")
    options.add_streaming(parser)
    parsed = parser.parse_args([*arguments])
    return parsed, build({**options.DEFAULTS, **values_given(parsed)})


def test_repeats_cycle_and_numbers_end_the_prompt() -> None:
    assert session.make_prompts("Hi", 3, [1, 4], is_unique=False) == ["Hi", "Hi Hi Hi Hi", "Hi"]
    assert session.make_prompts("Hi", 3, [1, 2], is_unique=True) == ["Hi #0", "Hi Hi #1", "Hi #2"]
    parsed, _ = parse("--prompt", "x", "--num-requests", "3", "--prompt-repeats", "2, 1", "--unique-prompts")
    assert session.prompts_of(parsed) == ["x x #0", "x #1", "x x #2"]


@pytest.mark.parametrize(
    ("arguments", "params"),
    [
        ([], SamplingParams(temperature=0.0, max_tokens=64)),
        (["--temperature", "2", "--top-k", "3"], SamplingParams(temperature=0.0, max_tokens=64)),
        (["--do-sample"], SamplingParams(temperature=1.0, max_tokens=64)),
        (["--do-sample", "--temperature", "2", "--top-k", "3", "--top-p", "0.5", "--max-new-tokens", "9"],
         SamplingParams(temperature=2.0, top_k=3, top_p=0.5, max_tokens=9)),
        (["--no-stop-on-eos"], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)),
    ],
)  # fmt: skip
def test_sampling_is_greedy_unless_asked_for(arguments: list[str], params: SamplingParams) -> None:
    parsed, _ = parse(*arguments)
    assert session.params_of(parsed) == msgspec.structs.replace(params, seed=0), "each run draws the same"


def test_the_seeds_flags_are_options_of_the_tree() -> None:
    flags = (
        "--hf-model-id gpt2 --device cpu --bf16 --max-batch-size 4 --prefill-max-batch-size 6 --no-prefix-cache --nvtx "
        "--stream-interval 8 --prefill-max-tokens 99 --prefill-admission-policy pack --prefill-admission-lookahead 12 "
        "--prefill-force-fifo-every 3 --max-active-requests 7"
    )
    _, loaded = parse(*shlex.split(flags))
    config = loaded.config
    assert (config.model.path, config.model.dtype, config.runner.device) == ("gpt2", "bfloat16", "cpu")
    scheduler = config.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_prefill_seqs, scheduler.max_active_seqs) == (4, 6, 7)
    assert (scheduler.max_prefill_tokens, scheduler.admission) == (99, "pack")
    assert (scheduler.lookahead, scheduler.fifo_every) == (12, 3)
    assert (config.cache.prefix_caching, config.observe.nvtx, config.server.stream_interval) == (False, True, 8)
    assert loaded.sources["scheduler.max_num_seqs"] == "--max-batch-size"


def test_the_seeds_default_batch_stands_unless_somebody_says_otherwise() -> None:
    _, loaded = parse()
    assert loaded.config.scheduler.max_num_seqs == 8
    _, loaded = parse("--scheduler.max-num-seqs", "5")
    assert loaded.config.scheduler.max_num_seqs == 5


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), max_size=50), min_size=1, max_size=20),
    new_tokens=st.integers(1, 200),
    block_size=st.sampled_from([8, 16]),
    active=st.integers(1, 30),
)
def test_no_active_set_needs_more_than_the_plan(
    prompts: list[list[int]], new_tokens: int, block_size: int, active: int
) -> None:
    planned = session.num_blocks_for(prompts, new_tokens, block_size, active)
    longest = sorted(map(len, prompts), reverse=True)[:active]
    held = sum(-(-(length + new_tokens) // block_size) for length in longest)
    assert held <= planned <= held + len(prompts)


@pytest.mark.parametrize(
    ("flags", "active"),
    [("", 16), ("--num-requests 5", 8), ("--num-requests 5 --prefill-max-batch-size 9", 9),
     ("--max-active-requests 12", 12)],
)  # fmt: skip
def test_every_request_may_be_active_unless_somebody_says_otherwise(flags: str, active: int) -> None:
    parsed, loaded = parse(*shlex.split(flags))
    assert session.with_all_active(loaded, parsed.num_requests).scheduler.max_active_seqs == active


def test_the_plan_of_a_known_workload() -> None:
    assert session.num_blocks_for([[1, 2, 3]] * 64, 128, 16, max_active_seqs=64) == 64 * 9 + 1
    assert session.num_blocks_for([[1, 2, 3]] * 64, 128, 16, max_active_seqs=8) == 8 * 9 + 1
    assert session.num_blocks_for([[1] * 16, [2] * 16], 16, 16, max_active_seqs=2) == 4

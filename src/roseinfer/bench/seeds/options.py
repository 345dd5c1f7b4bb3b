"""The benchmarks' flags: the seeds' names, which are other names for options of the tree wherever it has one."""

import argparse
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from roseinfer.config.flags import Parser, Positive, add_alias, add_config_flags, parser_of, positives
from roseinfer.config.sources import Given
from roseinfer.messages import Temperature, TokenCount, TopK, TopP

_SOURCE = "the benchmarks' default"
DEFAULTS = {  # the seeds' own, so reports compare
    "scheduler.max_num_seqs": Given("8", _SOURCE),
    "runner.cuda_graphs": Given("off", _SOURCE),
}

_Count = Annotated[int, Meta(ge=0)]
_Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]


def add_streaming(parser: Parser) -> None:
    """Flags of `bench streaming`."""
    group = _add_workload(parser)
    group.add_argument("--pretok", action="store_true", help="tokenise before the clock starts")
    group.add_argument(
        "--tokenize-workers",
        type=parser_of(_Count),
        default=0,
        metavar="N",
        help="0: tokenise inside the submission; N: tokenise N at a time while the submission returns",
    )
    group.add_argument(
        "--submit-interval-ms",
        type=parser_of(_Milliseconds),
        default=0.0,
        metavar="MS",
        help="0, the default, is a burst",
    )
    group.add_argument(
        "--submit-schedule",
        choices=("absolute", "relative"),
        default="absolute",
        help="absolute: request i is due at i intervals, however late the one before was; relative: sleep in between",
    )
    group.add_argument(
        "--max-inflight-requests", type=parser_of(Positive), metavar="N", help="refuse more unfinished ones than this"
    )
    engine = _add_engine(parser)
    add_alias(
        engine, "--stream-interval", "server.stream_interval", "Tokens between two flushes of a stream. Default: 1."
    )
    add_alias(engine, "--prefill-max-tokens", "scheduler.max_prefill_tokens", "Most prefill tokens in one step.")
    add_alias(engine, "--prefill-admission-policy", "scheduler.admission", "Order of admission. Default: fifo.")
    add_alias(
        engine, "--prefill-admission-lookahead", "scheduler.lookahead", "How many waiting requests pack considers."
    )
    add_alias(
        engine, "--prefill-force-fifo-every", "scheduler.fifo_every", "Under pack, how often the oldest goes first."
    )
    add_alias(
        engine, "--max-active-requests", "scheduler.max_active_seqs", "Sequences that hold KV blocks. Default: all."
    )
    add_config_flags(parser, with_short=False)


def add_scheduler(parser: Parser) -> None:
    """Flags of `bench scheduler`."""
    group = _add_workload(parser)
    group.add_argument(
        "--mode",
        choices=("online", "offline"),
        default="online",
        help="online: each request on its own, with its latency; offline: all prompts as one batch, throughput only",
    )
    _add_engine(parser)
    add_config_flags(parser, with_short=False)


def _add_workload(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("workload")
    count = parser_of(Positive)
    group.add_argument("--prompt", default="Hello", metavar="TEXT", help="default: Hello")
    group.add_argument(
        "--prompt-repeats",
        type=positives,
        default=[1],
        metavar="N,N",
        help="request i repeats the prompt as often as the i-th of these, in turn, so lengths mix",
    )
    group.add_argument("--unique-prompts", action="store_true", help="end each prompt with its number: no prefix hits")
    group.add_argument("--num-requests", type=count, default=16, metavar="N", help="default: 16")
    group.add_argument(
        "--max-new-tokens", type=parser_of(TokenCount), default=64, metavar="N", help="for each request; default: 64"
    )
    group.add_argument("--warmup-runs", type=parser_of(_Count), default=1, metavar="N", help="not measured; default: 1")
    group.add_argument("--repeat-runs", type=count, default=1, metavar="N", help="measured; default: 1")
    group.add_argument(
        "--no-reset-prefix-cache", action="store_true", help="let a run hit prefixes that the runs before it computed"
    )
    group.add_argument("--no-stop-on-eos", action="store_true", help="always generate --max-new-tokens")
    group.add_argument("--do-sample", action="store_true", help="sample; greedy otherwise")
    group.add_argument("--temperature", type=parser_of(Temperature), default=1.0, metavar="T", help="with --do-sample")
    group.add_argument("--top-k", type=parser_of(TopK), default=0, metavar="K", help="with --do-sample; 0 keeps all")
    group.add_argument("--top-p", type=parser_of(TopP), default=1.0, metavar="P", help="with --do-sample")
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the report, with all settings, as JSON")
    return group


def _add_engine(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("engine, by the seeds' names")
    add_alias(group, "--hf-model-id", "model.path", "Model. Default: the embedded one.")
    add_alias(group, "--device", "runner.device", "cpu or cuda. Default: auto.")
    add_alias(group, "--bf16", "model.dtype", "bfloat16.", const="bfloat16")
    add_alias(group, "--max-batch-size", "scheduler.max_num_seqs", "Sequences decoded in one step. Default: 8.")
    add_alias(group, "--prefill-max-batch-size", "scheduler.max_prefill_seqs", "Sequences admitted in one step.")
    add_alias(group, "--no-prefix-cache", "cache.prefix_caching", "Compute every prompt anew.", const="false")
    add_alias(group, "--nvtx", "observe.nvtx", "Mark the phases of each step for Nsight.", const="true")
    group.add_argument("--paged-attn", action="store_true", help="accepted; attention is always paged here")
    add_alias(
        group, "--cuda-graph", "runner.cuda_graphs", "Decode steps as CUDA graphs, captured first.", const="startup"
    )
    return group

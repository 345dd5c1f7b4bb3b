"""`roseinfer bench replay`: sends a recording again, to a server or to the simulator, and compares the two.

A recording has no text. Prompts are made so that they share prefixes exactly where the recorded digests agree, answers
are forced to the recorded lengths, and clients disconnect after the token after which they disconnected.
"""

import argparse
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load import serve
from roseinfer.bench.load.plan import RecordedPlan, plan_of_recording, refuse_flags
from roseinfer.bench.load.report import latency_pools, mean_interval_ns
from roseinfer.bench.report import Pool, say
from roseinfer.bench.simulate import simulate
from roseinfer.cli.output_files import check_outputs
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError
from roseinfer.observe.recorder.recording import Recording, RequestRecord

_OF_THE_SIMULATOR = ("cost_model", "decision_log", "draft_share", "without", "inject")


def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Print the report and the comparison. Returns the exit code."""
    if not arguments.simulate:
        refuse_flags(arguments, _OF_THE_SIMULATOR, "needs --simulate")
        for given_by in loaded.sources.values():
            if given_by.startswith("--"):
                raise ConfigError("needs --simulate: the server has its options", param=given_by)
    recording = Recording.load(arguments.file)
    plan = plan_of_recording(recording)
    check_outputs(json=arguments.json, recording=arguments.recording, decision_log=arguments.decision_log)
    endpoint = None if arguments.simulate else serve.endpoint_of(arguments)
    serve.settle_seed(arguments, endpoint)
    header = {"Recording": arguments.file, "Load": f"{describe(plan)}; seed {arguments.seed}"}
    if endpoint is None:
        source = simulate.recording_of(arguments.cost_model) or recording
        costs, costs_line = simulate.costs_of(arguments.cost_model, source)
        setup = simulate.setup_of(arguments, loaded, recording, plan.requests, costs)
        outcome = simulate.simulate(arguments, setup, plan.requests)
        replayed = simulate.report(arguments, setup, outcome, header | {"Cost model": costs_line}, "replay")
    else:
        interval_ns = mean_interval_ns([request.offset_ns for request in plan.requests])
        replayed = serve.measure(arguments, plan.requests, interval_ns, endpoint, header, "replay")
    if replayed.is_valid:
        recorded = recorded_requests(recording, plan.records, is_wire=not arguments.simulate)
        say(*comparison_lines(latency_pools(recorded), latency_pools(replayed.requests)))
    return 0 if replayed.is_valid and replayed.complete else serve.EXIT_INVALID


def describe(plan: RecordedPlan) -> str:
    """The load in words."""
    num_aborted = sum(
        request.abort_after_tokens is not None or request.abort_after_ns is not None for request in plan.requests
    )
    shared = num_shared_tokens(plan)
    return (
        f"{len(plan.requests)} requests, {num_aborted} whose clients went away, {plan.num_skipped} left out; "
        f"{shared} prompt tokens had been seen before in a prefix"
    )


def num_shared_tokens(plan: RecordedPlan) -> int:
    """Prompt tokens in full blocks that an earlier prompt had in the same place behind the same prefix."""
    seen, shared = set[int](), 0
    for request, record in zip(plan.requests, plan.records, strict=True):
        for segment in request.segments[: len(record.prefix_digests)]:
            shared += segment.num_tokens * (segment.key in seen)
            seen.add(segment.key)
    return shared


def recorded_requests(recording: Recording, records: Sequence[RequestRecord], *, is_wire: bool) -> list[Observed]:
    """The recorded requests, as a client beside the server saw them, or by when the engine had the tokens.

    Times begin where the server's do, when the head of the request had arrived. The recorder forgets old writes before
    it forgets their requests: one whose first write is gone has no time to first token, and counts as broken.
    """
    written: dict[int, list[tuple[int, int]]] = defaultdict(list)  # serial -> when, and its newest token's stamp
    if is_wire:
        for row in recording.writes[["serial", "written_ns", "tokens_ns"]].tolist():
            written[row[0]].append(row[1:])
    may_be_cut = is_wire and recording.meta.num_forgotten_writes != 0 and len(recording.writes)
    since_ns = int(recording.writes["written_ns"][0]) if may_be_cut else is_wire * recording.meta.begin_ns
    return [_recorded(record, written.get(record.serial, []), since_ns) for record in records]


def _recorded(record: RequestRecord, written: Sequence[tuple[int, int]], since_ns: int) -> Observed:
    """`since_ns` is when the oldest write returned that is remembered, or the recording begins; 0 where none misses.

    A write has the stamp of its newest token. So one that has another than the first token's is a later one, or had
    several tokens: of a stream that is not known. An answer in one piece has one write.
    """
    first_ns = record.token_ns[0] if record.token_ns else since_ns
    has_first = bool(written) and (not record.is_streamed or written[0][1] == first_ns)
    is_cut = first_ns < since_ns and not has_first
    stamps, counts = list(record.token_ns), [1] * len(record.token_ns)
    if written:
        reached = [0, *(bisect_right(record.token_ns, tokens_ns) for _, tokens_ns in written)]
        counts = [later - earlier for earlier, later in pairwise(reached)]
        stamps = [written_ns for written_ns, _ in written]
    return Observed(
        request_id=record.request_id,
        intended_ns=record.recv_ns,
        sent_ns=record.recv_ns,
        token_ns=stamps,
        token_counts=counts,
        end_ns=record.end_ns or (stamps[-1] if stamps else record.recv_ns),
        num_prompt_tokens=record.num_prompt_tokens,
        error="its first write was forgotten" if is_cut else "",
        was_aborted=record.client_disconnected,
    )


def comparison_lines(recorded: Sequence[Pool], replayed: Sequence[Pool]) -> list[str]:
    """Each distribution of both, in one line."""
    by_name = {pool.name: pool for pool in replayed}
    return [
        "--- recorded -> replayed ---",
        *(
            f"{pool.name} p50/p95/p99: {pool.percentiles()} -> {by_name[pool.name].percentiles()} {pool.unit}"
            for pool in recorded
            if pool.name in by_name
        ),
    ]

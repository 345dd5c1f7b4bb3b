"""The table of causes: what the time between two tokens of a request can go to, and what to do about it.

To add a cause, add a row at the end, after UNKNOWN: a recording stores the row's number. Metrics, capture rules,
`roseinfer explain`, the jitter dashboard, docs/causes.md and the timeline page take causes and words from here;
`make docs dashboards` writes those that are files. Colours are one palette, in which any two causes stay apart for
every reader; `tests/unit/observe/gaps/test_palette.py` says how far. Time is given to causes in `step_gaps.py` (the
engine), `deliveries.py` (the way to the socket) and `observe/recorder/flight.py` (what interrupts the front end).
"""

from enum import StrEnum
from typing import Literal, Self

import msgspec

Place = Literal["work", "prompts", "memory", "host", "cores", "delivery", "other"]
"""The panel of the jitter dashboard that shows a cause."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, and what people read about it."""

    name: str
    title: str = ""  # on the timeline page; empty: the name
    meaning: str  # what the time went to, as a phrase
    option: str = ""  # path of the option that changes it; empty where none does
    advice: str  # what to change, and its price
    story: str
    """What happened in one gap, for `str.format`: `step` is the StepRecord that shows the cause, `names` the requests
    behind the gap, `part` the cause's time, `process` where an interpreter was interrupted."""
    column: str = ""  # of STEP_DTYPE, largest in the step that shows the cause; empty: the step that ended the gap
    place: Place
    color: str  # on the timeline page, in its light scheme and its dark one, and on the dashboards

    @property
    def remedy(self) -> str:
        """The option and the advice, in Markdown."""
        return f"`{self.option}`: {self.advice}" if self.option else self.advice


class Cause(StrEnum):
    """What a moment between two tokens of a request went to: a closed set."""

    row: Row
    number: int  # in recordings

    def __new__(cls, row: Row | str) -> Self:
        assert isinstance(row, Row)  # `Cause("decode")` is a look-up, which does not come here
        member = str.__new__(cls, row.name)
        member._value_, member.row, member.number = row.name, row, len(cls.__members__)
        return member

    DECODE = Row(
        name="decode",
        meaning="computing a step of decoding rows, up to one and a half times what recent steps of that size took",
        option="scheduler.max_num_seqs",
        advice="Fewer sequences in a step make it shorter, and throughput smaller. A faster device, a smaller "
        "`model.dtype` and `model.quantization` make it shorter too.",
        story="decoding {step.num_decode_seqs} sequences took {part}",
        place="work",
        color="#aaccaa",
    )
    PREFILL_OF_OTHERS = Row(
        name="prefill_of_others",
        meaning="prompt tokens of other requests, computed in the same step",
        option="scheduler.target_itl_ms",
        advice="A smaller value cuts the prompts of newcomers into shorter pieces: every stream waits less for them, "
        "and they wait longer for their first token.",
        story="prefill of request {names}, {step.num_prefill_tokens} tokens",
        column="num_prefill_tokens",
        place="prompts",
        color="#8866aa",
    )
    BATCH_GROWTH = Row(
        name="batch_growth",
        meaning="more decoding sequences than in the step before; with more than were ever seen, at most in proportion",
        option="scheduler.max_num_seqs",
        advice="A smaller value bounds how much a step can grow when more sequences decode; the others wait for a row.",
        story="the step grew to {step.num_decode_seqs} decoding sequences",
        place="prompts",
        color="#bb99cc",
    )
    GRAPH_CAPTURE = Row(
        name="graph_capture",
        meaning="capturing a CUDA graph, or on a CPU the first step with a number of rows, while streams waited",
        option="runner.cuda_graphs",
        advice="`startup` captures every size before the port is ready, so that no stream waits for a capture. On a "
        "CPU each number of rows is recorded once, which no option changes.",
        story="the step was captured, so that others repeat it, {part}",
        column="capture_ns",
        place="host",
        color="#eecc44",
    )
    GRAPH_MISS = Row(
        name="graph_miss",
        meaning="a step that no CUDA graph could hold, as far as it took longer than in one",
        option="runner.cuda_graphs",
        advice="`startup` captures all sizes that a step of decoding rows can have, and steps with prompts up to 1,024 "
        "tokens (`scheduler.max_num_batched_tokens`), as far as the GPU's memory allows: the log names what it does "
        "not. Steps with drafted tokens, or with prompts that are scored or embedded, run without a graph whatever "
        "this says.",
        story="no CUDA graph could hold its {step.num_decode_seqs} decoding and {step.num_prefill_seqs} other rows",
        place="host",
        color="#bb0055",
    )
    H2D_COPY = Row(
        name="h2d_copy",
        title="copy to device",
        meaning="waiting for, and queueing, the copy of the step's integers to the GPU",
        option="runner.staging",
        advice="`pinned` lets the copies run beside the host; `pageable` is there for comparison.",
        story="copies of {step.h2d_bytes} bytes to the device took {part}",
        column="h2d_ns",
        place="host",
        color="#2200ff",
    )
    SAMPLE_SYNC = Row(
        name="sample_sync",
        title="sampling",
        meaning="drawing tokens, where the host does it or waits for it",
        option="runner.pipeline_depth",
        advice="On a GPU, 1, the default, launches the next step before the tokens of this one have been read. On any "
        "device, greedy or plain sampling and fewer log-probabilities make drawing shorter.",
        story="sampling took {part}",
        column="sample_ns",
        place="host",
        color="#0099ff",
    )
    SCHEDULE = Row(
        name="schedule",
        title="scheduling",
        meaning="the engine's bookkeeping: reading its inbox, scheduling, committing, building outputs",
        option="runner.pipeline_depth",
        advice="On a GPU, 1, the default, lets the engine's bookkeeping happen while the device computes the step "
        "after. On a CPU it takes part of a millisecond.",
        story="the engine's own work between steps took {part}",
        place="host",
        color="#bb8877",
    )
    KV_WAIT = Row(
        name="kv_wait",
        title="wait for KV blocks",
        meaning="waiting for KV blocks after a preemption",
        option="cache.num_blocks",
        advice="More blocks (more memory: `cache.cpu_memory_mib`, `cache.memory_utilization`; or smaller ones: "
        "`cache.dtype: int8`) make preemption rarer; so does a smaller `scheduler.max_active_seqs`.",
        story="request {names} had lost its blocks; {step.num_used_blocks} of {step.num_total_blocks} were in use",
        column="num_used_blocks",
        place="memory",
        color="#667700",
    )
    PREEMPTED = Row(
        name="preempted",
        title="recomputation",
        meaning="computing again what a preemption had thrown away",
        option="cache.num_blocks",
        advice="More blocks (more memory: `cache.cpu_memory_mib`, `cache.memory_utilization`; or smaller ones: "
        "`cache.dtype: int8`) make preemption rarer; so does a smaller `scheduler.max_active_seqs`. Prefix "
        "caching shortens the computing again.",
        story="request {names} was computed again, {step.num_prefill_tokens} tokens",
        column="num_prefill_tokens",
        place="memory",
        color="#bbbb77",
    )
    NOT_SELECTED = Row(
        name="not_selected",
        title="not its turn",
        meaning="more sequences were active than a step decodes, and it was not the request's turn",
        option="scheduler.max_num_seqs",
        advice="A larger value, or a smaller `scheduler.max_active_seqs`, gives each active sequence a row in every "
        "step.",
        story="{step.num_not_selected} sequences had no turn beside the {step.num_decode_seqs} that were decoded",
        column="num_not_selected",
        place="memory",
        color="#0066ff",
    )
    GC = Row(
        name="gc",
        title="garbage collection",
        meaning="a garbage collection that stopped the engine's interpreter or the front end's",
        advice="Neither should collect while it serves: report it. Collections walk what came to live after "
        "start-up, so look first at code of yours in the same process, such as an observer.",
        story="a garbage collection in {process} took {part}",
        place="host",
        color="#778899",
    )
    ENGINE_OUTBOX = Row(
        name="engine_outbox",
        meaning="the token waited in the engine behind others that the front end had not read; or the engine stood "
        "still because the front end had stopped reading",
        advice="The front end read late: look at its other causes. It needs a core of its own beside the engine's; "
        "`runner.num_threads` below the number of cores leaves it one.",
        story="{part} of engine_outbox between the engine and the front end",
        place="delivery",
        color="#445544",
    )
    DETOKENIZE = Row(
        name="detokenize",
        meaning="turning tokens into text and frames",
        option="server.stream_interval",
        advice="A larger value makes text for several tokens at once; streams advance in jumps.",
        story="{part} of detokenize in the front end",
        place="delivery",
        color="#ffbbff",
    )
    EVENT_LOOP = Row(
        name="event_loop",
        meaning="the thread of the front end's event loop computed something else, other streams among it",
        option="server.stream_interval",
        advice="A larger value means fewer writes for the front end; streams advance in jumps. A smaller "
        "`server.max_inflight` admits fewer requests.",
        story="{part} of event_loop in the front end",
        place="delivery",
        color="#ee8800",
    )
    CLIENT_BACKPRESSURE = Row(
        name="client_backpressure",
        title="slow client",
        meaning="bytes were left in the socket's buffer, and the write waited: the client, or the network, took no "
        "more",
        advice="Nothing in the server: look at the client, the network to it, and proxies that buffer.",
        story="{part} of client_backpressure at the socket",
        place="delivery",
        color="#bb5577",
    )
    SCRAPE = Row(
        name="scrape",
        title="metrics scrape",
        meaning="the front end rendered `/metrics`",
        advice="Let Prometheus scrape less often (`scrape_interval`).",
        story="a scrape of /metrics by {process} took {part}",
        place="delivery",
        color="#7733aa",
    )
    PROFILER = Row(
        name="profiler",
        meaning="a profiler was recording, and the step took longer than usual",
        option="observe.capture_profile_steps",
        advice="Fewer steps, or 0, profile less of what is served; a profile that was asked for by hand ends by "
        "itself.",
        story="a profiler recorded the step, or began or ended beside it, {part}",
        place="other",
        color="#ee4444",
    )
    UNKNOWN = Row(
        name="unknown",
        meaning="nothing that is recorded explains it",
        advice="Look outside, at the suspects on the jitter dashboard: a hypervisor that took the processor (`steal` "
        "in `/proc/stat`), pages that came from disk, the clock of the cores. In the front end it is time in which its "
        "thread neither computed nor was ready to: a lock, or a write to a log without a reader.",
        story="{part} of which nothing that is recorded says more",
        place="other",
        color="#999999",
    )
    CPU_THROTTLED = Row(
        name="cpu_throttled",
        title="CPU limit",
        meaning="the CPU quota of the control group was used up, and stopped the engine or the front end",
        advice="Raise the container's CPU limit, or set none and keep the request: a limit of as many cores as "
        "`runner.num_threads` and one more for the front end is not met in bursts. With a limit that must stay, fewer "
        "`runner.num_threads` use it up later.",
        story="the CPU quota of its control group stopped {process} for {part}",
        column="cpu_throttled_ns",
        place="cores",
        color="#555511",
    )
    CPU_WAIT = Row(
        name="cpu_wait",
        title="wait for a core",
        meaning="the engine or the front end was ready to run, and other processes had the cores",
        advice="Give it cores of its own: a CPU request of whole cores under the kubelet's static CPU manager, a "
        "cpuset, or fewer neighbours on the node. `runner.num_threads` below the number of cores leaves one to the "
        "front end.",
        story="{process} was ready to run for {part}, and other processes had the cores",
        column="cpu_wait_ns",
        place="cores",
        color="#990066",
    )


CAUSES = tuple(Cause)
"""By number."""

"""Causes into the option that would change them, with its price. Knows the options' names, and no recording's numbers.

A cause that no option of ours changes says so: it is the client's, the network's, the machine's or our own to mend.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from roseinfer.records import Cause


class Knob(NamedTuple):
    """What to turn; `option` is a path of the configuration, or empty where no option helps."""

    option: str
    advice: str


SHORT_PROMPT_TOKENS = 64
"""No longer than this a prompt is hardly worth cutting: what a step costs beside its tokens would come once a piece."""

_DEFAULTS = {
    "scheduler.max_prefill_tokens": ("no limit but max_num_batched_tokens", "max_num_batched_tokens"),
    "scheduler.max_prefill_seqs": ("as many as max_num_seqs", "max_num_seqs"),
    "cache.num_blocks": ("what the memory of cache.cpu_memory_mib or cache.memory_utilization holds", ""),
}
"""What null means, and the option of the same section whose value belongs to it."""

_MANY_SHORT_PROMPTS = Knob(
    "scheduler.max_prefill_seqs",
    f"No prompt has more than {SHORT_PROMPT_TOKENS} tokens, so there is little to cut. A smaller value begins fewer of "
    "them in one step: every stream waits less for them, and they wait longer for their first token.",
)

KNOBS = {
    Cause.DECODE: Knob(
        "scheduler.max_num_seqs",
        "The step itself took longer. Fewer sequences in a step make it shorter, and throughput smaller.",
    ),
    Cause.PREFILL_OF_OTHERS: Knob(
        "scheduler.max_prefill_tokens",
        "A smaller value cuts the prompts of newcomers into shorter pieces: every stream waits less for them, and "
        "they wait longer for their first token.",
    ),
    Cause.BATCH_GROWTH: Knob(
        "scheduler.max_num_seqs",
        "A smaller value bounds how much a step can grow when more sequences decode; the others wait for a row.",
    ),
    Cause.GRAPH_CAPTURE: Knob(
        "runner.cuda_graphs",
        "`startup` captures every size before the port is ready, so that no stream waits for a capture.",
    ),
    Cause.GRAPH_MISS: Knob(
        "runner.cuda_graphs",
        "`startup` captures all sizes that a step of decoding rows can have. Steps with prompt tokens, and rows that "
        "ask for log-probabilities, run without a graph whatever this says.",
    ),
    Cause.H2D_COPY: Knob(
        "runner.staging", "`pinned` lets the copies run beside the host; `pageable` is there for comparison."
    ),
    Cause.SAMPLE_SYNC: Knob(
        "runner.pipeline_depth", "On a GPU, 1 launches the next step before the tokens of this one have been read."
    ),
    Cause.SCHEDULE: Knob(
        "runner.pipeline_depth",
        "On a GPU, 1 lets the engine's bookkeeping happen while the device computes the step after. On a CPU it takes "
        "part of a millisecond; what is more is waiting for a core that other processes have.",
    ),
    Cause.KV_WAIT: Knob(
        "cache.num_blocks",
        "More blocks (or more memory: `cache.cpu_memory_mib`, `cache.memory_utilization`) make preemption rarer; so "
        "does a smaller `scheduler.max_active_seqs`.",
    ),
    Cause.PREEMPTED: Knob(
        "cache.num_blocks",
        "More blocks (or more memory: `cache.cpu_memory_mib`, `cache.memory_utilization`) make preemption rarer, and "
        "with it the computing again.",
    ),
    Cause.NOT_SELECTED: Knob(
        "scheduler.max_num_seqs",
        "More sequences were active than a step decodes. A larger value, or a smaller `scheduler.max_active_seqs`, "
        "gives each a row in every step.",
    ),
    Cause.GC: Knob(
        "",
        "Collections of the interpreter walk what came to live after start-up. Code of yours in the "
        "same process, such as an observer, is the first place to look.",
    ),
    Cause.ENGINE_OUTBOX: Knob(
        "",
        "The front end was late with reading. It needs a core of its own beside the engine's; "
        "`runner.num_threads` below the number of cores leaves it one.",
    ),
    Cause.DETOKENIZE: Knob(
        "server.stream_interval", "A larger value makes text for several tokens at once; streams advance in jumps."
    ),
    Cause.EVENT_LOOP: Knob(
        "server.stream_interval",
        "A larger value means fewer writes for the front end, which was busy with other requests; streams advance in "
        "jumps.",
    ),
    Cause.CLIENT_BACKPRESSURE: Knob("", "The client, or the network to it, did not take the bytes in time."),
    Cause.SCRAPE: Knob("", "Let Prometheus scrape less often (`scrape_interval`)."),
    Cause.PROFILER: Knob(
        "observe.capture_profile_steps",
        "Fewer steps, or 0, profile less of what is served; a profile that was asked for by hand ends by itself.",
    ),
    Cause.UNKNOWN: Knob(
        "",
        "Nothing that is recorded explains it. Look outside the process: other work on these cores, CPU quota, "
        "frequency changes.",
    ),
}
"""Every cause has its entry."""


def knob_for(cause: Cause, longest_prompt: int) -> Knob:
    """The cause's entry, or another where the longest prompt, in tokens, is too short for that one to help."""
    if cause is Cause.PREFILL_OF_OTHERS and 0 < longest_prompt <= SHORT_PROMPT_TOKENS:
        return _MANY_SHORT_PROMPTS
    return KNOBS[cause]


def meaning_of(option: str, section: Mapping[str, Any]) -> str:
    """What null means as the option's value, in words; `section` has the options beside it. Empty if not known."""
    words, other = _DEFAULTS.get(option, ("", ""))
    return f"{words} {section[other]}" if other in section else words

"""The figures that must be reached on a CPU and on a GPU, each beside what the parts have measured.

A ratio is of two medians. Its range goes from the worst pair of their repeats to the best one, so it is wider than the
spread of either. What was not measured has no figure, and a note says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import roofs
from benchmarks.figures import Spread
from benchmarks.workloads import WORKLOADS

REFERENCE = "transformers float32"
PRECISIONS = ("float32", "bfloat16", "int8")
LOAD_WORKLOADS = ("W1x32", "W3", "W4", "W4b")
SAME_PRECISION = {"q8": "int8"}  # a peer's name of a precision
HOST_BUDGET_US = 80.0
MEMORY_BUDGET_GB = 2.2
QWEN3_WEIGHTS = 596_049_920  # bytes that a token reads in int8
QWEN3_HEAD = 155_582_464  # of them
QWEN3_KV_BYTES = 114_688  # keys and values of a token in bfloat16
S1 = WORKLOADS["S1"]
SEEDS_WORKLOAD, BASE_SETTING = "64 requests, 20 ms apart", "captured first, pinned"  # of benchmarks/gpu/streams.py
SEEDS_FIGURES = {  # of the posts' report: what must be reached in the posts' workload
    "tokens/s": (5900.0, True, "tokens/s"),
    "TPOT p50": (0.8, False, "ms"),
    "TPOT p99": (1.5, False, "ms"),
    "ITL p99": (3.0, False, "ms"),
    "TTFT p50": (3.0, False, "ms"),
    "TTFT p99": (8.0, False, "ms"),
    "Submit lag p99": (2.0, False, "ms"),
}
BURST_RATES = {"burst offline": 150_000.0, "burst over HTTP": 50_000.0, "one stream": 2_000.0}

Results = Mapping[str, Mapping[str, Any]]
"""What each part that was run has measured: the `results` of its JSON, by the part's name."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line: what must be reached, and what was."""

    measure: str
    bound: float
    is_least: bool  # the figure must be at least the bound; otherwise at most
    unit: str
    measured: Spread | None
    note: str = ""  # with whom it was compared, or why there is no figure
    predicted: float | None = None  # by benchmarks/gpu/performance_model.py

    @property
    def is_reached(self) -> bool | None:
        """None when it was not measured."""
        if self.measured is None:
            return None
        return self.measured.median >= self.bound if self.is_least else self.measured.median <= self.bound


def of_cpu(results: Results) -> list[Requirement]:
    """The table of the CPU's page, in its order."""
    return [
        *decode_speedups(results),
        *roof_shares(results),
        *host_work(results),
        *served_shares(results),
        *against_vllm(results),
        *against_all_peers(results),
        *steady_streams(results),
        *memory(results),
        *products(results),
        *starts(results),
        *drafts(results),
        *mixed_load(results),
        *one_stream_and_eight(results),
        *prompts(results),
    ]


def ratio(over: Spread | None, under: Spread | None) -> Spread | None:
    """Of two figures with their spreads; None when one was not measured or the divisor is zero."""
    if over is None or under is None or not under.least:
        return None
    repeats = min(over.num_repeats, under.num_repeats)
    return Spread(over.median / under.median, over.least / under.most, over.most / under.least, repeats)


def added(one: Spread | None, other: Spread | None) -> Spread | None:
    if one is None or other is None:
        return None
    repeats = min(one.num_repeats, other.num_repeats)
    return Spread(one.median + other.median, one.least + other.least, one.most + other.most, repeats)


def scaled(spread: Spread | None, factor: float) -> Spread | None:
    if spread is None:
        return None
    return Spread(spread.median * factor, spread.least * factor, spread.most * factor, spread.num_repeats)


# --- decode ---------------------------------------------------------------------------------------------------------


def decode_ms(results: Results, name: str, batch: int, context: int, part: str = "step") -> Spread | None:
    """Milliseconds of a decode step, or of a phase of it."""
    row = _decode_row(results, name, batch, context)
    return Spread(**row[part]) if part in row else None


def _decode_row(results: Results, name: str, batch: int, context: int) -> Mapping[str, Any]:
    """What a subject's turns came to; empty when it had none."""
    for case in results.get("decode", {}).get("cases", ()):
        if (case["batch"], case["context"]) == (batch, context):
            found: Mapping[str, Any] = case["subjects"].get(name, {})
            return found
    return {}


def decode_speedups(results: Results) -> Iterator[Requirement]:
    for context, bounds in ((64, (2.0, 3.7, 5.0)), (512, (4.5, 8.0))):
        for precision, bound in zip(PRECISIONS, bounds, strict=False):
            own = decode_ms(results, f"roseinfer {precision}", 64, context)
            reference = decode_ms(results, REFERENCE, 64, context)
            measure = f"decode step, batch 64, context {context}, {precision}, against transformers eager float32"
            yield Requirement(measure, bound, True, "×", ratio(reference, own))


def roofs_of_turns(results: Results, name: str, batch: int, context: int) -> tuple[Spread, Spread] | None:
    """Over a decode step's turns: the roof by that turn's bandwidth, in milliseconds, and its share of the step."""
    row = _decode_row(results, name, batch, context)
    if "turns" not in row or "roofs" not in results:
        return None
    precision = name.split()[1]
    peak = results["roofs"]["peak"][precision]
    found = [roofs.roof_ms(precision, batch, context, bandwidth, peak) for bandwidth, _ in row["turns"]]
    shares = [roof / step_ms for roof, (_, step_ms) in zip(found, row["turns"], strict=True)]
    return Spread.of(found), Spread.of(shares)


def roof_shares(results: Results) -> Iterator[Requirement]:
    for batch, bound, roof in ((1, 78.0, "bandwidth roof"), (64, 68.0, "compute + KV roof")):
        found = roofs_of_turns(results, "roseinfer bfloat16", batch, 64)
        share = None if found is None else scaled(found[1], 100)
        yield Requirement(
            f"decode step, batch {batch}, context 64, bfloat16: share of the {roof}", bound, True, "%", share
        )


def host_work(results: Results) -> Iterator[Requirement]:
    """Scheduling and commit of a step; the sum's spread is that of the parts added up."""
    for precision in PRECISIONS[:2]:
        schedule = decode_ms(results, f"roseinfer {precision}", 64, 64, "schedule")
        commit = decode_ms(results, f"roseinfer {precision}", 64, 64, "commit")
        total = scaled(added(schedule, commit), 1e3)
        yield Requirement(f"schedule and commit, 64 sequences, {precision}", HOST_BUDGET_US, False, "µs", total)


# --- served ---------------------------------------------------------------------------------------------------------


def served_rows(results: Results) -> list[Mapping[str, Any]]:
    """Rows of servers and of libraries."""
    return [row for part in ("served", "peers") for row in results.get(part, {}).get("rows", ())]


def served(results: Results, name: str, workload: str, figure: str) -> Spread | None:
    for row in served_rows(results):
        if row["name"] == name and row["workload"] == workload:
            values = [repeat[figure] for repeat in row["repeats"] if figure in repeat]
            return Spread.of(values) if values else None
    return None


def served_shares(results: Results) -> Iterator[Requirement]:
    for precision in PRECISIONS:
        own = served(results, f"roseinfer {precision}", "W2", "tokens_per_s")
        engine = served(results, f"engine only {precision}", "W2", "tokens_per_s")
        share = scaled(ratio(own, engine), 100)
        yield Requirement(f"W2 over HTTP, {precision}: share of the engine-only rate", 85.0, True, "%", share)


def against_vllm(results: Results) -> Iterator[Requirement]:
    figures = (("tokens_per_s", "tokens/s", 1.15, True), ("tpot_p99_ms", "TPOT p99", 1.0, False))
    for precision in PRECISIONS[:2]:
        for figure, name, bound, is_least in (*figures, ("itl_p99_ms", "ITL p99", 1.0, False)):
            own = served(results, f"roseinfer {precision}", "W2", figure)
            rival = served(results, f"vllm {precision}", "W2", figure)
            note = "" if rival else reason_of(results, f"vllm {precision}", "W2")
            measure = f"W2 over HTTP, {precision}: {name} against vLLM"
            yield Requirement(measure, bound, is_least, "×", ratio(own, rival), note)


def against_all_peers(results: Results) -> Iterator[Requirement]:
    for workload in LOAD_WORKLOADS:
        for precision in PRECISIONS:
            own = served(results, f"roseinfer {precision}", workload, "tokens_per_s")
            rivals = {
                row["name"]: rate
                for row in served_rows(results)
                if is_rival(row["name"], precision)
                and (rate := served(results, row["name"], workload, "tokens_per_s")) is not None
            }
            measured, note = None, "no peer measured"
            if rivals:
                best = max(rivals, key=lambda name: rivals[name].median)
                measured = ratio(own, rivals[best])
                note = f"{best}, {rivals[best].median:.0f} tokens/s, is the fastest of {len(rivals)}"
            yield Requirement(
                f"{workload}, {precision}: tokens/s against the fastest peer", 1.0, True, "×", measured, note
            )


def is_rival(name: str, precision: str) -> bool:
    """Whether a row is another project's at the same precision."""
    who, _, given = name.rpartition(" ")
    return who not in ("roseinfer", "engine only") and SAME_PRECISION.get(given, given) == precision


def reason_of(results: Results, name: str, workload: str) -> str:
    """Why there is no figure of an entrant."""
    rows = [row for row in served_rows(results) if row["name"] == name and workload in row["workload"].split(", ")]
    return str(rows[0].get("error", "not measured")) if rows else "not measured"


def steady_streams(results: Results) -> Iterator[Requirement]:
    for precision in PRECISIONS:
        p99 = served(results, f"roseinfer {precision}", "W2", "steady_itl_p99_ms")
        p50 = served(results, f"roseinfer {precision}", "W2", "steady_itl_p50_ms")
        measure = f"W2 over HTTP, {precision}: ITL p99 / p50 at steady state"
        yield Requirement(measure, 1.6, False, "×", ratio(p99, p50))


def memory(results: Results) -> Iterator[Requirement]:
    """The server's peak after all its workloads, by which its whole KV pool has been written."""
    name = "roseinfer bfloat16"
    peaks = [row["peak_rss_mb"] for row in served_rows(results) if row["name"] == name and row["repeats"]]
    measured = Spread.of([max(peaks) / 1e3]) if peaks else None
    measure = "peak memory of both processes, bfloat16, 1 GiB KV pool, after all workloads"
    yield Requirement(measure, MEMORY_BUDGET_GB, False, "GB", measured)


# --- the shape of Qwen3-0.6B ----------------------------------------------------------------------------------------


def of_group(results: Results, group: str, name: str, workload: str, figure: str) -> Spread | None:
    """A figure of an entrant where it took turns with the others of its group."""
    repeats = _repeats_of_group(results, group, name, workload)
    return Spread.of([repeat[figure] for repeat in repeats]) if repeats else None


def _repeats_of_group(results: Results, group: str, name: str, workload: str) -> list[dict[str, float]]:
    for row in results.get("qwen3", {}).get("rows", ()):
        if (row["group"], row["name"], row["workload"]) == (group, name, workload):
            found: list[dict[str, float]] = row["repeats"]
            return found
    return []


def one_stream_and_eight(results: Results) -> Iterator[Requirement]:
    int4, int8, figure = "roseinfer int4", "roseinfer int8", "tokens_per_s"
    compared = (
        ("S1", "int4", int4, "llama.cpp q4_0", 1.25),
        ("S1", "int4", int4, int8, 1.5),
        ("S8", "int4", int4, "llama.cpp q4_0", 2.0),
        *(
            (load, each, f"roseinfer {each}", f"openvino {each}", 1.15)
            for load in ("S1", "S8")
            for each in ("int8", "int4")
        ),
    )
    for workload, group, own, rival, bound in compared:
        rates = [of_group(results, group, name, workload, figure) for name in (own, rival)]
        measure = f"Qwen3-0.6B's shape, {workload}, {own.split()[1]}: tokens/s against {rival}"
        yield Requirement(measure, bound, True, "×", ratio(*rates))
    repeats = _repeats_of_group(results, "int8", int8, "S1") if "roofs" in results else []
    shares = [100 * repeat[figure] * roof_s(results, repeat["roof"]) / S1.new_tokens for repeat in repeats]
    share = Spread.of(shares) if shares else None
    yield Requirement("Qwen3-0.6B's shape, S1, int8: share of its steps' roofs", 80.0, True, "%", share)


def roof_s(results: Results, bandwidth: float) -> float:
    """The least seconds of S1 in int8: the sum of its steps' roofs (`benchmarks/roofs.py`), the first of the prompt."""
    (prompt,), new = S1.prompt_lengths, S1.new_tokens
    operations = 2 * (prompt * (QWEN3_WEIGHTS - QWEN3_HEAD) + QWEN3_HEAD)  # of the prompt one row has logits
    peak: float = results["roofs"]["peak"]["int8"]
    first = max(QWEN3_WEIGHTS / bandwidth, operations / peak)
    num_read = sum(range(prompt + 1, prompt + new))  # tokens' keys and values, by all other steps
    return first + ((new - 1) * QWEN3_WEIGHTS + num_read * QWEN3_KV_BYTES) / bandwidth


def products(results: Results) -> Iterator[Requirement]:
    """Of integer products of many rows, in the type that these precisions serve with; int4 with the bound of int8."""
    for form in ("int8", "int4"):
        found = results.get("linears", {}).get(f"{form} of bfloat16, 512 rows", {}).get("share of peak")
        share = scaled(Spread(**found), 100) if found else None
        measure = f"Qwen3-0.6B's shape, {form}, products of 512 rows of bfloat16: share of the instructions' peak"
        yield Requirement(measure, 65.0, True, "%", share)


def starts(results: Results) -> Iterator[Requirement]:
    """Memory is the larger of both starts."""
    found = results.get("start", {})
    for precision, bound in (("int8", 1.25), ("int4", 0.95)):
        peaks = [
            figures["all_mb"] / 1e3
            for name, rounds in found.items()
            if name.startswith(f"{precision}, native")
            for figures in rounds
        ]
        measured = Spread.of([max(peaks)]) if peaks else None
        measure = f"Qwen3-0.6B's shape, {precision}: peak memory of all processes at start, 256 MiB of KV"
        yield Requirement(measure, bound, False, "GB", measured)
    beside = [figures["beside_mb"] for rounds in found.values() for figures in rounds]
    measure = "Qwen3-0.6B's shape: the engine's peak at start beside weights and KV pool, any precision and path"
    yield Requirement(measure, 600.0, False, "MB", Spread.of([max(beside)]) if beside else None)
    for start, bound in (("first", 10.0), ("second", 5.0)):
        rounds = found.get(f"int8, native, {start}", [])
        measured = Spread.of([figures["ready_s"] for figures in rounds]) if rounds else None
        yield Requirement(f"Qwen3-0.6B's shape, int8: {start} start until ready", bound, False, "s", measured)


def drafts(results: Results) -> Iterator[Requirement]:
    for load, bound in (("copy, 1", 1.8), *((f"chat, {streams}", 0.98) for streams in (1, 8, 64))):
        found = results.get("speculation", {}).get(load)
        measure = f"Qwen3-0.6B's shape, int8, {load} at once: tokens/s with speculation against off"
        yield Requirement(measure, bound, True, "×", Spread(**found) if found else None)


def mixed_load(results: Results) -> Iterator[Requirement]:
    """Of GPT-2 small; against steps that hold whole prompts."""
    rounds = results.get("mixed", {})
    for figure, bound, is_least, name in (
        ("p99/p50", 2.5, False, "ITL p99 / p50"),
        ("tokens_per_s", 0.92, True, "tokens/s against whole prompts"),
        ("ttft_p50_ms", 1.3, False, "TTFT p50 against whole prompts"),
    ):
        own, whole = (
            Spread.of([each[figure] for each in rounds[setting]]) if setting in rounds else None
            for setting in ("default", "whole steps")
        )
        measured = own if figure == "p99/p50" else ratio(own, whole)
        yield Requirement(f"mixed load, float32, defaults: {name}", bound, is_least, "×", measured)


def prompts(results: Results) -> Iterator[Requirement]:
    for group, rival, bound in (
        ("int8", "llama.cpp q8_0", 3.0),
        ("int4", "llama.cpp q4_0", 3.0),
        ("float32", "vllm float32", 1.1),
        ("bfloat16", "vllm bfloat16", 1.1),
    ):
        rates = [of_group(results, group, name, "L4", "prompt_tokens_per_s") for name in (f"roseinfer {group}", rival)]
        measure = f"Qwen3-0.6B's shape, L4, {group}: tokens/s of prompts against {rival}"
        yield Requirement(measure, bound, True, "×", ratio(*rates))


# --- GPU ------------------------------------------------------------------------------------------------------------


def of_gpu(results: Results, predicted: Mapping[str, Mapping[str, float]]) -> Iterator[Requirement]:
    """The table of a GPU's page; of the streams the runs after the first of each process count.

    `predicted` are the figures of the performance model by load; empty for a GPU that it does not know.
    """
    for figure, (bound, is_least, unit) in SEEDS_FIGURES.items():
        measured = stream_figure(results, SEEDS_WORKLOAD, BASE_SETTING, figure, is_first=False)
        model = predicted.get(SEEDS_WORKLOAD, {}).get(summarised(figure))
        yield Requirement(f"the posts' workload: {figure}", bound, is_least, unit, measured, predicted=model)
    for name, bound in BURST_RATES.items():
        rows = results.get("bursts", {}).get("rows", {}).get(name, ())
        rate = Spread.of([row["tokens_per_s"] for row in rows]) if rows else None
        model = predicted.get(name, {}).get("tokens_per_s")
        yield Requirement(name, bound, True, "tokens/s", rate, predicted=model)


def summarised(figure: str) -> str:
    """`tpot_p50_ms`, as `summarise` names it, for `TPOT p50`."""
    return "tokens_per_s" if figure == "tokens/s" else f"{figure.lower().replace(' ', '_')}_ms"


def stream_figure(results: Results, workload: str, setting: str, figure: str, *, is_first: bool) -> Spread | None:
    """Of the first run of each process, or of all later ones."""
    processes = results.get("streams", {}).get("workloads", {}).get(workload, {}).get(setting, ())
    runs = [run for process in processes for run in (process[:1] if is_first else process[1:])]
    values = [run[figure] for run in runs if figure in run]
    return Spread.of(values) if values else None

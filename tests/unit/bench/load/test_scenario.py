"""Scenario files: what they may say, how a mistake is told, and which load they make."""

import random
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench import options
from roseinfer.bench.load.plan import SHARED_KEY, Segment, describe, echo_of, interval_ns_of, planner_of
from roseinfer.bench.load.report import objective_of
from roseinfer.bench.load.scenario import Limits, LongShare, Phase, Scenario, apply_scenario, load_scenario
from roseinfer.bench.options import Lengths, lengths_of
from roseinfer.config.flags import Parser
from roseinfer.errors import ConfigError

ROOT = Path(__file__).parents[4]
SHIPPED = sorted((ROOT / "loadtest" / "scenarios").glob("*.yaml"))
HEAD = "description: x\nphases: [{kind: steady, users: 1, duration_s: 3}]\n"


def scenario(*phases: tuple[str, int, float], **fields: Any) -> Scenario:
    return Scenario(
        description="",
        phases=tuple(Phase(kind=kind, users=users, duration_s=s) for kind, users, s in phases),  # type: ignore[arg-type]
        **fields,
    )


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_we_ship_can_be_used(file: Path) -> None:
    read = load_scenario(file)
    assert len(read.plan(0)) > 50
    assert read.objective != Limits()


def test_each_kind_of_phase_is_shipped() -> None:
    assert {phase.kind for file in SHIPPED for phase in load_scenario(file).phases} == {"steady", "ramp", "burst"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1", "Unknown field `a`"),
        ("phases: []", "phases: Expected `array` of length >= 1"),
        ("description: x", "Missing field `phases`"),
        (
            "phases: [{kind: wave, users: 1, duration_s: 3}]",
            "phases[0].kind: Expected one of 'burst', 'ramp', 'steady'; got 'wave'",
        ),
        ("phases: [{kind: steady, users: -1, duration_s: 3}]", "phases[0].users: Expected `integer` >= 0"),
        ("phases: [{kind: steady, users: 1, seconds: 3}]", "Unknown field `phases[0].seconds`"),
        ("description: x\nphases: [{kind: steady, users: 0, duration_s: 3}]", "phases: none of them has a user"),
        (
            "description: x\nphases: [{kind: steady, users: 99999, duration_s: 80000}]",
            "phases: about 7999920000",
        ),
        (HEAD + "prompt_tokens: 9-3", "prompt_tokens: 3 is less than 9, got '9-3'"),
        (HEAD + "max_tokens: few", "max_tokens: expected a number of tokens or a range such as 16-64, got 'few'"),
        (HEAD + "max_tokens: 0", "max_tokens: Expected `integer` >= 1"),
        (HEAD + "long_prompts: {share: 2, prompt_tokens: 3, max_tokens: 3}", "long_prompts.share: Expected `number`"),
        (
            HEAD + "long_prompts: {share: 1, prompt_tokens: a, max_tokens: 3}",
            "long_prompts.prompt_tokens: expected a number",
        ),
        (HEAD + "objective: {ttft_ms: 0}", "objective.ttft_ms: Expected `number` > 0"),
        (HEAD + "endpoint: embeddings", "endpoint: Expected one of 'chat', 'completions'; got 'embeddings'"),
        ("a: b: c", "is not YAML: line 1, column 5: mapping values are not allowed here"),
        ("description: 2026-99-99", "is not YAML: month must be in 1..12"),
        ("phases: " + "[" * 2000, "is not YAML: maximum recursion depth exceeded"),
        ("max_tokens: 1\nmax_tokens: 2", "is not YAML: line 2, column 1: max_tokens comes twice"),
        ("3", "expected a mapping of fields, got 3"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_scenario(file)
    assert caught.value.param == "--scenario"
    assert caught.value.message.startswith(f"{file}")
    assert words in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_scenario(tmp_path / "a.yaml")


def test_users_come_and_go_as_the_phases_say() -> None:
    waves = scenario(("ramp", 10, 10.0), ("steady", 4, 5.0), ("ramp", 0, 4.0), ("burst", 7, 1.0))
    assert [waves.users_at(s) for s in (0, 5, 9.9, 10, 14.9, 15, 17, 19, 19.9, 20, 99)] == [
        *(0, 5, 10, 4, 4, 4, 2, 7, 7, 0, 0)
    ]
    phase = waves.phase_at(19.5)
    assert phase is not None
    assert phase.kind == "burst"
    assert waves.phase_at(20.0) is None
    assert waves.duration_s == 20


def test_the_rate_of_each_phase_is_that_of_its_users() -> None:
    """Mean counts of Poisson processes, each within five of its standard deviations."""
    plan = scenario(("steady", 20, 50.0), ("ramp", 40, 50.0), rate_per_user=2.0).plan(3)
    offsets_s = [request.offset_ns / 1e9 for request in plan]
    assert offsets_s == sorted(offsets_s)
    halves = ((0, 50, 2000), (50, 75, 1250), (75, 100, 1750))  # the ramp has 25 users on average, then 35
    for begin, end, expected in halves:
        assert sum(begin <= offset < end for offset in offsets_s) == pytest.approx(expected, abs=5 * expected**0.5)


def test_those_who_join_in_a_burst_ask_at_once() -> None:
    plan = scenario(("steady", 2, 5.0), ("burst", 12, 5.0), rate_per_user=0.1).plan(0)
    assert sum(request.offset_ns == 5_000_000_000 for request in plan) == 10
    quieter = scenario(("steady", 12, 5.0), ("burst", 2, 5.0), rate_per_user=0.1).plan(0)
    assert len({request.offset_ns for request in quieter}) == len(quieter), "no other requests are among them"


def test_a_seed_makes_one_load() -> None:
    steady = scenario(("steady", 20, 5.0), prompt_tokens="16-64", max_tokens="2-9")
    assert steady.plan(1) == steady.plan(1)
    assert steady.plan(1) != steady.plan(2)
    assert {request.max_tokens for request in steady.plan(1)} == set(range(2, 10))


def test_a_load_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no request falls into its 0\.1 s"):
        scenario(("steady", 1, 0.1), rate_per_user=0.001).plan(0)


def test_long_prompts_are_a_share_and_share_nothing() -> None:
    long = LongShare(share=0.25, prompt_tokens=500, max_tokens="3-4")
    mixed = scenario(("steady", 1, 1.0), prompt_tokens=10, shared_prefix_share=0.5, long_prompts=long)
    source = random.Random(0)
    drawn = [mixed.draw(source, 7) for _ in range(2000)]
    longs = [request for request in drawn if request.segments == (Segment(7, 500),)]
    assert len(longs) == pytest.approx(500, abs=100)
    assert {request.max_tokens for request in longs} == {3, 4}
    assert {request.segments for request in drawn if request not in longs} == {(Segment(SHARED_KEY, 5), Segment(7, 5))}


def test_lengths_of_both_forms() -> None:
    assert lengths_of("16") == Lengths(16, 16)
    assert lengths_of("16-64") == Lengths(16, 64)


def parsed(*words: str) -> Any:
    parser = Parser()
    options.add_serve(parser)
    parser.set_defaults(parser=parser)
    return parser.parse_args(list(words))


def test_bench_serve_takes_all_that_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        HEAD + "endpoint: chat\nstream_interval: 4\nrate_per_user: 20\nobjective: {ttft_ms: 5, tpot_ms: 6}\n"
    )
    arguments = parsed("--scenario", str(file), "--slo-ttft-ms", "9", "--seed", "0")
    apply_scenario(arguments)
    planned = planner_of(arguments)(arguments.seed)
    assert (arguments.chat, arguments.stream_interval) == (True, 4)
    assert objective_of(arguments.slo_ttft_ms, arguments.slo_tpot_ms) == (9e6, 6e6), "a flag is stronger than the file"
    assert describe(arguments, planned) == f"{len(planned)} requests of {file}, seed 0"
    assert interval_ns_of(arguments, planned) == pytest.approx(50e6, rel=0.5)
    assert echo_of(arguments)["scenario"]["phases"] == [{"kind": "steady", "users": 1, "duration_s": 3.0}]


def test_the_echo_has_every_flag_as_plain_data() -> None:
    echoed = echo_of(parsed("--prompt-tokens", "16-64", "--rate", "3.5", "--json", "b"))
    assert (echoed["prompt_tokens"], echoed["max_tokens"], echoed["rate"], echoed["json"]) == ("16-64", "128", 3.5, "b")


@pytest.mark.parametrize("flag", ["--num-requests 3", "--max-tokens 9", "--chat", "--no-ignore-eos", "--duration 3"])
def test_a_flag_that_says_the_same_is_refused(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(HEAD)
    arguments = parsed("--scenario", str(file), *flag.split())
    with pytest.raises(ConfigError, match="has no meaning beside --scenario") as caught:
        apply_scenario(arguments)
    assert caught.value.param == flag.split(maxsplit=1)[0].replace("--no-", "--")

"""`roseinfer bench compare` on result files that are made up, and the mistakes that it tells."""

import json
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.compare import compare as compare_runs
from roseinfer.bench.compare.results import Measured, describe_differences, differences, in_turn
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load import serve
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.plan import PlannedRequest
from roseinfer.bench.load.report import ServeRun, Verdict
from roseinfer.cli import main as cli

NUM_RUNS = 8
LOAD = {"rate": 20.0, "prompt_tokens": "16", "max_tokens": "32"}


def result(began_s: float, tpot_ms: float, **changes: Any) -> dict[str, Any]:
    """What `bench serve --json` writes of a run of two requests of 33 tokens."""
    requests = []
    for index in range(2):
        sent_s = began_s + index * 0.05
        first_s = sent_s + 0.01
        requests.append(
            {
                "intended_s": sent_s,
                "sent_s": sent_s,
                "end_s": first_s + 32 * tpot_ms / 1e3,
                "num_tokens": 33,
                "error": changes.get("error", ""),
            }
        )
    figures = {"unit": "ms", "p50": tpot_ms, "p95": tpot_ms * 1.2, "p99": tpot_ms * 1.4}
    return {
        "format": "roseinfer bench serve 1",
        "settings": {"url": "http://127.0.0.1:8000", "model": "tiny", "arguments": LOAD | changes.get("arguments", {})},
        "verdict": {"is_valid": changes.get("is_valid", True)},
        "distributions": {"TPOT": figures, "TTFT": figures | {"p50": 10.0, "p95": 12.0, "p99": 13.0}},
        "requests": requests,
    }


def write(folder: Path, *results: dict[str, Any]) -> Path:
    folder.mkdir()
    for index, content in enumerate(results):
        (folder / f"{index:03}.json").write_text(json.dumps(content))
    return folder


def tpot_ms(side: int, index: int, effect: float) -> float:
    """Runs differ by up to a percent."""
    return 5.0 * (1 + 0.01 * ((7 * index + 3 * side) % 5) / 4) * (1 + effect * side)


def both(folder: Path, effect: float = 0.0, gap_s: float = 10.0, **changes: Any) -> tuple[str, str]:
    """A and B in turn, or one after the other when `gap_s` is large; `changes` are of B."""
    paths = []
    for side in (0, 1):
        runs = []
        for index in range(NUM_RUNS):
            slot = 2 * index + (side if index % 2 == 0 else 1 - side)
            runs.append(
                result(slot * 10.0 + side * (gap_s - 10.0), tpot_ms(side, index, effect), **(changes if side else {}))
            )
        paths.append(str(write(folder / "ab"[side], *runs)))
    return paths[0], paths[1]


def compare(*words: str) -> int:
    return cli.main(["bench", "compare", *words])


def test_a_regression_is_reported_with_its_size_and_fails_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = both(tmp_path, effect=0.05)
    report = tmp_path / "report.json"
    assert compare(a, b, "--json", str(report)) == 0, "a gate is asked for"
    lines = capsys.readouterr().out.splitlines()
    assert "Runs: 8 of A and 8 of B, in turn" in lines
    [row] = [line.split() for line in lines if line.startswith("TPOT p50")]
    assert (row[5], row[-1]) == ("+5.0%", "worse")
    assert lines[-1].startswith("Verdict: worse (3 noise, ")
    content = json.loads(report.read_text())
    assert (content["format"], content["outcome"]) == ("roseinfer bench compare 1", "worse")
    by_metric = {finding["metric"]: finding for finding in content["findings"]}
    assert by_metric["TPOT p50"]["effect"] == pytest.approx(0.05, abs=0.003)
    assert 0 < by_metric["TPOT p50"]["low"] < 0.05 < by_metric["TPOT p50"]["high"] < 0.1
    assert by_metric["TTFT p50"]["outcome"] == "noise"
    assert by_metric["Throughput"]["outcome"] == "worse"
    assert compare(a, b, "--fail-on", "worse") == 1
    assert compare(a, b, "--fail-on", "void") == 0
    assert compare(b, a, "--fail-on", "worse") == 0, "the other way it is better"
    assert capsys.readouterr().out.splitlines()[-1].startswith("Verdict: better ")


def test_equal_sides_are_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*both(tmp_path), "--fail-on", "worse", "--fail-on", "void") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Verdict: noise (7 noise)"


def test_sides_that_did_not_take_turns_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*both(tmp_path, effect=0.3, gap_s=1000.0)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Runs: 8 of A and 8 of B, NOT in turn: a machine that changed in between looks like this" in lines
    assert lines[-1].startswith("Verdict: worse")


def test_results_of_different_loads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = both(tmp_path, arguments={"max_tokens": "64", "stream_interval": 8})
    assert compare(a, b) == cli.EXIT_USAGE
    told_words = capsys.readouterr().err
    assert (
        "max_tokens is '32' and '64'; stream_interval is None and 8; name with --varied what was varied" in told_words
    )
    assert compare(a, b, "--varied", "max_tokens") == cli.EXIT_USAGE
    assert "max_tokens" not in capsys.readouterr().err
    assert compare(a, b, "--varied", "max_tokens", "--varied", "stream_interval") == 0
    assert "Varied: max_tokens: '32' and '64', stream_interval: None and 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_valid": False}, "Void: B, run 1: the load generator did not keep its schedule"),
        (
            {"error": "429"},
            "Void: B, run 1: 2 of 2 requests failed, and the latencies of the rest are those of a smaller load",
        ),
    ],
)
def test_runs_that_cannot_be_believed_make_it_void(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    a, b = both(tmp_path, effect=0.2, **changes)
    assert compare(a, b, "--fail-on", "worse") == 0
    assert words in capsys.readouterr().out.splitlines()
    assert compare(a, b, "--fail-on", "void") == 1


def test_too_few_runs_are_void(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = both(tmp_path)
    assert compare(str(Path(a) / "000.json"), b) == 0
    assert "Void: at least 6 runs of each side are needed" in capsys.readouterr().out.splitlines()


def test_runs_of_bench_streaming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file is all runs of a process; the configuration is held against the other's too."""

    def streaming(factor: float, **scheduler: int) -> dict[str, Any]:
        runs = [
            {
                "num_rejected": 0,
                "throughput_tokens_per_s": 900.0 + index % 3,
                "distributions": {
                    "ITL": {"unit": "ms", **dict.fromkeys(("p50", "p95", "p99"), factor * (9 + index % 2))}
                },
            }
            for index in range(6)
        ]
        settings = {"Model": "tiny", "arguments": {"num_requests": 64}, "config": {"scheduler": scheduler}}
        return {"settings": settings, "runs": runs}

    for name, content in (("a", streaming(1.0, max_seqs=8)), ("b", streaming(1.5, max_seqs=9))):
        (tmp_path / name).write_text(json.dumps(content))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert compare(a, b) == cli.EXIT_USAGE
    assert "scheduler.max_seqs is 8 and 9" in capsys.readouterr().err
    assert compare(a, b, "--varied", "scheduler.max_seqs", "--fail-on", "worse") == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "A B: needs two: URLs, or results; or --a FLAGS and --b FLAGS"),
        ("http://127.0.0.1:9", "A B: needs two URLs"),
        ("http://127.0.0.1:9 {folder}", "A B: needs two URLs"),
        ("--a=", "--a: --a and --b belong together, without anything else"),
        ("--a= --b=x http://127.0.0.1:9", "--a: --a and --b belong together, without anything else"),
        ("http://127.0.0.1:9 http://127.0.0.1:7 --both x", "--both: needs --a and --b"),
        ("http://127.0.0.1:9 http://127.0.0.1:7", "--url: nothing answers at http://127.0.0.1:9/v1/models"),
        ("127.0.0.1:9/v1 127.0.0.1:7", "--url: nothing answers at http://127.0.0.1:9/v1/models"),
        ("http://127.0.0.1:9 http://127.0.0.1:7 --duration 5", "--duration: needs --rate or --interval-ms"),
        ("http://one:9 http://ONE:9/", "A and B: are the same; --equal-sides compares servers with themselves"),
        ("one:9 http://ONE:9/v1/", "A and B: are the same; --equal-sides compares servers with themselves"),
        ("--a='--x  1' --b='--x 1'", "--a and --b: are the same; --equal-sides compares servers with themselves"),
        ("{folder} {folder}/../{name}", "A and B: are the same; --equal-sides compares"),
        ("{folder} {folder} --equal-sides", "--equal-sides: needs servers"),
        ("http://one:9 http://other:9 --equal-sides", "--equal-sides: needs A and B to be the same, and they differ"),
        ("--a=--x --b=--y --equal-sides", "--equal-sides: needs A and B to be the same, and they differ"),
        ("http://127.0.0.1:9 http://127.0.0.1:9 --equal-sides", "--url: nothing answers at http://127.0.0.1:9/v1"),
        ("{folder}/none {folder}", "A: {folder}/none cannot be read: No such file"),
        (f"{'x' * 300} {{folder}}", "xxx cannot be read: File name too long"),
        ("{folder} {folder}/none", "A: {folder} holds no result"),
        ("{folder}/text {folder}", "A: {folder}/text is not JSON"),
        ("{folder}/other {folder}", "A: {folder}/other is no result of roseinfer bench"),
        ("{folder}/deep {folder}", "A: {folder}/deep is not JSON"),
        ("{folder}/timeless {folder}", "A: {folder}/timeless is no result of roseinfer bench"),
        ("{folder} {folder}/none --rate 5", "--rate: has no meaning for results: their runs have been made"),
        ("{folder} {folder}/none --keep x", "--keep: has no meaning for results"),
        ('--a "--model \'x" --b=', "--a: No closing quotation"),
        ('--a= --b "--model \'x"', "--b: No closing quotation"),
        ("--a --port=x --b=", "argument"),
        ("a b --rounds 3", "--rounds: "),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    (tmp_path / "text").write_text("a")
    (tmp_path / "other").write_text('{"settings": {}}')
    (tmp_path / "deep").write_text("[" * 100_000)
    timeless = result(0.0, 5.0)
    timeless["requests"] = [request | {"end_s": 0.0, "sent_s": 0.0} for request in timeless["requests"]]
    (tmp_path / "timeless").write_text(json.dumps(timeless))
    assert compare(*shlex.split(command.format(folder=tmp_path, name=tmp_path.name))) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert words.format(folder=tmp_path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("takes_salt", [True, False])
def test_a_run_that_is_made_again_has_the_prompts_of_its_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], takes_salt: bool
) -> None:
    """The generator was late in the first run of B. Without salts the first round's prompts are new ones, too."""
    sent: list[tuple[str, int]] = []

    def send(turn: Namespace, planned: Sequence[PlannedRequest], *rest: Any) -> ServeRun:
        label = rest[-1]
        is_late = label == "round 1, B" and label not in [told for told, _ in sent]
        sent.append((label, turn.seed))
        began = len(sent) * 10**9
        seen = [
            Observed(
                request_id=str(index),
                intended_ns=began,
                sent_ns=began,
                token_ns=[began + 10**6, began + 2 * 10**6],
                token_counts=[1, 1],
                end_ns=began + 3 * 10**6,
            )
            for index in range(len(planned))
        ]
        return ServeRun(seen, Verdict(10.0 if is_late else 0.0, 1.0, 0.1), None)

    monkeypatch.setattr(compare_runs, "send", send)
    asked: list[str] = []

    def find_endpoint(url: str, _: str) -> Endpoint:
        asked.append(url)
        return Endpoint(url, "", "tiny", 64, 100, takes_salt)

    monkeypatch.setattr(serve, "find_endpoint", find_endpoint)
    assert compare("http://one:9", "http://one:9", "--equal-sides", "--rounds", "6", "--num-requests", "3") == 0
    assert asked == ["http://one:9"] * 2, "each side once, whatever the number of rounds"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Verdict: noise ")
    assert "B: http://one:9, equal to A" in lines
    runs = [(label, seed) for label, seed in sent if label != "warm-up"]
    assert [label for label, _ in runs[:4]] == ["round 1, A", "round 1, B", "round 1, B", "round 2, B"]
    first = runs[0][1]
    assert [seed - first for _, seed in runs] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (first == 0) == takes_salt, "but for once in a thousand million runs"
    [load] = [line for line in lines if line.startswith("Load: ")]
    assert load.endswith(f", seed {first}")


def test_differences_are_named_and_a_long_list_is_cut() -> None:
    a, b = {f"n{index}": index for index in range(10)}, {"n0": 0}
    assert differences(a, a) == {}
    assert list(differences(a, b, varied=["n1"])) == [f"n{index}" for index in range(2, 10)]
    assert describe_differences(differences(a, b)).endswith("n8 is 8 and None; and 1 more")


def test_pairs_are_neighbours_in_time() -> None:
    def runs(*began_s: float) -> list[Measured]:
        return [Measured({}, began) for began in began_s]

    pairs = in_turn(runs(0, 3, 4), runs(1, 2, 5))
    assert pairs is not None
    assert [(one.began_s, other.began_s) for one, other in pairs] == [(0, 1), (3, 2), (4, 5)]
    assert in_turn(runs(0, 1), runs(2, 3)) is None
    assert in_turn(runs(0, 1), runs(0, 1)) is None, "clocks that say nothing"
    assert in_turn(runs(0), runs(1, 2)) is None

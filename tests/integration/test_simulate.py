"""`roseinfer bench simulate` and `bench replay --simulate` from the command line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer.cli.main import EXIT_USAGE, main
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.recorder.recording import Recording
from tests.bench_reports import report_of, value

LOAD = "--rate 300 --num-requests 120 --prompt-tokens 4-40 --max-tokens 2-20"


def p99_ms(lines: list[str], name: str) -> float:
    return float(value(lines, f"{name} p50/p95/p99").split()[0].split("/")[-1])


def test_one_seed_is_one_decision_log_in_every_process(tmp_path: Path) -> None:
    """Byte for byte, whatever Python's own hash seed is."""
    logs = []
    for index, (hash_seed, seed) in enumerate((("1", 5), ("2", 5), ("1", 6))):
        file = tmp_path / f"log-{index}"
        command = f"-m roseinfer bench simulate {LOAD} --seed {seed} --decision-log {file} --cache.num-blocks 64"
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, *shlex.split(command)], check=True, env=environment, capture_output=True)
        logs.append(file.read_bytes())
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]
    lines = [json.loads(line) for line in logs[0].splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert sorted(name for line in lines for name in line.get("admitted", [])) == sorted(f"r{i}" for i in range(120))


def test_the_report_says_what_was_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = report_of(
        capsys, f"simulate {LOAD} --scheduler.max-num-seqs 9 --slo-tpot-ms 100 --json {tmp_path / 'result.json'}"
    )
    assert lines[0] == "=== simulated benchmark ==="
    assert value(lines, "Load").startswith("120 requests at 300 a second (Poisson), 4-40 prompt and 2-20 output tokens")
    assert value(lines, "Limits").startswith("9 rows, 9 active, ")
    assert value(lines, "Requests") == "120 (120 complete, 0 aborted as planned, 0 failed)"
    assert "the default, of no machine in particular" in value(lines, "Cost model")
    assert value(lines, "Goodput (TPOT <= 100 ms)").endswith("120 of 120 (100.0%)")
    assert not [line for line in lines if line.startswith(("Client submit lag", "Load generator"))], "nothing was sent"
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["verdict"] is None
    assert len(content["requests"]) == 120


def test_options_of_the_scheduler_change_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    """A long prompt holds the others up for as many tokens as one step may read."""
    load = "simulate --num-requests 16 --max-tokens 60 --long-prompt-tokens 500 --long-at 0.1"
    whole, cut = (report_of(capsys, f"{load} --scheduler.max-prefill-tokens {limit}") for limit in ("512", "16"))
    assert p99_ms(cut, "ITL") < p99_ms(whole, "ITL") / 2
    free = report_of(capsys, f"{load} --without prefill_of_others")
    assert p99_ms(free, "ITL") < p99_ms(cut, "ITL")
    assert value(free, "Without") == "prefill_of_others"


def test_injected_delays_are_in_its_recording_under_their_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.npz"
    load = f"simulate --num-requests 8 --max-tokens 60 --inject gc:25:80 --inject h2d_copy:31:50 --recording {file}"
    report_of(capsys, load)
    slow = [gap.cause for gap in gaps_of(Recording.load(file)) if gap.is_slow]
    assert set(slow) == {Cause.GC, Cause.H2D_COPY}
    report_of(capsys, f"{load} --without gc")
    assert {gap.cause for gap in gaps_of(Recording.load(file)) if gap.is_slow} == {Cause.H2D_COPY}


def test_a_recording_is_replayed_with_its_own_costs_and_limits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.npz"
    report_of(
        capsys,
        f"simulate {LOAD} --shared-prefix-share 0.5 --prompt-tokens 40-90 --scheduler.max-num-seqs 7 "
        f"--cache.num-blocks 70 --recording {file}",
    )
    lines = report_of(capsys, f"replay --simulate {file}")
    assert value(lines, "Limits").startswith("7 rows, 7 active, ")
    assert re.search(r"; from \d+ steps, median error 0.0%", value(lines, "Cost model"))
    assert re.search(r"; [1-9]\d+ prompt tokens had been seen before in a prefix", value(lines, "Load"))
    compared = lines[lines.index("--- recorded -> replayed ---") + 1 :]
    assert [line.split()[0] for line in compared] == ["TTFT", "TPOT", "ITL", "Latency"]
    for line in compared:
        found = re.fullmatch(r".+ p50/p95/p99: (\S+) -> (\S+) ms(/token)?", line)
        assert found
        recorded, replayed = (list(map(float, figures.split("/"))) for figures in found.groups()[:2])
        assert replayed == pytest.approx(recorded, rel=0.01), line
    lines = report_of(capsys, f"replay --simulate {file} --scheduler.max-num-seqs 3 --cost-model default")
    assert value(lines, "Limits").startswith("3 rows, 3 active, "), "a flag is stronger than the recording"
    assert "the default" in value(lines, "Cost model")
    lines = report_of(capsys, f"simulate --trace {file}")
    assert value(lines, "Limits").startswith("7 rows"), "as a load, too, it brings its costs and limits"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("simulate --inject decode:1:1", "--inject: expected one of gc, "),
        ("simulate --inject gc:0:1", "--inject: "),
        ("simulate --inject gc", "--inject: "),
        ("simulate --without decode", "--without: invalid choice"),
        ("simulate --cost-model none", "recording: none cannot be read"),
        ("simulate --cache.num-blocks 3", "cache.num_blocks"),
        ("simulate --model.max-model-len 20", "model.max_model_len"),
        ("simulate --trace none", "--trace: none cannot be read"),
        ("simulate --decision-log no/such/file", "--decision-log: no/such/file cannot be written"),
        ("simulate --recording no/such/file", "--recording: no/such/file cannot be written"),
        ("replay --simulate none", "recording: none cannot be read"),
        ("replay", "the following arguments are required: RECORDING"),
        ("replay none --decision-log x", "--decision-log: needs --simulate"),
        ("replay none --scheduler.max-num-seqs 3", "--scheduler.max-num-seqs: needs --simulate: the server has"),
    ],
)
def test_bad_input_gets_one_sentence(
    command: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *shlex.split(command)]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1


def test_a_recording_with_too_few_steps_is_no_cost_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report_of(capsys, f"simulate --num-requests 1 --max-tokens 3 --recording {tmp_path / 'a.npz'}")
    assert main(["bench", "replay", "--simulate", str(tmp_path / "a.npz")]) == EXIT_USAGE
    assert "holds 3 undisturbed steps and a cost model needs 16" in capsys.readouterr().err

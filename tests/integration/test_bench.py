"""The benchmarks from the command line: the seeds' commands print the seeds' reports."""

import json
import re
import shlex
from pathlib import Path

import pytest

from roseinfer.cli.main import main
from tests.bench_reports import report_of, value
from tests.integration.fake_llm import use_fake_engine, write_tokenizer

HEADER = [
    *("=== streaming benchmark ===", "Model", "Device", "Pretok", "Tokenize workers", "Stream interval"),
    *("Paged attention", "CUDA Graph", "NVTX", "Requests", "Prompt tokens (total)", "Completion tokens (total)"),
    *("Submit wall", "Submit interval/schedule"),
]
POOLS = [
    *("add_request latency", "Tokenize", "Queue wait (post-tok)", "Prefill->first token", "TTFT", "TPOT", "ITL"),
    *("Latency", "Throughput (completion,total)"),
]


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    use_fake_engine(monkeypatch, tmp_path)


def names(lines: list[str]) -> list[str]:
    """What stands before the value of each line."""
    return [re.split(r" p50|: ", line)[0] for line in lines]


def test_the_seeds_command_prints_the_seeds_report(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(
        capsys,
        "streaming --prompt Hello --pretok --tokenize-workers 0 --stream-interval 8 --num-requests 6 --warmup-runs 1 "
        "--repeat-runs 1 --submit-interval-ms 2 --submit-schedule absolute --max-batch-size 6 "
        "--prefill-max-batch-size 6 --max-new-tokens 10 --no-stop-on-eos --no-prefix-cache --device cpu",
    )
    assert lines[0] == "=== warmup 1/1 ==="
    end = lines.index("--- beyond the seeds' report ---")
    assert names(lines[1:end]) == [*HEADER, "Submit lag", *POOLS]
    assert value(lines, "Requests") == "6"
    assert value(lines, "Prompt tokens (total)") == "30"
    assert value(lines, "Completion tokens (total)") == "60"
    assert value(lines, "Submit interval/schedule") == "2.000 ms / absolute"
    assert (value(lines, "Pretok"), value(lines, "Stream interval")) == ("True", "8")
    assert value(lines, "Tokenize p50/p95/p99") == "0.00/0.00/0.00 ms"
    assert value(lines, "Prefix cache") == "0 of 0 prompt tokens hit", "nothing was looked up"
    assert float(value(lines, "Throughput (completion,total)").split()[0]) > 0
    for line in lines[lines.index("Submit interval/schedule: 2.000 ms / absolute") + 1 : end - 1]:
        assert re.fullmatch(r".+ p50/p95/p99: \d+\.\d\d/\d+\.\d\d/\d+\.\d\d ms(/token)?", line), line


@pytest.mark.parametrize("flags", ["--submit-interval-ms 0", "--submit-interval-ms 1 --submit-schedule relative"])
def test_submit_lag_needs_an_absolute_schedule(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(capsys, f"streaming --num-requests 3 --max-new-tokens 3 --warmup-runs 0 {flags}")
    assert names(lines[: lines.index("--- beyond the seeds' report ---")]) == [*HEADER, *POOLS]


def test_one_token_each_has_no_tpot_and_no_itl(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(capsys, "streaming --num-requests 3 --max-new-tokens 1 --warmup-runs 0")
    assert not {"TPOT", "ITL"} & set(names(lines))
    assert value(lines, "Completion tokens (total)") == "3"


def test_repeats_are_labelled_and_their_spread_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    lines = report_of(
        capsys,
        f"streaming --num-requests 4 --max-new-tokens 4 --warmup-runs 2 --repeat-runs 3 --no-stop-on-eos --json {file}",
    )
    labels = [line for line in lines if re.fullmatch(r"=== (warmup|run) .*===", line)]
    assert labels == ["=== warmup 1/2 ===", "=== warmup 2/2 ===", *(f"=== run {i}/3 ===" for i in (1, 2, 3))]
    assert "=== 3 runs; a difference within the spread is noise ===" in lines
    assert re.fullmatch(r"(\S+ / ){2}\S+ tokens/s \(avg \S+, spread \S+ %\)", value(lines, "Throughput"))
    content = json.loads(file.read_text())
    assert [run["num_completion_tokens"] for run in content["runs"]] == [16] * 3
    assert content["settings"]["config"]["scheduler"]["max_num_seqs"] == 8
    assert content["settings"]["arguments"]["repeat_runs"] == 3
    assert "Flush gap (piece to piece)" in content["runs"][0]["distributions"]


@pytest.mark.parametrize(("flag", "hits_again"), [("", False), ("--no-reset-prefix-cache", True)])
def test_a_repeat_begins_with_an_empty_prefix_cache(
    flag: str, hits_again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "'a prompt of several blocks'"
    lines = report_of(capsys, f"streaming --prompt {prompt} --num-requests 1 --max-new-tokens 2 --repeat-runs 2 {flag}")
    hits = [int(line.split()[2]) for line in lines if line.startswith("Prefix cache: ")]
    assert [hit > 0 for hit in hits] == [hits_again, hits_again]


def test_prompts_mix_lengths_and_refused_requests_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(
        capsys,
        "streaming --prompt ab --prompt-repeats 1,4 --unique-prompts --num-requests 4 --max-new-tokens 2 "
        "--warmup-runs 0 --no-stop-on-eos",
    )
    assert value(lines, "Prompt tokens (total)") == str(2 * (len("ab #0") + len("ab ab ab ab #1")))
    lines = report_of(
        capsys,
        "streaming --num-requests 20 --max-new-tokens 60 --max-inflight-requests 1 --warmup-runs 0 --no-stop-on-eos",
    )
    refused = int(value(lines, "Rejected requests"))
    assert refused > 0
    assert value(lines, "Completion tokens (total)") == str((20 - refused) * 60)
    assert "Reject latency" in names(lines)


def test_tokenize_workers_move_tokenising_off_the_submission(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(capsys, "streaming --num-requests 5 --max-new-tokens 2 --tokenize-workers 2 --warmup-runs 0")
    assert value(lines, "Tokenize workers") == "2"
    assert "Tokenize" in names(lines)


def test_the_report_names_a_cache_that_may_be_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench streaming --num-requests 8 --max-new-tokens 40 --warmup-runs 0 --no-stop-on-eos"
    assert main([*shlex.split(command), "--cache.num-blocks", "20"]) == 0
    out, err = capsys.readouterr()
    assert "the workload may take 49 KV blocks and the cache has 20" in err
    assert "Completion tokens (total): 320\n" in out
    assert int(value(out.splitlines(), "Preemptions")) > 0


def test_cuda_graph_is_not_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *shlex.split("streaming --num-requests 1 --max-new-tokens 1 --paged-attn --cuda-graph")]) == 0
    out, err = capsys.readouterr()
    assert "CUDA Graph: False\n" in out
    assert "Paged attention: True\n" in out
    assert err.count("warning: --cuda-graph") == 1


@pytest.mark.parametrize(
    ("flags", "expected"), [("", "off"), ("--cuda-graph", "startup"), ("--runner.cuda-graphs lazy", "lazy")]
)
def test_without_the_flag_no_graph_is_captured(
    flags: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    report_of(capsys, f"streaming --num-requests 1 --max-new-tokens 1 --warmup-runs 0 --json {file} {flags}")
    assert json.loads(file.read_text())["settings"]["config"]["runner"]["cuda_graphs"] == expected


def test_scheduler_online_has_latency(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(
        capsys, "scheduler --prompt Hello --num-requests 2 --max-new-tokens 4 --mode online --no-stop-on-eos"
    )
    assert names(lines)[-7:] == (
        ["Prefill elapsed", "Decode elapsed", "Throughput (decode)", "Throughput (total)", "TTFT", "TPOT", "Latency"]
    )
    assert re.fullmatch(r"\d+\.\d\d/\d+\.\d\d ms/token", value(lines, "TPOT p50/mean"))
    assert value(lines, "Completion tokens (total)") == "8"


def test_scheduler_offline_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(
        capsys, "scheduler --num-requests 3 --max-new-tokens 4 --mode offline --repeat-runs 2 --no-stop-on-eos"
    )
    assert lines.count("Mode: offline") == 2
    assert not {"TTFT", "TPOT", "ITL", "Latency"} & {name.split()[0] for name in names(lines)}
    assert lines.count("Completion tokens (total): 12") == 2


def test_a_prompt_that_does_not_fit_ends_the_benchmark_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "streaming", "--num-requests", "1", "--max-new-tokens", "500", "--warmup-runs", "0"]) == 2
    assert capsys.readouterr().err.startswith("roseinfer: max_tokens: ")


def test_a_json_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "streaming", "--num-requests", "1", "--json", str(tmp_path / "no" / "file")]) == 2
    assert "roseinfer: --json: " in capsys.readouterr().err


def test_the_embedded_model_through_an_engine_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real engine, in its own process
    lines = report_of(
        capsys,
        "streaming --pretok --num-requests 4 --submit-interval-ms 5 --max-new-tokens 8 --no-stop-on-eos "
        "--runner.num-threads 1",
    )
    assert "1 thread, " in value(lines, "Host")
    assert value(lines, "Model") == "roseinfer/demo"
    assert "process transport" in value(lines, "Engine")
    assert value(lines, "Completion tokens (total)") == "32"

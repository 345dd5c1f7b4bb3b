"""`roseinfer bench serve` against a real server: what it prints, what it keeps, and when it does not believe itself."""

import argparse
import json
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.load import serve
from roseinfer.bench.load.client import Pacer
from roseinfer.bench.load.launcher import free_port
from roseinfer.cli import commands
from roseinfer.cli import main as cli
from roseinfer.config.sources import LoadedConfig
from roseinfer.observe.recorder.recording import Recording
from tests.bench_reports import value
from tests.e2e.conftest import StartServer
from tests.e2e.server import Server


def bench(server: Server, command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = cli.main(["bench", "serve", "--url", server.url, *shlex.split(command)])
    return code, capsys.readouterr().out.splitlines()


def test_one_long_prompt_among_short_streams(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = server.wait_metrics(roseinfer_num_requests_running=0)
    code, lines = bench(
        server,
        f"--num-requests 8 --max-tokens 12 --long-prompt-tokens 500 --num-long 1 --long-at 0.05 "
        f"--json {tmp_path / 'result.json'} --slo-ttft-ms 60000",
        capsys,
    )
    assert code == 0
    assert value(lines, "Requests") == "9 (9 complete, 0 aborted as planned, 0 failed)"
    assert value(lines, "Prompt tokens (total)") == str(8 * 16 + 500), "prompts have exactly the lengths asked for"
    assert value(lines, "Completion tokens (total)") == str(9 * 12)
    assert value(lines, "Goodput (TTFT <= 60000 ms)").endswith("9 of 9 (100.0%)")
    assert "a burst has no interval" in value(lines, "Load generator")
    for name in ("Client submit lag", "TTFT", "TPOT", "ITL", "Latency"):
        assert any(re.match(rf"{name} p50/p95/p99: [\d.]+/[\d.]+/[\d.]+ ms", line) for line in lines), name
    content = json.loads((tmp_path / "result.json").read_text())
    assert len(content["requests"]) == 9
    for request in content["requests"]:
        assert request["num_tokens"] == sum(request["token_counts"]) == 12
        assert request["sent_s"] <= request["first_token_s"] <= request["end_s"]
        named_s = sum(request["ledger"]["parts_ns"].values()) / 1e9
        assert named_s + request["residual_s"] == pytest.approx(request["end_s"] - request["sent_s"])
    assert "of the time" in value(lines, "network and client p50/p95/p99")
    lag = "roseinfer_client_submit_lag_seconds_count"
    assert server.wait_metrics(roseinfer_num_requests_running=0)[lag] - before[lag] == 9, "the server was told when"


def test_the_same_load_again_finds_none_of_its_prompts_in_the_prefix_cache(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whereas the prompts of one run share what they have in common."""
    hits = "roseinfer_prefix_cache_hits_total"
    before = server.wait_metrics(roseinfer_num_requests_running=0)[hits]
    for _ in range(2):
        bench(server, "--num-requests 1 --prompt-tokens 64 --max-tokens 1", capsys)
    assert server.wait_metrics(roseinfer_num_requests_running=0)[hits] == before
    _, lines = bench(
        server, "--interval-ms 300 --num-requests 2 --prompt-tokens 64 --shared-prefix-share 0.5 --max-tokens 1", capsys
    )
    assert value(lines, "Cached prompt tokens (total)") == "32 (25.0%)", "the report says what the server counts"
    assert server.wait_metrics(roseinfer_num_requests_running=0)[hits] == before + 32


def test_a_starved_generator_does_not_believe_itself(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pacer oversleeps by far more than the interval."""

    def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
        return serve.run(arguments, loaded, Pacer(sleep=lambda seconds: time.sleep(seconds + 0.2)))

    monkeypatch.setattr(commands, "_load", run)
    code, lines = bench(server, "--num-requests 4 --interval-ms 50 --max-tokens 2", capsys)
    assert code == serve.EXIT_INVALID
    assert value(lines, "Load generator").startswith("INVALID")
    assert not [line for line in lines if line.startswith(("TTFT", "TPOT", "ITL", "Throughput"))]


def test_a_burst_that_the_server_refuses_in_part_is_reported(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = bench(start_server("--server.max-inflight", "2"), "--num-requests 6 --max-tokens 900", capsys)
    assert code == 0
    complete, failed = (int(number) for number in re.findall(r"(\d+) (?:complete|failed)", value(lines, "Requests")))
    assert complete + failed == 6
    assert failed > 0
    assert value(lines, "Completion tokens (total)") == str(complete * 900)
    assert re.match(rf"{failed} x 429: .*2 HTTP requests are being served already", value(lines, "Error"))


def test_the_servers_recording_is_kept_and_can_be_asked_again(
    start_server: StartServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Joined by request id: each request of the result is in the recording, on the same clock."""
    ops_port = free_port()
    server = start_server("--ops-port", str(ops_port))
    assert server.post("/v1/completions", {"prompt": "another", "max_tokens": 2})[0] == 200
    code, _ = bench(
        server,
        f"--num-requests 6 --max-tokens 20 --prompt-tokens 40 --shared-prefix-share 0.8 --json {tmp_path / 'a.json'} "
        f"--ops-url http://127.0.0.1:{ops_port} --recording {tmp_path / 'a.npz'}",
        capsys,
    )
    assert code == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["recording"] == "a.npz"
    recorded = {request.request_id: request for request in Recording.load(tmp_path / "a.npz").requests}
    assert recorded.keys() == {request["request_id"] for request in content["requests"]}, "and nothing from before"
    for request in content["requests"]:
        record = recorded[request["request_id"]]
        assert request["intended_s"] < record.token_ns[0] / 1e9 < request["first_token_s"]
        assert len(record.prefix_digests) == 2, "of 40 tokens in blocks of 16"
    assert len({record.prefix_digests[0] for record in recorded.values()}) == 1
    assert cli.main(["bench", "replay", "--simulate", str(tmp_path / "a.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert value(lines, "Requests") == "6 (6 complete, 0 aborted as planned, 0 failed)"
    assert value(lines, "Completion tokens (total)") == "120"


def test_pieces_of_several_tokens_are_counted_by_their_tokens(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _ = bench(
        server, f"--num-requests 1 --max-tokens 17 --stream-interval 8 --json {tmp_path / 'result.json'}", capsys
    )
    assert code == 0
    [request] = json.loads((tmp_path / "result.json").read_text())["requests"]
    assert request["num_tokens"] == 17
    assert len(request["token_times_s"]) < 17


def test_chat_and_a_trace_with_a_key(
    start_server: StartServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("# ours\nsecret-key\n")
    server = start_server("--api-key-file", str(tmp_path / "keys"))
    trace = [
        {"offset_s": 0.0, "prompt_tokens": 3, "max_tokens": 2},
        {"offset_s": 0.01, "prompt_tokens": 5, "max_tokens": 4},
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, trace)))
    flags = f"--trace {tmp_path / 'trace'} --max-lag-share 1 --json {tmp_path / 'result.json'}"
    assert cli.main(["bench", "serve", "--url", server.url, *shlex.split(flags)]) == cli.EXIT_USAGE
    assert "answers 401" in capsys.readouterr().err
    for chat in ("", "--chat"):
        bench(server, f"{flags} --api-key-file {tmp_path / 'keys'} {chat}", capsys)
        requests: list[dict[str, Any]] = json.loads((tmp_path / "result.json").read_text())["requests"]
        assert [request["num_tokens"] for request in requests] == [2, 4]
        lengths = [request["num_prompt_tokens"] for request in requests]
        assert lengths[0] > 3 if chat else lengths == [3, 5], "a chat template adds its own tokens"


def test_a_sweep_has_a_row_for_each_rate_and_a_knee(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = (
        f"--sweep 20,40 --num-requests 5 --max-tokens 3 --slo-ttft-ms 60000 --max-lag-share 1 --json {tmp_path / 'a'}"
    )
    _, lines = bench(server, flags, capsys)
    content = json.loads((tmp_path / "a").read_text())
    rows = [line.split() for line in lines if line.strip().startswith(("20 ", "40 "))]
    assert [row[:2] for row in rows] == [[f"{point['rate']:g}", "5"] for point in content["points"]]
    assert lines[-1].startswith("Knee: ")
    for found in content["points"]:
        assert found["is_valid"] is False or found["good_share"] == 1.0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--num-long 2", "--num-long: needs --long-prompt-tokens"),
        ("--duration 1", "--duration: needs --rate or --interval-ms"),
        ("--prompt-tokens 9-3", "--prompt-tokens: 3 is less than 9"),
        ("--prompt-tokens some", "--prompt-tokens: "),
        ("--rate 3 --interval-ms 3", "not allowed with"),
        ("--max-tokens 100000", "prompt: 16 and 100000 tokens to be generated do not fit"),
        ("--api-key-file none", "--api-key-file: The API key file none cannot be read: "),
        (
            "--num-requests 1 --max-tokens 1 --ops-url http://127.0.0.1:9 --recording a.npz",
            "--ops-url: nothing answers",
        ),
    ],
)
def test_bad_input_gets_one_sentence(
    server: Server, command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--url", server.url, *shlex.split(command)]) == cli.EXIT_USAGE
    assert words in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == cli.EXIT_USAGE
    told = capsys.readouterr().err
    assert told == "roseinfer: --url: nothing answers at http://127.0.0.1:9/v1/models: Connection refused\n"

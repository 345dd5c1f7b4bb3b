"""What a flood of cancels, or a log without a reader, leaves behind in a real server: nothing, and a count."""

import array
import fcntl
import json
import os
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import PATIENCE_S, Server
from tests.e2e.test_faults import reset, send_request

pytestmark = pytest.mark.e2e

NUM_CANCELS = 300  # of a flood; of each, the first third warms caches and allocators
DROPPED = 'roseinfer_telemetry_dropped_total{signal="log_line"}'
BLOCKS = "roseinfer_kv_cache_blocks{"


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_resident_mb(pid: int) -> float:
    [line] = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / 1e6


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def flood(server: Server, num_cancels: int) -> None:
    """Requests of different lengths that are left at once, after their first event, or reset."""
    for index in range(num_cancels):
        body = {"prompt": f"{index} " * (1 + index % 40), "max_tokens": 900, "stream": True, "ignore_eos": True}
        connection = send_request(server, body)
        if index % 3 == 0:
            connection.recv(64)
        if index % 2:
            reset(connection)
        else:
            connection.close()


def settled(server: Server) -> dict[str, float]:
    return server.wait_metrics(
        roseinfer_http_inflight_streams=0, roseinfer_num_requests_running=0, roseinfer_num_requests_waiting=0
    )


def num_blocks(samples: dict[str, float]) -> float:
    """Of all states."""
    return sum(value for name, value in samples.items() if name.startswith(BLOCKS))


def test_a_flood_of_cancels_leaves_nothing_behind(start_server: StartServer) -> None:
    server = start_server("--log-level", "error")
    flood(server, NUM_CANCELS // 3)
    samples = settled(server)
    pids = server.process.pid, server.engine_pid()
    before = [(num_descriptors(pid), num_threads(pid)) for pid in pids]
    before_mb = [resident_mb(pid) for pid in pids]
    flood(server, NUM_CANCELS)
    after = settled(server)
    assert after[BLOCKS + 'state="used"}'] == 0
    assert num_blocks(after) == num_blocks(samples)
    assert not [name for name in after if name.startswith("roseinfer_invariant_violations_total") and after[name]]
    deadline = time.monotonic() + PATIENCE_S
    while [(num_descriptors(pid), num_threads(pid)) for pid in pids] != before:
        assert time.monotonic() < deadline, "descriptors or threads are left behind"
        time.sleep(0.05)
    grown_mb = [resident_mb(pid) - mb for pid, mb in zip(pids, before_mb, strict=True)]
    assert max(grown_mb) < 20, f"a request that was cancelled leaves some {max(grown_mb) / NUM_CANCELS:.3f} MB"


def test_long_texts_take_memory_one_at_a_time_and_give_it_back(start_server: StartServer) -> None:
    """Each of four is 200,000 tokens, and some 60 MB while it is encoded; then it is as if they had not come."""
    server = start_server("--log-level", "error")
    body = json.dumps({"prompt": "q7" * 100_000}).encode()
    server.post("/tokenize", {"prompt": "a"})
    pid = server.process.pid
    before_mb = resident_mb(pid)
    with ThreadPoolExecutor(4) as threads:
        statuses = [status for status, _ in threads.map(lambda _: server.post("/tokenize", body), range(4))]
    assert statuses == [200] * 4
    grown_mb, peak_mb = resident_mb(pid) - before_mb, peak_resident_mb(pid) - before_mb
    print(f"four texts of 200,000 tokens: {peak_mb:.0f} MB more at the peak, {grown_mb:.0f} MB afterwards")
    assert grown_mb < 30
    assert peak_mb < 130


def test_a_large_grammar_costs_as_much_for_512_sequences_as_for_one(start_server: StartServer) -> None:
    """A quarter of a megabyte: with a copy for each sequence on its way to the engine and there it was 340 MB."""
    server = start_server("--log-level", "error", "--max-num-seqs", "16")
    texts = [f"{first}{second}{'x' * 3900}" for first in "abcdefgh" for second in "abcdefgh"]
    body = {"max_tokens": 1, "structured_outputs": {"choice": texts}, "timeout_s": 600}
    assert server.post("/v1/completions", {"prompt": "a"} | body)[0] == 200
    pids = server.process.pid, server.engine_pid()
    before_mb = [resident_mb(pid) for pid in pids]
    status, reply = server.post("/v1/completions", {"prompt": [[i, 6] for i in range(5, 69)], "n": 8} | body)
    grown_mb = [peak_resident_mb(pid) - mb for pid, mb in zip(pids, before_mb, strict=True)]
    print(f"a grammar for 512 sequences: {grown_mb[0]:.0f} MB more in the front end, {grown_mb[1]:.0f} in the engine")
    assert status == 200
    assert {choice["text"][:1] for choice in reply["choices"]} <= set("abcdefgh")
    assert len(reply["choices"]) == 512
    assert max(grown_mb) < 60


def test_a_log_without_a_reader_costs_lines_and_no_request(start_server: StartServer, tmp_path: Path) -> None:
    """The sink blocks, then it goes: requests do not notice, and the lines that are lost are counted."""
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    try:
        server = start_server("--log-level", "debug")
        for _ in range(40):  # two lines each, of 300 bytes
            assert_answers(server)
        deadline = time.monotonic() + PATIENCE_S
        while num_waiting_bytes(reader) <= 4096 - 1024:  # until the sink is full
            assert time.monotonic() < deadline, num_waiting_bytes(reader)
        assert server.metrics()[DROPPED] == 0, "they wait in the queue"
    finally:
        os.close(reader)
    assert_answers(server)
    deadline = time.monotonic() + PATIENCE_S
    while server.metrics()[DROPPED] < 80:
        assert time.monotonic() < deadline, "lines are lost and not counted"
        time.sleep(0.05)
    assert_answers(server)
    assert server.stop() == 0


def assert_answers(server: Server) -> None:
    status, reply = server.post("/v1/completions", {"prompt": "The", "max_tokens": 1, "ignore_eos": True})
    assert (status, reply["usage"]["completion_tokens"]) == (200, 1)


def num_waiting_bytes(reader: int) -> int:
    told = array.array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, told)
    return told[0]

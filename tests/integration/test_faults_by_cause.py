"""Each cause is injected into a whole server, engine to socket, and the slow gaps that it makes carry its name.

Delays are many times a step, and only gaps as long as half a delay are judged, so it does not matter how busy the
machine is. Nothing here asserts how long anything took.
"""

import asyncio
import gc
import socket
import time
from typing import Any

import msgspec
import pytest

from roseinfer.engine.core.batch import Launched, ScheduledBatch, Watch
from roseinfer.engine.core.engine import LoopState
from roseinfer.messages import StepOutput
from roseinfer.observe.gaps.causes import Cause
from roseinfer.records import RequestTimeline, StepRecord
from tests.integration.faults import (
    DELAY_S,
    MIN_GAP_NS,
    NUM_STREAMS,
    WARM_TOKENS,
    Trouble,
    TroubledEngine,
    explained,
    judge,
    on_a_calm_machine,
    process,
    provoke,
)
from tests.integration.faulty_engine import GC_EVERY, LATENCY_S, huge_heap
from tests.integration.live_server import LiveServer, live

# --- in the engine ----------------------------------------------------------------------------------------------------


def sleep_within(part: str) -> Trouble:
    def trouble(_: ScheduledBatch, watch: Watch) -> None:
        with watch(part):
            time.sleep(DELAY_S)

    return trouble


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("capture", Cause.GRAPH_CAPTURE),
        ("h2d", Cause.H2D_COPY),
        ("sample", Cause.SAMPLE_SYNC),
        ("forward", Cause.UNKNOWN),  # a stall in the computing that nothing explains
    ],
)
@on_a_calm_machine
async def test_a_part_of_the_launch_that_stalls(part: str, cause: Cause, depth: int) -> None:
    troubled = TroubledEngine(sleep_within(part), pipeline_depth=depth)
    async with live(troubled.build) as server:
        await provoke(server, troubled.strike)
        judge(server, cause)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("verb", ["schedule", "commit"])
@on_a_calm_machine
async def test_slow_bookkeeping(verb: str, is_streamed: bool) -> None:
    troubled = TroubledEngine()
    scheduler = troubled.engine.scheduler
    work = getattr(scheduler, verb)

    def slow(*arguments: Any) -> Any:
        if troubled.is_armed:
            troubled.is_armed = False
            time.sleep(DELAY_S)
        return work(*arguments)

    setattr(scheduler, verb, slow)
    async with live(troubled.build) as server:
        server.start(2, stream=is_streamed)
        await provoke(server, troubled.strike)
        judge(server, Cause.SCHEDULE)


@on_a_calm_machine
async def test_a_collection_in_the_engine() -> None:
    async with live(transport=process("collects")) as server:
        server.start(NUM_STREAMS)
        await server.until(lambda: any(step.step_id > 2 * GC_EVERY for step in server.tape.steps))
        judge(server, Cause.GC, lambda gap: gap.step_id >= GC_EVERY)


@on_a_calm_machine
async def test_a_long_prompt_among_streams() -> None:
    troubled = TroubledEngine(latency_per_token_s=0.0004)

    async def strike(server: LiveServer) -> None:
        server.start(1, prompt=[len(server.tape.timelines), *[5] * 480], max_tokens=2)
        await server.until(lambda: server.tape.steps[-1].num_prefill_tokens > 400)

    async with live(troubled.build) as server:
        await provoke(server, strike)
        judge(server, Cause.PREFILL_OF_OTHERS)


@on_a_calm_machine
async def test_suddenly_more_rows() -> None:
    troubled = TroubledEngine(latency_per_token_s=0.004)

    async def strike(server: LiveServer) -> None:
        server.start(1, prompt=[[7]] * 5, n=8)

    async with live(troubled.build) as server:
        await provoke(server, strike, times=1)
        steps = {step.step_id: step for step in server.tape.steps}
        judge(server, Cause.BATCH_GROWTH, lambda gap: has_grown(steps, gap.step_id))


def has_grown(steps: dict[int, StepRecord], step_id: int) -> bool:
    step = steps[step_id]
    return step.kind == "decode" and step.num_decode_seqs > steps[step_id - 1].num_decode_seqs


@on_a_calm_machine
async def test_a_step_without_a_graph() -> None:
    troubled = TroubledEngine()
    engine = troubled.engine
    engine.info = msgspec.structs.replace(engine.info, decode_graph_sizes=[8])
    launch = engine.runner.launch

    def launch_graph(batch: ScheduledBatch, watch: Watch) -> Launched:
        is_miss, troubled.is_armed = troubled.is_armed, False
        engine.runner.latency_s = DELAY_S if is_miss else LATENCY_S  # type: ignore[attr-defined]
        launched = launch(batch, watch)
        is_graph = not is_miss and batch.num_device_rows == batch.num_rows
        launched.graph_rows = 8 if is_graph else 0  # type: ignore[misc]
        return launched

    engine.runner.launch = launch_graph  # type: ignore[method-assign]
    async with live(troubled.build) as server:
        await provoke(server, troubled.strike)
        judge(server, Cause.GRAPH_MISS)


@on_a_calm_machine
async def test_a_profiled_step() -> None:
    troubled = TroubledEngine(sleep_within("forward"))
    step = troubled.engine.step

    def profiled(outbox: LoopState) -> StepOutput:
        is_profiled = troubled.is_armed
        output = step(outbox)
        record = msgspec.structs.replace(output.record, is_profiled=is_profiled)
        return msgspec.structs.replace(output, record=record)

    troubled.engine.step = profiled  # type: ignore[method-assign, assignment]
    async with live(troubled.build) as server:
        await provoke(server, troubled.strike)
        judge(server, Cause.PROFILER)


@on_a_calm_machine
async def test_more_sequences_than_rows() -> None:
    troubled = TroubledEngine(max_num_seqs=2, max_active_seqs=64, max_prefill_seqs=64)

    async def strike(server: LiveServer) -> None:
        server.start(58, prompt=[7])

    async with live(troubled.build) as server:
        await provoke(server, strike, times=1)
        judge(server, Cause.NOT_SELECTED)


@on_a_calm_machine
async def test_a_pool_that_is_too_small() -> None:
    """The youngest loses its blocks, and gets them back when the others have ended."""
    troubled = TroubledEngine(num_blocks=60, max_model_len=320, prefix_caching=False)
    async with live(troubled.build) as server:
        server.start(4, max_tokens=180)
        await server.until(lambda: any(step.num_preemptions for step in server.tape.steps))
        await server.until(lambda: len(server.tape.finished) == 4)
        judge(server, Cause.KV_WAIT)


@on_a_calm_machine
async def test_computing_again_what_was_lost() -> None:
    """One stream takes the last block from another just before it ends, so there is no waiting, but 250 tokens."""
    troubled = TroubledEngine(latency_per_token_s=0.0006, num_blocks=36, max_model_len=288, prefix_caching=False)
    async with live(troubled.build) as server:
        server.start(1, prompt=[1, 2], max_tokens=40)
        await server.until(lambda: any(step.num_decode_seqs for step in server.tape.steps))
        server.start(1, prompt=[3] * 238, max_tokens=48)
        await server.until(lambda: len(server.tape.finished) == 2)
        assert server.tape.finished[-1].num_preemptions == 1
        judge(server, Cause.PREEMPTED, lambda gap: gap.serial == 1)


# --- in the front end -------------------------------------------------------------------------------------------------


@on_a_calm_machine
async def test_a_collection_in_the_front_end() -> None:
    heap: list[object] = []

    async def strike(_: LiveServer) -> None:
        asyncio.get_running_loop().call_soon(gc.collect)

    async with live(transport=process()) as server:
        heap.append(huge_heap())
        await provoke(server, strike)
        judge(server, Cause.GC)


@pytest.mark.parametrize("stream_interval", [1, 4])
@on_a_calm_machine
async def test_an_event_loop_that_computes_something_else(stream_interval: int) -> None:
    def compute() -> None:
        end_s = time.thread_time() + DELAY_S
        while time.thread_time() < end_s:
            pass

    async def strike(_: LiveServer) -> None:
        asyncio.get_running_loop().call_soon(compute)

    async with live(transport=process(), stream_interval=stream_interval) as server:
        await provoke(server, strike)
        judge(server, Cause.EVENT_LOOP)


@on_a_calm_machine
async def test_an_engine_that_waits_for_a_front_end_that_does_not_read() -> None:
    async def strike(_: LiveServer) -> None:
        asyncio.get_running_loop().call_soon(time.sleep, 4 * DELAY_S)

    async with live(transport=process("", "--small-link")) as server:
        server.start(40, stream=False)  # whole replies have the engine's gaps alone
        await server.until(lambda: len(server.tape.timelines) == 40)
        await server.generated(WARM_TOKENS)
        await strike(server)
        await server.until(lambda: any(step.outbox_wait_ns for step in server.tape.steps))
        judge(server, Cause.ENGINE_OUTBOX)


@on_a_calm_machine
async def test_a_slow_detokenizer() -> None:
    troubled = TroubledEngine()
    async with live(troubled.build) as server:
        tokenizer = server.service.text_model.tokenizer
        text_bytes = tokenizer.text_bytes

        def slow(token_id: int) -> bytes:
            if troubled.is_armed:
                troubled.is_armed = False
                time.sleep(DELAY_S)
            return text_bytes(token_id)

        tokenizer.text_bytes = slow  # type: ignore[method-assign]
        server.start(1)
        await server.generated(WARM_TOKENS)
        for _ in range(2):
            await troubled.strike(server)
            await server.generated(8)
        judge(server, Cause.DETOKENIZE)


def hold_interpreter(numbers: range) -> int:
    """In one call that never gives it away."""
    return sum(numbers)


@on_a_calm_machine
async def test_a_scrape_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    hold_interpreter(range(1_000_000))
    numbers = range(int(1_000_000 * DELAY_S / (time.monotonic() - began)))

    async def strike(server: LiveServer) -> None:
        async with server.session.get(server.url + "/metrics") as response:
            await response.read()

    async with live(transport=process()) as server:
        snapshot = server.metrics.snapshot
        monkeypatch.setattr(server.metrics, "snapshot", lambda: (hold_interpreter(numbers), snapshot())[1])
        await provoke(server, strike)
        judge(server, Cause.SCRAPE)


@on_a_calm_machine
async def test_a_client_that_reads_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live(transport=process(), send_buffer_bytes=16_384) as server:
        monkeypatch.setattr(server.service.text_model.tokenizer, "text_bytes", lambda _: b"#" * 5_000)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (host, int(port)))
            body = b'{"prompt": [1, 2, 3], "stream": true, "max_tokens": 1000, "ignore_eos": true}'
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            await loop.sock_sendall(connection, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

            async def read(num_writes: int) -> RequestTimeline:
                await server.until(lambda: bool(server.tape.timelines))
                [timeline] = server.tape.timelines
                goal = len(timeline.write_ns) + num_writes
                while len(timeline.write_ns) < goal and not server.tape.finished:
                    await loop.sock_recv(connection, 1 << 16)
                return timeline

            await read(WARM_TOKENS)
            for _ in range(2):
                await asyncio.sleep(4 * DELAY_S)
                await read(10)
        await server.until(lambda: bool(server.tape.finished))
        judge(server, Cause.CLIENT_BACKPRESSURE, lambda gap: gap.duration_ns > 2 * MIN_GAP_NS)


@on_a_calm_machine
async def test_hardly_anything_stays_unexplained() -> None:
    """Over all faults that this process has seen, and one more, so that there is one."""
    troubled = TroubledEngine(sleep_within("sample"))
    async with live(troubled.build) as server:
        await provoke(server, troubled.strike)
        judge(server, Cause.SAMPLE_SYNC)
    assert explained[Cause.UNKNOWN] < 0.05 * explained.total()

"""What routers hear of the prefix cache: the wire of vLLM's events, their order, a replay, and what is lost."""

import hashlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from roseinfer.config.options import CacheConfig, Config, EngineConfig, KVEventsConfig
from roseinfer.engine import kv_events
from roseinfer.engine.kv_events import END_OF_REPLAY, KVEventPublisher, events_of, publishing
from roseinfer.errors import ConfigError
from roseinfer.llm.llm import LLM
from roseinfer.messages import SamplingParams
from roseinfer.records import CachedBlock
from tests.unit.engine.harness import make_engine, make_request, run_to_end

TIMEOUT_MS = 10_000


class Stored(msgspec.Struct, tag="BlockStored", tag_field="type", array_like=True):
    """As llm-d's adapter for vLLM was seen to read it, by position."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", array_like=True):
    block_hashes: list[int]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", array_like=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class StoredMap(Stored, tag="BlockStored", tag_field="type", array_like=False):
    """As the classes of vLLM 0.32 were seen to read it, by name."""


class RemovedMap(Removed, tag="BlockRemoved", tag_field="type", array_like=False):
    pass


class ClearedMap(Cleared, tag="AllBlocksCleared", tag_field="type", array_like=False):
    pass


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]


class Reader:
    """A router's view: hash -> token ids of the block."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}

    def read(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.blocks.clear()
            elif isinstance(event, Removed):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                for i, block in enumerate(event.block_hashes):
                    self.blocks[block] = event.token_ids[i * event.block_size : (i + 1) * event.block_size]


def decoded(events: Iterator[list[Any]]) -> list[Any]:
    return msgspec.convert(list(events), list[Stored | Removed | Cleared])


@contextmanager
def publisher(folder: Path, **options: Any) -> Iterator[tuple[KVEventPublisher, str, str]]:
    """A publisher, with the addresses of its events and of the replay."""
    endpoint, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
    config = KVEventsConfig(endpoint=endpoint, replay_endpoint=replay, **options)
    opened = KVEventPublisher(config, "kv@pod@model", 4, "CPU")
    try:
        yield opened, endpoint, replay
    finally:
        opened.close()


@contextmanager
def connected(kind: int, address: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(address)
        yield socket


def replayed(address: str, first: int, least: int) -> list[tuple[bytes, int, bytes]]:
    """The messages from a number on, once there are so many."""
    with connected(zmq.DEALER, address) as socket:
        for _ in range(1000):
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            messages, frames = [], socket.recv_multipart()
            while frames[2] != END_OF_REPLAY:
                messages.append((frames[1], int.from_bytes(frames[2], "big"), frames[3]))
                frames = socket.recv_multipart()
            if len(messages) >= least:
                return messages
    raise AssertionError(f"{len(messages)} messages, not {least}")


def changes_of(count: int, salt: str = "") -> list[CachedBlock]:
    """A chain of blocks of four tokens that are stored, and the removal of the last."""
    parent, changes = hashlib.sha256(salt.encode()).digest(), []
    for i in range(count):
        content = np.arange(4 * i, 4 * i + 4, dtype=np.int32).tobytes()
        digest = hashlib.sha256(parent + content).digest()
        changes.append(CachedBlock(i, digest, parent, content, not i, "" if i else salt))
        parent = digest
    return [*changes, CachedBlock(count - 1, parent)]


def test_blocks_that_follow_each_other_are_one_event() -> None:
    stored, removed = decoded(events_of(changes_of(3), 4, "GPU"))
    assert stored.token_ids == list(range(12))
    assert (stored.parent_block_hash, stored.medium, stored.extra_keys) == (None, "GPU", None)
    assert removed.block_hashes == stored.block_hashes[2:]
    later, _ = decoded(events_of(changes_of(3)[1:], 4, "GPU"))
    assert later.parent_block_hash == stored.block_hashes[0]


def test_a_salt_is_an_extra_key_of_the_first_block() -> None:
    salted, _ = decoded(events_of(changes_of(2, "mine"), 4, "CPU"))
    assert salted.extra_keys == [["mine"], None]


def test_events_have_no_more_of_a_salt_than_the_client_gave() -> None:
    """A router sees the body and no key: with the key's part in the events it would find nothing."""
    engine = make_engine(num_blocks=32)
    cache = engine.scheduler.kv_cache.prefix_cache
    cache.changes, told = deque(), []
    for salt, given, num_blocks in (
        ("key", "", 3),
        ("key and mine", "mine", 3),
        ("key and mine", "mine", 5),
        ("", "", 3),
    ):
        request = make_request(salt, list(range(num_blocks * cache.block_size)), salt=salt, max_tokens=1)
        engine.add_request(msgspec.structs.replace(request, client_salt=given))
        run_to_end(engine)
        told.append([event.extra_keys for event in decoded(events_of(list(cache.changes), cache.block_size, "CPU"))])
        cache.changes.clear()
    assert [keys and keys[0] for (keys,) in told] == [None, ["mine"], None, None], "the salt is in the first block's"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_reader_of_the_events_holds_what_the_cache_holds(depth: int) -> None:
    engine, reader = make_engine(num_blocks=12, max_model_len=64, pipeline_depth=depth), Reader()
    cache = engine.scheduler.kv_cache.prefix_cache
    cache.changes = deque()
    random = np.random.default_rng(1)
    for i in range(40):
        prompt = random.integers(0, 3, int(random.integers(1, 40))).tolist()
        engine.add_request(make_request(f"r{i}", prompt, salt="s" * (i % 2), max_tokens=int(random.integers(1, 12))))
        if i % 3 == 0:  # two or three at once
            run_to_end(engine)
        reader.read(decoded(events_of(list(cache.changes), cache.block_size, "CPU")))
        cache.changes.clear()
        held = {int.from_bytes(digest[-8:], "big"): block.content for digest, block in cache._blocks.items()}
        assert {block: np.array(ids, np.int32).tobytes() for block, ids in reader.blocks.items()} == held
    assert reader.blocks


@pytest.mark.parametrize(("form", "kind"), [("array", Batch), ("map", MapBatch)])
def test_who_missed_messages_gets_them_again(tmp_path: Path, form: str, kind: type[Any]) -> None:
    with publisher(tmp_path, form=form) as (opened, _, replay):
        opened.publish(changes_of(2))
        opened.publish(changes_of(1))
        messages = replayed(replay, 0, 3)
        assert [(topic, number) for topic, number, _ in messages] == [(b"kv@pod@model", n) for n in range(3)]
        batches = [msgspec.msgpack.decode(payload, type=kind) for _, _, payload in messages]
        assert [type(event).__name__.removesuffix("Map") for batch in batches for event in batch.events] == [
            *("Cleared", "Stored", "Removed", "Stored", "Removed")
        ]
        assert replayed(replay, 1, 2) == messages[1:]


def test_a_subscriber_gets_them_as_they_come(tmp_path: Path) -> None:
    with publisher(tmp_path) as (opened, endpoint, _), connected(zmq.SUB, endpoint) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        for _ in range(1000):  # until it is known to the other side
            opened.publish(changes_of(1))
            if socket.poll(10):
                break
        topic, number, payload = socket.recv_multipart()
        assert (topic, len(number)) == (b"kv@pod@model", 8)
        assert msgspec.msgpack.decode(payload, type=Batch).events


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_routers_of_both_families_reach_it(host: str) -> None:
    """A cluster may have addresses of IPv6 alone."""
    with socket.socket(socket.AF_INET6) as free:
        try:
            free.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        port = free.getsockname()[1]
    config = KVEventsConfig(endpoint="inproc://events", replay_endpoint=f"tcp://*:{port}")
    with closing(KVEventPublisher(config, "kv@pod@model", 4, "CPU")) as opened:
        opened.publish(changes_of(1))
        assert len(replayed(f"tcp://{host}:{port}", 0, 2)) == 2


def test_nonsense_at_the_replay_socket_is_passed_over(tmp_path: Path) -> None:
    with publisher(tmp_path) as (opened, _, replay):
        with connected(zmq.DEALER, replay) as socket:
            for frames in ([b"x"], [b"", b"short"], [b"", b"1", b"2", b"3"], []):
                socket.send_multipart(frames or [b""])
        opened.publish(changes_of(1))
        assert len(replayed(replay, 0, 2)) == 2


def test_what_is_lost_is_announced_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_WAITING", 3)
    may_send = threading.Event()
    with publisher(tmp_path) as (opened, _, replay):
        send = opened._events.send_multipart

        class Held:
            def send_multipart(self, frames: tuple[bytes, ...]) -> None:
                may_send.wait(10)
                send(frames)

        monkeypatch.setattr(opened, "_events", Held())
        sizes = [1, 2, 3, 1, 1, 1]
        for size in sizes:
            opened.publish(changes_of(size)[:-1])
        may_send.set()
        kinds = [msgspec.msgpack.decode(payload, type=Batch).events for _, _, payload in replayed(replay, 0, 4)]
        names = [type(events[0]).__name__ for events in kinds]
        assert names[0] == "Cleared"
        assert names[-1] == "Cleared", "the last that came are lost"
        assert names.count("Cleared") == 2


def test_an_engine_publishes_the_blocks_of_its_prompts(tmp_path: Path) -> None:
    events = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    config = Config(engine=EngineConfig(transport="thread"), kv_events=events)
    with LLM(config=config) as llm:
        prompt = list(range(1, 1 + 3 * config.cache.block_size))
        llm.generate(prompt, SamplingParams(max_tokens=1))
        messages = replayed(f"ipc://{tmp_path}/replay", 0, 2)
        assert messages[0][0].startswith(b"kv@")
        assert messages[0][0].endswith(b"@roseinfer-demo")
        stored = msgspec.msgpack.decode(messages[1][2], type=Batch).events[0]
        assert isinstance(stored, Stored)
        assert stored.token_ids == prompt


def test_a_taken_address_names_the_option() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:  # noqa: S104 - as `*` binds
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"kv_events\.endpoint: tcp.* cannot be used: Address already in use"):
            KVEventPublisher(KVEventsConfig(endpoint=endpoint), "", 4, "CPU")


def test_an_address_without_a_listener_is_a_warning_until_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that accepts and is no router's is none."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"

    def logged(count: int) -> list[str]:
        deadline = time.monotonic() + 10
        while len(caplog.messages) < count:
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.005)
        return caplog.messages

    with caplog.at_level("INFO"), closing(KVEventPublisher(KVEventsConfig(endpoint=endpoint), "", 4, "CPU")):
        logged(1)
        with zmq.Context() as context, context.socket(zmq.SUB) as router:
            router.bind(endpoint)
            assert logged(2) == [
                f"kv_events.endpoint: nothing listens at {endpoint}, so events are lost until something does",
                f"kv_events.endpoint: {endpoint} is connected",
            ]


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_events\.endpoint: tcp://\*:65536 cannot be used: a port is 65535 at most"
    ):
        KVEventPublisher(KVEventsConfig(endpoint="tcp://*:65536"), "", 4, "CPU")
    with pytest.raises(ConfigError, match=r"kv_events\.endpoint: nonsense cannot be used"):
        KVEventPublisher(KVEventsConfig(endpoint="nonsense"), "", 4, "CPU")
    with pytest.raises(ConfigError, match=r"kv_events\.endpoint: there are no events with cache\.prefix_caching off"):
        Config(kv_events=KVEventsConfig(endpoint="tcp://*:5557"), cache=CacheConfig(prefix_caching=False))
    for name, alone in (
        ("replay_endpoint", KVEventsConfig(replay_endpoint="tcp://*:5558")),
        ("topic", KVEventsConfig(topic="kv")),
        ("form", KVEventsConfig(form="map")),
    ):
        config = Config(kv_events=alone)
        with pytest.raises(ConfigError, match=rf"kv_events\.{name}: needs"), publishing(config, make_engine()):
            pass
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match="needs pyzmq"):
        KVEventPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/a"), "", 4, "CPU")

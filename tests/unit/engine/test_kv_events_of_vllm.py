"""vLLM's own module of KV events reads what we publish, and its publisher cannot be told from ours.

`make build/vllm-kv-events` fetches the module of two versions: in one events are arrays, in the other maps.
"""

import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.conftest import require_path
from tests.unit.engine.test_kv_events import changes_of, connected, publisher, replayed

MODULES = Path(__file__).parents[3] / "build" / "vllm-kv-events"
VERSIONS = {"array": "0.16.0", "map": "0.32.0"}
TOPIC = "kv@pod@model"  # as in `publisher`

# What the module imports of the rest of vLLM; none of it has a part in what is sent.
IMPORTED: dict[str, dict[str, Any]] = {
    "vllm.config.kv_events": {"KVEventsConfig": types.SimpleNamespace},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils.network_utils": dict.fromkeys(("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")),
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
}


@dataclass(frozen=True)
class Vllm:
    """A version of the module, and the form that its events have."""

    form: str
    module: Any

    def read(self, messages: list[tuple[bytes, int, bytes]]) -> list[tuple[bytes, int, list[Any]]]:
        """The messages, with what vLLM's classes make of the payloads."""
        decoder = msgspec.msgpack.Decoder(self.module.KVEventBatch)
        return [(topic, number, decoder.decode(payload).events) for topic, number, payload in messages]


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    form: str = request.param
    path = require_path(MODULES / f"{VERSIONS[form]}.py", "make build/vllm-kv-events")
    for name, members in IMPORTED.items():
        stand_in = types.ModuleType(name)
        vars(stand_in).update(members)
        monkeypatch.setitem(sys.modules, name, stand_in)
    spec = importlib.util.spec_from_file_location(f"vllm_kv_events_{form}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where msgspec looks up what the annotations name
    spec.loader.exec_module(module)
    return Vllm(form, module)


@contextmanager
def vllms_publisher(vllm: Vllm, folder: Path) -> Iterator[tuple[Any, str, str]]:
    """The publisher of vLLM, with the addresses of its events and of the replay."""
    endpoint, replay = (f"ipc://{folder}/vllm-{name}" for name in ("events", "replay"))
    opened = vllm.module.ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, topic=TOPIC)
    try:
        yield opened, endpoint, replay
    finally:
        opened.shutdown()
        zmq.Context.instance().term()


def heard(endpoint: str, publish: Callable[[], None]) -> list[bytes]:
    """The frames of the first message that a subscriber gets."""
    with connected(zmq.SUB, endpoint) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        for _ in range(1000):  # until it is known to the other side
            publish()
            if socket.poll(10):
                break
        frames: list[bytes] = socket.recv_multipart()
        return frames


def test_vllms_classes_read_what_we_publish(vllm: Vllm, tmp_path: Path) -> None:
    with publisher(tmp_path, form=vllm.form) as (opened, _, replay):
        opened.publish(changes_of(3, "mine"))
        (_, _, cleared), (_, _, (stored, removed)) = vllm.read(replayed(replay, 0, 2))
    classes = vllm.module
    assert cleared == [classes.AllBlocksCleared()]
    known = set(classes.BlockStored.__struct_fields__)
    expected: dict[str, Any] = {
        "block_hashes": [int.from_bytes(change.digest[-8:], "big") for change in changes_of(3, "mine")[:-1]],
        "parent_block_hash": None,
        "token_ids": list(range(12)),
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": [("mine",), None, None],
    }
    assert stored == classes.BlockStored(**{name: value for name, value in expected.items() if name in known})
    assert removed == classes.BlockRemoved(block_hashes=stored.block_hashes[2:], medium="CPU")


@pytest.mark.parametrize("vllm", ["map"], indirect=True)  # the older version leaves the topic out of its replay
def test_no_reader_can_tell_our_publisher_from_vllms(vllm: Vllm, tmp_path: Path) -> None:
    """The same events from both: the replay of all and of the last, and what a subscriber hears."""
    with (
        publisher(tmp_path, form=vllm.form) as (ours, our_events, our_replay),
        vllms_publisher(vllm, tmp_path) as (theirs, their_events, their_replay),
    ):
        for count in (3, 1):
            ours.publish(changes_of(count))
        told = vllm.read(replayed(our_replay, 0, 3))
        for _, _, events in told:
            theirs.publish(vllm.module.KVEventBatch(ts=0.0, events=events))
        assert told == vllm.read(replayed(their_replay, 0, 3))
        assert told[2:] == vllm.read(replayed(our_replay, 2, 1)) == vllm.read(replayed(their_replay, 2, 1))
        assert [number for _, number, _ in told] == [0, 1, 2]
        events = told[2][2]
        frames = (
            heard(our_events, lambda: ours.publish(changes_of(1))),
            heard(their_events, lambda: theirs.publish(vllm.module.KVEventBatch(ts=0.0, events=events))),
        )
        for topic, number, payload in frames:
            assert (topic, len(number)) == (TOPIC.encode(), 8)
            assert int.from_bytes(number, "big") >= 3
            assert vllm.read([(topic, 0, payload)])[0][2] == events

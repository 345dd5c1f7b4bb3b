"""Whatever bytes come over the engine's link, they become messages or an error: no crash, no wait, no memory."""

import contextlib
import socket
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.engine import loop
from roseinfer.engine.link.frames import (
    CommandDecoder,
    CommandEncoder,
    EngineLink,
    Sent,
)
from roseinfer.messages import Abort, Command, EngineFailure, Event, SamplingParams
from roseinfer.runtime.frames import FrameBuffer, encode_frame
from tests.fuzz.mutations import check_each, corpus, mutated
from tests.unit.engine.harness import make_engine, make_request

NUM_MUTATIONS = 4000
NUM_ENGINES = 200
KEPT = corpus("frame")
DECODERS: tuple[msgspec.msgpack.Decoder[object], ...] = (
    msgspec.msgpack.Decoder(Sent),
    msgspec.msgpack.Decoder(Event),
)
# What the loops at both ends take for a peer that has gone wrong. A deep nesting ends in the first.
REFUSALS = (RecursionError, ValueError, msgspec.MsgspecError)


def check(content: bytes) -> None:
    """The property, for both directions."""
    try:
        payloads = FrameBuffer().feed(content)
    except ValueError as error:
        assert str(error).startswith("a frame of ")  # noqa: PT017
        return
    assert sum(4 + len(payload) for payload in payloads) <= len(content)
    for payload in payloads:
        for decoder in DECODERS:
            try:
                message = decoder.decode(payload)
            except REFUSALS:
                continue
            again = msgspec.msgpack.encode(message)  # what was accepted is a message, and stays one
            assert msgspec.msgpack.encode(decoder.decode(again)) == again
    check_in_a_row(payloads)


def check_in_a_row(payloads: list[bytes]) -> None:
    """They may refer to each other: what becomes of them are commands that refer to nothing."""
    decoder = CommandDecoder()
    for payload in payloads:
        with contextlib.suppress(*REFUSALS):
            assert isinstance(decoder.decode(payload), Command)


@pytest.mark.parametrize(("name", "content"), KEPT, ids=[name for name, _ in KEPT])
def test_the_kept_ones(name: str, content: bytes) -> None:
    check(content)
    if name.startswith("good"):
        direction = DECODERS[name.startswith("good-event")]
        assert [direction.decode(payload) for payload in FrameBuffer().feed(content)]


def test_ones_like_them() -> None:
    check_each(mutated([content for _, content in KEPT], NUM_MUTATIONS, seed=1), check)


@given(st.lists(st.binary(max_size=60), max_size=4), st.integers(1, 30))
def test_any_payloads(payloads: list[bytes], cut: int) -> None:
    whole = b"".join(encode_frame(payload) for payload in payloads)
    check(whole)
    check(whole[:-cut])


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
VALUES = (
    SCALARS
    | st.binary(max_size=8)
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
)
MESSAGES = [*Sent.__args__, *Event.__args__]
TAGS = sorted(message.__name__ for message in MESSAGES)
NAMES = sorted({field for message in MESSAGES for field in message.__struct_fields__})


@given(st.sampled_from(TAGS), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6))
def test_any_object_with_a_known_tag(tag: str, fields: dict[str, object]) -> None:
    check(encode_frame(msgspec.msgpack.encode({**fields, "type": tag})))


PROMPTS = [[1], [1], [2, 3]]  # two of them equal, and not the same
PARAMS = [SamplingParams(), SamplingParams(max_tokens=7, logit_bias={5: 1.0}, stop_token_ids=(1, 2))]
REQUESTS = st.builds(
    lambda prompt, params, seed, salt: msgspec.structs.replace(
        make_request("a", salt=salt), prompt_token_ids=prompt, params=msgspec.structs.replace(params, seed=seed)
    ),
    st.sampled_from(PROMPTS),
    st.sampled_from(PARAMS),
    st.integers(0, 2),
    st.sampled_from(["", "", "", "s", "\ud800"]),
)


@given(st.lists(st.one_of(*[REQUESTS] * 4, st.sampled_from([Abort("a"), Abort("\ud800")])), max_size=30))
def test_any_commands_come_out_as_they_went_in(commands: list[Command]) -> None:
    """Whatever they share with the one before, and whatever could not be sent between them."""
    encoder, decoder = CommandEncoder(), CommandDecoder()
    for command in commands:
        with contextlib.suppress(UnicodeEncodeError):
            [payload] = FrameBuffer().feed(encoder.encode(command))
            assert decoder.decode(payload) == command


def test_a_length_alone_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        buffer = FrameBuffer()
        assert buffer.feed((1 << 30).to_bytes(4, "little") + b"x" * 100) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


class Heard:
    """The outbox of an engine whose last words matter."""

    depth, is_full = 0, False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, event: Event) -> None:
        self.events.append(event)


def test_an_engine_that_hears_nonsense_says_so_and_leaves() -> None:
    """One that is cut off leaves too; none stays, and none raises."""
    num_told = 0
    for content in mutated([content for _, content in KEPT], NUM_ENGINES, seed=2):
        heard, (front, ours) = Heard(), socket.socketpair()
        with front, ours, contextlib.suppress(BrokenPipeError):
            front.sendall(content)
            front.shutdown(socket.SHUT_WR)
            loop.run(make_engine, EngineLink(ours), heard)
        num_told += any(isinstance(event, EngineFailure) for event in heard.events)
    assert num_told > 20

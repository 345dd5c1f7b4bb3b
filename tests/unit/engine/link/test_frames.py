"""Frames over a socket: whole whatever the pieces, never blocking, bounded."""

import fcntl
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from roseinfer.engine.link import frames as link_module
from roseinfer.engine.link.frames import CommandEncoder, EngineLink, SameParams
from roseinfer.messages import Abort, Command, EngineFailure, Grammar, Request, Shutdown
from roseinfer.runtime.frames import FrameBuffer, encode_frame
from tests.unit.engine.harness import make_request


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 17))
def test_frames_come_out_whole_whatever_the_pieces(payloads: list[bytes], piece: int) -> None:
    stream = b"".join(encode_frame(payload) for payload in payloads)
    buffer = FrameBuffer()
    received = [frame for at in range(0, len(stream), piece) for frame in buffer.feed(stream[at : at + piece])]
    assert received == payloads


def test_a_length_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        FrameBuffer().feed(b"\xff\xff\xff\xff")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, EngineLink]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, EngineLink(theirs)


def test_the_configuration_comes_first_and_what_follows_is_not_lost(pair: tuple[socket.socket, EngineLink]) -> None:
    front, link = pair
    request = make_request("a")
    front.sendall(encode_frame(b"config") + encode_frame(request) + encode_frame(Abort("a")) + encode_frame(Shutdown()))
    assert link.receive_bytes() == b"config"
    assert link.receive(wait=True) == [request, Abort("a"), Shutdown()]
    assert link.receive(wait=False) == []


def test_every_command_survives_the_wire() -> None:
    for command in (make_request("a", salt="s", seed=2**62, stop_token_ids=(1, 2)), Abort("b"), Shutdown()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command


def test_the_sequences_of_a_request_send_what_they_have_in_common_once_and_share_it(
    pair: tuple[socket.socket, EngineLink],
) -> None:
    front, link = pair
    encoder, first, second = CommandEncoder(), Grammar("regex", "a" * 4000), Grammar("regex", "b" * 4000)
    common: dict[str, Any] = {"grammar": first, "logit_bias": dict.fromkeys(range(300), 0.5), "max_tokens": 5}
    sent: list[Command] = [
        make_request("a/0", seed=1, **common),
        make_request("a/1", seed=2, **common),
        Abort("a/0"),
        make_request("a/2", [4, 5], salt="s", seed=3, **common),
        make_request("b/0", seed=3, **common | {"grammar": second}),
        make_request("b/1", seed=0, **common | {"grammar": second}),
        make_request("c"),
        make_request("a/3", seed=4, **common),
    ]
    frames = [encoder.encode(command) for command in sent]
    assert [len(frame) > 4000 for frame in frames] == [True, False, False, False, True, False, False, True]
    front.sendall(b"".join(frames))
    received = link.receive(wait=True)
    assert received == sent
    params = [request.params for request in received if isinstance(request, Request)]
    assert params[0].grammar is params[1].grammar is params[2].grammar
    assert params[0].logit_bias is params[1].logit_bias is params[2].logit_bias
    assert params[3].grammar is params[4].grammar


def test_biases_that_their_owner_changes_between_two_requests_go_over_again(
    pair: tuple[socket.socket, EngineLink],
) -> None:
    front, link = pair
    encoder, biases = CommandEncoder(), {1: 0.5}
    for request_id in ("a", "b"):
        biases[2] = float(len(biases))
        front.sendall(encoder.encode(make_request(request_id, logit_bias=biases)))
    received = [command.params.logit_bias for command in link.receive(wait=True) if isinstance(command, Request)]
    assert received == [{1: 0.5, 2: 1.0}, {1: 0.5, 2: 2.0}]


def test_a_request_that_could_not_be_encoded_is_none_that_the_next_one_refers_to(
    pair: tuple[socket.socket, EngineLink],
) -> None:
    front, link = pair
    encoder = CommandEncoder()
    sent = [make_request("a", max_tokens=3), make_request("c", max_tokens=5), make_request("d", max_tokens=5)]
    front.sendall(encoder.encode(sent[0]))
    with pytest.raises(UnicodeEncodeError):
        encoder.encode(make_request("b", salt="\ud800", max_tokens=5))
    for request in sent[1:]:
        front.sendall(encoder.encode(request))
    assert link.receive(wait=True) == sent


def test_stop_tokens_in_a_list_are_the_same_as_those_before_them(pair: tuple[socket.socket, EngineLink]) -> None:
    front, link = pair
    encoder, stops = CommandEncoder(), [1, 2]
    common: dict[str, Any] = {"stop_token_ids": stops, "grammar": Grammar("regex", "a" * 4000)}
    frames = [encoder.encode(make_request(request_id, **common)) for request_id in ("a", "b")]
    stops.append(3)
    frames.append(encoder.encode(make_request("c", **common)))
    assert [len(frame) > 4000 for frame in frames] == [True, False, True]
    front.sendall(b"".join(frames))
    received = [command.params.stop_token_ids for command in link.receive(wait=True) if isinstance(command, Request)]
    assert received == [(1, 2), (1, 2), (1, 2, 3)]


def asking(prompt: list[int], request_id: str, **params: Any) -> Request:
    """With this very list: requests for the choices of a prompt share it."""
    return replace(make_request(request_id, **params), prompt_token_ids=prompt)


def test_the_choices_of_a_prompt_send_it_once_and_share_it(pair: tuple[socket.socket, EngineLink]) -> None:
    front, link = pair
    encoder = CommandEncoder()
    first, second = ([base + i for i in range(1000)] for base in (1000, 5000))
    sent: list[Command] = [
        asking(first, "a/0", seed=1),
        asking(first, "a/1", seed=2, salt="s"),
        Abort("a/0"),
        asking(first, "a/2", seed=3),
        asking(second, "a/3", seed=1),
        asking(second, "a/4", seed=2),
        asking(second, "b/0", max_tokens=7),  # of other parameters
        asking(second, "b/1", max_tokens=7),
        asking(first, "b/2", max_tokens=7),
    ]
    frames = [encoder.encode(command) for command in sent]
    assert [len(frame) > 1000 for frame in frames] == [True, False, False, False, True, False, True, False, True]
    front.sendall(b"".join(frames))
    received = link.receive(wait=True)
    assert received == sent
    prompts = [request.prompt_token_ids for request in received if isinstance(request, Request)]
    assert prompts[0] is prompts[1] is prompts[2]
    assert prompts[3] is prompts[4]


def test_a_prompt_whose_request_could_not_be_encoded_is_not_referred_to(
    pair: tuple[socket.socket, EngineLink],
) -> None:
    front, link = pair
    encoder, prompt = CommandEncoder(), [1, 2, 3]
    sent = [asking([7], "a"), asking(prompt, "c"), asking(prompt, "d")]
    front.sendall(encoder.encode(sent[0]))
    with pytest.raises(UnicodeEncodeError):
        encoder.encode(asking(prompt, "b", salt="\ud800"))
    for request in sent[1:]:
        front.sendall(encoder.encode(request))
    assert link.receive(wait=True) == sent


@pytest.mark.parametrize("has_same_prompt", [False, True])
def test_a_request_that_refers_to_one_that_never_came_is_refused(
    has_same_prompt: bool, pair: tuple[socket.socket, EngineLink]
) -> None:
    front, link = pair
    front.sendall(encode_frame(Abort("a")) + encode_frame(SameParams(make_request("a"), has_same_prompt)))
    with pytest.raises(ValueError, match="the one before it, and none came"):
        link.receive(wait=True)


def test_sending_never_blocks_and_keeps_the_order(pair: tuple[socket.socket, EngineLink]) -> None:
    front, link = pair
    words = [EngineFailure(f"{i} " + "x" * 5000) for i in range(200)]
    for word in words:
        link.send(word)  # a megabyte: far more than the kernel takes without a reader
    assert link.depth > 0
    assert not link.is_full
    buffer = FrameBuffer()
    received: list[EngineFailure] = []
    while len(received) < len(words):
        received += [msgspec.msgpack.decode(frame, type=EngineFailure) for frame in buffer.feed(front.recv(1 << 16))]
        link.receive(wait=False)  # an engine at work: looks at the socket between steps
    assert received == words
    assert link.depth == 0


def test_the_outbox_is_bounded(pair: tuple[socket.socket, EngineLink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_MAX_OUTBOX_BYTES", 1 << 20)
    _, link = pair
    while not link.is_full:
        link.send(EngineFailure("x" * 100_000))
    assert 1 <= link.depth < 20


def test_a_closed_front_end_is_end_of_file(pair: tuple[socket.socket, EngineLink]) -> None:
    front, link = pair
    front.close()
    with pytest.raises(EOFError):
        link.receive(wait=True)
    with pytest.raises(EOFError):
        link.send(EngineFailure("nobody hears this"))


def test_the_last_output_is_sent_although_commands_were_left_unread(pair: tuple[socket.socket, EngineLink]) -> None:
    front, link = pair
    front.sendall(encode_frame(Abort("unread")))
    words = EngineFailure("x" * 2_000_000)
    link.send(words)
    received = bytearray()

    def read() -> None:
        while data := front.recv(1 << 16):
            received.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    link.drain(timeout_s=10.0)
    reader.join(timeout=10)
    assert bytes(received) == encode_frame(words)


def test_a_descriptor_above_select_s_limit_serves() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 1500)) as high:
        assert high.fileno() >= 1500
        ours.sendall(encode_frame(Abort("a")))
        assert EngineLink(high).receive(wait=True) == [Abort("a")]

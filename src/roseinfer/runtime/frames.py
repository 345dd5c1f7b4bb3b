"""Frames on a stream socket: a four-byte little-endian length, then as many bytes, such as a struct as msgpack."""

import socket

import msgspec

_HEADER_BYTES = 4
_MAX_FRAME_BYTES = 1 << 30


def encode_frame(message: object) -> bytes:
    """Returns the frame of these bytes, or of a struct."""
    payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return len(payload).to_bytes(_HEADER_BYTES, "little") + payload


def receive_frame(connection: socket.socket) -> bytes:
    """Waits for one frame and returns its payload. Raises EOFError when the other side has gone."""
    return _receive(connection, int.from_bytes(_receive(connection, _HEADER_BYTES), "little"))


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        try:
            piece = connection.recv(size - len(content))
        except OSError as error:
            raise EOFError from error
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)


class FrameBuffer:
    """Splits incoming bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes. Raises ValueError for a length that no peer of ours would send."""
        whole: bytes | bytearray = data
        if self._pending:
            self._pending += data
            whole = self._pending
        payloads = []
        offset = 0
        with memoryview(whole) as view:  # a payload is copied once
            while len(view) - offset >= _HEADER_BYTES:
                size = int.from_bytes(view[offset : offset + _HEADER_BYTES], "little")
                if size > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                end = offset + _HEADER_BYTES + size
                if len(view) < end:
                    break
                payloads.append(bytes(view[offset + _HEADER_BYTES : end]))
                offset = end
        if whole is data:
            self._pending += data[offset:]
        else:
            del self._pending[:offset]
        return payloads

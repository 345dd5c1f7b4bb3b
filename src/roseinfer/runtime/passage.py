"""Passes open connections between two processes, each with what was read from it and has no answer yet."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

MAX_BYTES = 256 * 1024  # that asyncio reads at once, and a message of the passage holds


class Passage:
    """One end. What was given waits until the other end takes it, if need be for a process that follows a death."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_BYTES)
        self._end = end

    def give(self, transport: asyncio.Transport, data: bytes) -> bool:
        """Give a connection whose answers have been sent, and end it here. False if it cannot go, perhaps for now."""
        try:
            socket.send_fds(self._end, [data], [transport.get_extra_info("socket").fileno()])
        except OSError:  # there is no other end, or too many wait to be taken
            return False
        transport.abort()  # closes a descriptor of the connection, of which the other process has one too
        return True

    def open(self, take: Callable[[socket.socket, bytes], None]) -> None:
        """Take, from now on, what the other end gives."""

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                data, descriptors, _, _ = socket.recv_fds(self._end, MAX_BYTES, 1)
                if descriptors:  # else this process may open no more, and the connection is closed
                    take(socket.socket(fileno=descriptors[0]), data)

        asyncio.get_running_loop().add_reader(self._end, read)

    def close(self) -> None:
        """Close this end."""
        if self._end.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._end)
        self._end.close()


def make_passage() -> tuple[Passage, socket.socket]:
    """Returns this process's end, and the other's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return Passage(ours), theirs

"""Turns the lengths of long bodies into a refusal, when the process holds as many of them as it may. Reads none.

What a body takes is counted from its first byte to the last of its answer: the connections of one port may be
thousands, of which each could otherwise leave its two megabytes and what has been made of them.
"""

from aiohttp import web

from roseinfer.errors import Overloaded


class Room:
    """Bytes, for all requests of a process together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # held now


class Place:
    """What one request holds of a room. Nothing, until it asks."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Hold at least so many bytes. Raises Overloaded where there are too many, unless all of them are its own."""
        more = num_bytes - self._num_bytes
        if more <= 0:
            return
        of_others = self._room.num_bytes - self._num_bytes
        if of_others and of_others + num_bytes > self._room.max_bytes:
            raise Overloaded(f"Bodies of {of_others} bytes are held already; {self._room.max_bytes} is the limit.")
        self._room.num_bytes += more
        self._num_bytes = num_bytes

    def leave(self) -> None:
        """Give all of it back."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0


PLACE = web.RequestKey("place", Place)

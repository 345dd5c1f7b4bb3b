"""Digests of prompts, which show which of them share a prefix and nothing else.

A digest is eight bytes for each full block, of the block and all before it, keyed with a secret of this process: a
guessed prompt cannot be hashed and compared, and digests of two processes have nothing in common.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 8
_ID_BYTES = array("i").itemsize


class PrefixDigests:
    """Digests under one secret."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_bytes = block_size * _ID_BYTES
        self._secret = secret or secrets.token_bytes(32)
        self._last: tuple[Sequence[int], str, bytes] = ((), "", b"")

    def digests_of(self, prompt_token_ids: Sequence[int], cache_salt: str = "") -> bytes:
        """The digests of a prompt's full blocks; prompts of different salts share none, as in the prefix cache.

        The prompt of several choices is one list, which is digested once.
        """
        prompt, salt_of_prompt, digests_of_prompt = self._last
        if prompt is prompt_token_ids and salt_of_prompt == cache_salt:
            return digests_of_prompt
        content = array("i", prompt_token_ids).tobytes()
        salt = cache_salt.encode()
        running = hashlib.blake2b(b"%d:%b" % (len(salt), salt), digest_size=DIGEST_BYTES, key=self._secret)
        digests, size = [], self._block_bytes
        for start in range(0, len(content) - size + 1, size):
            running.update(content[start : start + size])
            digests.append(running.copy().digest())  # a digest ends the hash that it is taken of
        self._last = prompt_token_ids, cache_salt, b"".join(digests)
        return self._last[2]

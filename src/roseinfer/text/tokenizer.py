"""Turns text into token ids, and a token id into the bytes it stands for. Knows no requests.

Any vocabulary of the two families that matter is a table from id to bytes: byte-level ones (GPT-2, Llama 3, Qwen) spell
each byte as one printable character, SentencePiece ones (Llama 2, Mistral) write a space as U+2581 and odd bytes as
`<0xNN>`.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tokenizers
from tokenizers import processors

from roseinfer.errors import ConfigError, InvalidRequest, PromptName, PromptTooLong
from roseinfer.messages import CALL_TAGS
from roseinfer.runtime import memory
from roseinfer.runtime.niceness import be_nicer_in_this_thread
from roseinfer.text.token_lengths import most_chars_per_token
from roseinfer.text.tokenizer_config import TokenizerConfig

INLINE_CHARS = 4096  # about a millisecond of encoding; a hop to a thread costs a tenth of that
LONG_CHARS = 128 * 1024  # encoding takes a few hundred bytes of memory for each token: longer texts wait for each other
_LONG_NICENESS = 10  # more than the event loop, which so has ten times the weight where processors are too few

T = TypeVar("T")


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


class Tokenizer:
    """A vocabulary. Long texts are encoded as a batch, in which `tokenizers` lets the event loop go on.

    Its `encode` keeps the GIL: two megabytes would stop every stream for seconds.
    """

    def __init__(self, inner: tokenizers.Tokenizer, piece_bytes: Callable[[str], bytes], content: bytes) -> None:
        inner.no_truncation()  # a checkpoint may ask for it; a prompt is never cut silently
        inner.no_padding()
        self._inner = inner
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._long_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")
        # For what needs no GIL alone: whoever has that at a lower priority keeps everybody waiting.
        nicer = partial(be_nicer_in_this_thread, _LONG_NICENESS)
        self._long_encoder = ThreadPoolExecutor(1, thread_name_prefix="long-encode", initializer=nicer)
        self.special_ids = frozenset(id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special)
        self._silent_ids = self.special_ids - {inner.token_to_id(tag) for tag in CALL_TAGS}
        vocab = inner.get_vocab(with_added_tokens=True)
        self._pieces = [b""] * (max(vocab.values(), default=-1) + 1)
        for piece, token_id in vocab.items():
            self._pieces[token_id] = piece_bytes(piece)
        self._most_chars_per_token = most_chars_per_token(content, self._pieces)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json`, and what `tokenizer_config.json` wants around a text.

        Raises ConfigError when the first is missing, broken or of an unknown family, or does not fit the second.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"The checkpoint has no tokenizer.json: {directory}.", param="model.path")
        return cls.from_bytes(path.read_bytes(), TokenizerConfig.load(directory))

    @classmethod
    def from_bytes(cls, content: bytes, config: TokenizerConfig | None = None) -> "Tokenizer":
        """Read the content of a `tokenizer.json`; without a `config`, nothing else is said of it."""
        try:
            inner = tokenizers.Tokenizer.from_buffer(content)
            decoder = msgspec.json.decode(content, type=_TokenizerFile).decoder
        except ValueError as error:
            raise ConfigError(f"tokenizer.json cannot be read: {error}.", param="model.path") from None
        if config is not None and config.adds_bos is not None:
            inner.post_processor = _frame(inner, config)
        return cls(inner, _spelling(decoder), content)

    def check_length(self, texts: Sequence[str], max_model_len: int, names: Sequence[PromptName]) -> None:
        """Raise PromptTooLong for a text that is so long that it need not be encoded to know that it does not fit."""
        if self._most_chars_per_token is None:
            return
        for name, text in zip(names, texts, strict=True):
            if len(text) > self._most_chars_per_token * max_model_len:
                message = (
                    f"This model's context is {max_model_len} tokens of at most {self._most_chars_per_token} "
                    f"characters each; the {len(text)} characters of {name} do not fit."
                )
                raise PromptTooLong(message, param=name.param)

    async def encode_prompts(
        self, texts: Sequence[str], max_model_len: int, names: Sequence[PromptName], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of each text. Raises PromptTooLong for one, called so in errors, that does not fit."""
        self.check_length(texts, max_model_len, names)
        return await self.for_text(sum(map(len, texts)), self._encode, texts, add_special_tokens, max_model_len, names)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; with `add_special_tokens` also those the post-processor puts around a text."""
        return await self.for_text(sum(map(len, texts)), self._encode, texts, add_special_tokens)

    def encode_here(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same of one text, in this thread: for work that `for_text` does."""
        return self._encode([text], add_special_tokens)[0]

    async def for_text(self, num_chars: int, work: Callable[..., T], *arguments: object) -> T:
        """Do what takes so long as encoding so many characters: here, or in a thread if it is more than a moment."""
        if num_chars <= INLINE_CHARS:
            return work(*arguments)
        if num_chars <= LONG_CHARS:
            return await self.off_loop(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._long_pool, _leaving_nothing, work, *arguments)

    async def off_loop(self, work: Callable[..., T], *arguments: object) -> T:
        """Run text work that takes more than about a millisecond on one of two threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def _encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        max_model_len: int | None = None,
        names: Sequence[PromptName] = (),
    ) -> list[list[int]]:
        """With a `max_model_len` the texts have `names`, and no list is made of what does not fit."""
        _check_characters(texts)
        if sum(map(len, texts)) <= INLINE_CHARS:
            return [self._inner.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
        if sum(map(len, texts)) <= LONG_CHARS:
            encodings = self._encode_batches(texts, add_special_tokens)
        else:
            self._encode_batches(
                [""], add_special_tokens
            )  # the library's threads, if they must start, start in this one
            encodings = self._long_encoder.submit(self._encode_batches, texts, add_special_tokens).result()
        if max_model_len is not None:
            _check_num_tokens(encodings, max_model_len, names)
        return [encoding.ids for encoding in encodings]

    def _encode_batches(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Each text as a batch of its own: of several the library would encode some in threads of its own.

        Those would be on all cores, and are as nice for ever as the thread that encoded the first batch. "fast" leaves
        out the offsets, which nobody asks for and which take most of the time and the memory.
        """
        encode = self._inner.encode_batch_fast
        return [encode([text], add_special_tokens=add_special_tokens)[0] for text in texts]

    def spell(self, token_id: int) -> bytes:
        """The bytes of a token, special ones spelled out; empty for an id without a token."""
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to generated text: none for a special one."""
        return b"" if token_id in self.special_ids else self.spell(token_id)

    def tagged_text_bytes(self, token_id: int) -> bytes:
        """The same, but the tags of calls are spelled where the vocabulary marks them special, as that of Hermes 3 may.

        For texts that a grammar rules or that are searched for calls.
        """
        return b"" if token_id in self._silent_ids else self.spell(token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        """What the tokens say together, special ones nothing."""
        return b"".join(map(self.text_bytes, token_ids)).decode(errors="replace")

    def close(self) -> None:
        for pool in (self._pool, self._long_pool, self._long_encoder):
            pool.shutdown(wait=False, cancel_futures=True)


def _leaving_nothing(work: Callable[..., T], *arguments: object) -> T:
    try:
        return work(*arguments)
    finally:
        memory.give_back()


def _check_characters(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "The text holds a lone surrogate, which is no character."
            raise InvalidRequest(message, param="prompt") from None


def _check_num_tokens(
    encodings: Sequence[tokenizers.Encoding], max_model_len: int, names: Sequence[PromptName]
) -> None:
    for name, num_tokens in zip(names, map(len, encodings), strict=True):
        if num_tokens > max_model_len:
            message = f"This model's context is {max_model_len} tokens; the {num_tokens} of {name} do not fit."
            raise PromptTooLong(message, param=name.param)


def _frame(inner: tokenizers.Tokenizer, config: TokenizerConfig) -> processors.TemplateProcessing:
    """Puts BOS before and EOS after a text as the configuration says, instead of what tokenizer.json does."""
    wanted = {"bos_token": config.adds_bos, "eos_token": config.adds_eos}
    texts = {name: config.special_tokens[name] for name in wanted if wanted[name] and name in config.special_tokens}
    token_ids = {text: inner.token_to_id(text) for text in texts.values()}
    for name, text in texts.items():
        if token_ids[text] is None:
            raise ConfigError(
                f"tokenizer_config.json: the {name} {text!r} is not in the vocabulary.", param="model.path"
            )
    pieces = [texts.get("bos_token"), "$A", texts.get("eos_token")]
    return processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None], special_tokens=list(token_ids.items())
    )


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    kinds = set(_decoder_kinds(decoder))
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_bytes
    raise ConfigError(
        "tokenizer.json: neither a byte-level nor a SentencePiece vocabulary, so tokens are not bytes.",
        param="model.path",
    )


def _decoder_kinds(decoder: dict[str, Any] | None) -> Sequence[str]:
    if decoder is None:
        return []
    return [decoder["type"], *(kind for part in decoder.get("decoders", ()) for kind in _decoder_kinds(part))]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection: a printable Latin-1 character is its own byte, the other 68 bytes are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, piece))
    except KeyError:  # an added token is plain text
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace("\u2581", " ").encode()

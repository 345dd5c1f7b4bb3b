"""Turns text into token ids, and a token id into the bytes it stands for."""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import tokenizers
from tokenizers import models, processors

from roseinfer.errors import ConfigError, InvalidRequest, PromptName, PromptTooLong
from roseinfer.runtime import memory
from roseinfer.runtime.niceness import be_nicer_in_this_thread
from roseinfer.text.answers.reasoning import REASONING_TAGS
from roseinfer.text.answers.tool_formats import CALL_TAGS
from roseinfer.text.tokenizer.added_tokens import tokenizer_json
from roseinfer.text.tokenizer.files import read_json, token_text
from roseinfer.text.tokenizer.vocabulary import AddedToken, TokenTexts, most_chars_per_token, spelling_of

INLINE_CHARS = 4096  # about a millisecond of encoding; a hop to a thread costs a tenth of that
LONG_CHARS = 128 * 1024  # encoding takes a few hundred bytes of memory for each token: longer texts wait for each other
_LONG_NICENESS = 10  # more than the event loop, which so has ten times the weight where processors are too few

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What `tokenizer_config.json` says beside the vocabulary."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by name: `bos_token`, `eos_token`, ...
    adds_bos: bool | None = None  # before a text; None: as the post-processor of tokenizer.json does
    adds_eos: bool = False  # after a text; counts where `adds_bos` is not None
    chat_template: object = None  # as it stands there, unchecked

    @classmethod
    def load(cls, directory: Path) -> "TokenizerConfig":
        """Read the file, if there is one. Raises ConfigError when it is no JSON object."""
        config = read_json(directory / "tokenizer_config.json")
        named = read_json(directory / "special_tokens_map.json") | config  # older checkpoints name them there
        adds_bos = config.get("add_bos_token")
        return cls(
            special_tokens={name: text for name in named if (text := token_text(name, named[name])) is not None},
            adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
            adds_eos=config.get("add_eos_token") is True,
            chat_template=config.get("chat_template"),
        )


class _Merges(msgspec.Struct, tag="BPE"):
    """The model of a vocabulary with merges, by the library's names."""

    vocab: dict[str, int]
    merges: list[tuple[str, str] | str]  # in older files "a b"
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


def read_library_tokenizer(content: bytes) -> tokenizers.Tokenizer:
    """The library's form of a `tokenizer.json`. Raises ValueError.

    Of 150,000 tokens with merges, the library's own reader leaves 10 MB of holes in the heap: it gets them as objects.
    """
    is_collecting = gc.isenabled()
    gc.disable()  # or hundreds of collections walk the objects, and what observes each lies between them and stays
    try:
        with suppress(Exception):  # of another kind, or damaged, which the library has better words for
            return _read_merges(content)
    finally:
        if is_collecting:
            gc.enable()
    return tokenizers.Tokenizer.from_buffer(content)


def _read_merges(content: bytes) -> tokenizers.Tokenizer:
    file = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(file["added_tokens"], type=list[AddedToken])
    model = msgspec.json.decode(file["model"], type=_Merges)
    options = {name: value for name, value in msgspec.structs.asdict(model).items() if value is not None}
    options["merges"] = [tuple(merge.split(" ")) if isinstance(merge, str) else merge for merge in model.merges]
    file["added_tokens"] = msgspec.Raw(b"[]")
    file["model"] = msgspec.Raw(b'{"type":"BPE","vocab":{},"merges":[]}')
    inner = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(file))
    inner.model = models.BPE(**options)
    inner.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token)) for token in added])  # by the order
    return inner


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
        # Only for work without the GIL: a thread that holds it at a lower priority makes all others wait.
        nicer = partial(be_nicer_in_this_thread, _LONG_NICENESS)
        self._long_encoder = ThreadPoolExecutor(1, thread_name_prefix="long-encode", initializer=nicer)
        self.special_ids = frozenset(id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special)
        self._silent_ids = self.special_ids - {inner.token_to_id(tag) for tag in (*CALL_TAGS, *REASONING_TAGS)}
        pieces = map(inner.id_to_token, range(_num_ids(inner)))
        self._texts = TokenTexts(b"" if piece is None else piece_bytes(piece) for piece in pieces)
        self._num_ids = len(self._texts)
        self._most_chars_per_token = most_chars_per_token(content, self._texts)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json`, and the tokens that `tokenizer_config.json` adds. Raises ConfigError."""
        return cls.from_bytes(tokenizer_json(directory), TokenizerConfig.load(directory))

    @classmethod
    def from_bytes(cls, content: bytes, config: TokenizerConfig | None = None) -> "Tokenizer":
        """Read the content of a `tokenizer.json`; without a `config`, nothing else is said of it."""
        try:
            inner = read_library_tokenizer(content)
            spell = spelling_of(content)
        except ValueError as error:
            raise ConfigError(f"tokenizer.json cannot be read: {error}.", param="model.path") from None
        if config is not None and config.adds_bos is not None:
            inner.post_processor = _frame(inner, config)
        return cls(inner, spell, content)

    def check_length(self, texts: Sequence[str], max_model_len: int, names: Sequence[PromptName]) -> None:
        """Raise PromptTooLong for a text that cannot fit, whatever its tokens are."""
        if self._most_chars_per_token is None:
            return
        for name, text in zip(names, texts, strict=True):
            if len(text) > self._most_chars_per_token * max_model_len:
                message = (
                    f"{PromptTooLong.limit(max_model_len)} of at most {self._most_chars_per_token} characters each; "
                    f"the {len(text)} characters of {name} do not fit."
                )
                least = -(-len(text) // self._most_chars_per_token)
                raise PromptTooLong(message, param=name.param, num_tokens=least, max_model_len=max_model_len)

    async def encode_prompts(
        self, texts: Sequence[str], max_model_len: int, names: Sequence[PromptName], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Token ids of each text. Raises PromptTooLong that names the text that does not fit."""
        self.check_length(texts, max_model_len, names)
        return await self.for_text(sum(map(len, texts)), self._encode, texts, add_special_tokens, max_model_len, names)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; with `add_special_tokens` also those the post-processor puts around a text."""
        return await self.for_text(sum(map(len, texts)), self._encode, texts, add_special_tokens)

    def encode_here(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As `encode`, of one text in this thread: for use in work that `for_text` runs."""
        return self._encode([text], add_special_tokens)[0]

    async def for_text(self, num_chars: int, work: Callable[..., T], *arguments: object) -> T:
        """Run work that takes as long as encoding a number of characters: here if that is about a millisecond."""
        if num_chars <= INLINE_CHARS:
            return work(*arguments)
        if num_chars <= LONG_CHARS:
            return await self.off_loop(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(
            self._long_pool, _and_give_memory_back, work, *arguments
        )

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
        """Raises PromptTooLong with a `max_model_len`, which needs `names`; no list of ids is made then."""
        _check_characters(texts)
        if sum(map(len, texts)) <= INLINE_CHARS:
            return [self._inner.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
        if sum(map(len, texts)) <= LONG_CHARS:
            encodings = self._encode_batches(texts, add_special_tokens)
        else:
            self._encode_batches([""], add_special_tokens)  # the library starts its threads here, at this priority
            encodings = self._long_encoder.submit(self._encode_batches, texts, add_special_tokens).result()
        if max_model_len is not None:
            for name, num in zip(names, map(len, encodings), strict=True):
                if num > max_model_len:
                    message = f"{PromptTooLong.limit(max_model_len)}; the {num} of {name} do not fit."
                    raise PromptTooLong(message, param=name.param, num_tokens=num, max_model_len=max_model_len)
        return [encoding.ids for encoding in encodings]

    def _encode_batches(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        """Encode each text as a batch of its own: a batch of several would use the library's threads on all cores.

        Those keep the priority of the thread that encoded the first batch. "fast" leaves out the costly offsets.
        """
        encode = self._inner.encode_batch_fast
        return [encode([text], add_special_tokens=add_special_tokens)[0] for text in texts]

    def spell(self, token_id: int) -> bytes:
        """The bytes of a token, special ones spelled out; empty for an id without a token."""
        return self._texts[token_id] if token_id < self._num_ids else b""

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to generated text: none for a special one."""
        return b"" if token_id in self.special_ids else self.spell(token_id)

    def tagged_text_bytes(self, token_id: int) -> bytes:
        """As `text_bytes`, with the tags of calls (Hermes 3) and thoughts (Magistral) where they are special."""
        return b"" if token_id in self._silent_ids else self.spell(token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens; special ones add none."""
        return b"".join(map(self.text_bytes, token_ids)).decode(errors="replace")

    def close(self) -> None:
        for pool in (self._pool, self._long_pool, self._long_encoder):
            pool.shutdown(wait=False, cancel_futures=True)


def _and_give_memory_back(work: Callable[..., T], *arguments: object) -> T:
    try:
        return work(*arguments)
    finally:
        memory.give_back()


def _num_ids(inner: tokenizers.Tokenizer) -> int:
    """One more than the largest id. Where no id is missing, as nearly always, no table of all is made to find it."""
    num_tokens = inner.get_vocab_size(with_added_tokens=True)
    if all(inner.id_to_token(token_id) is not None for token_id in range(num_tokens)):
        return num_tokens
    return 1 + max(inner.get_vocab(with_added_tokens=True).values())


def _check_characters(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "The text holds a lone surrogate, which is no character."
            raise InvalidRequest(message, param="prompt") from None


def _frame(inner: tokenizers.Tokenizer, config: TokenizerConfig) -> processors.TemplateProcessing:
    """Puts BOS before and EOS after a text as tokenizer_config.json says, instead of tokenizer.json."""
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

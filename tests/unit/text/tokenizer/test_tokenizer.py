"""A vocabulary is read whole or refused by name; long texts are encoded on another thread."""

import ast
import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from roseinfer.errors import ConfigError, InvalidRequest, PromptName, PromptTooLong
from roseinfer.text.text_model import TextModel
from roseinfer.text.tokenizer.detokenizer import Detokenizer
from roseinfer.text.tokenizer.tokenizer import INLINE_CHARS, LONG_CHARS, Tokenizer, read_library_tokenizer
from tests.unit.server.harness import BOS, EOS, HUGE_TEXT, TOOL, byte_tokenizer, ids, write_checkpoint


def wrap(inner: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer.from_bytes(inner.to_str().encode())


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.param == "model.path"


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b'{"model": 3}'])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As where it belongs to another user."""
    write_checkpoint(tmp_path)
    for each in ("special_tokens_map.json", "chat_template.jinja"):
        (tmp_path / each).write_text("{}")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=f"{tmp_path}/{name} cannot be read: Permission denied") as caught:
        TextModel.load(tmp_path, None, "auto")
    assert caught.value.param == "model.path"


def test_a_family_that_is_not_bytes_is_refused() -> None:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="its decoder is none of those"):
        wrap(inner)


async def test_words_without_a_decoder_stand_with_spaces_between_them() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "word": 2}, unk_token="[UNK]"))  # noqa: S106 - no password
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = wrap(inner)
    [token_ids] = await tokenizer.encode(["word a other word"], add_special_tokens=True)
    text = Detokenizer(tokenizer.text_bytes).push(token_ids)
    assert text == f" {inner.decode(token_ids)}" == " word a [UNK] word"


async def test_encoding_adds_what_the_post_processor_asks_for_only_when_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, with_bos=True))
    assert await tokenizer.encode(["a", "b"], add_special_tokens=True) == [[BOS, 97], [BOS, 98]]
    assert await tokenizer.encode(["a<|eos|>"], add_special_tokens=False) == [[97, EOS]]


@pytest.mark.parametrize("with_bos", [False, True], ids=["plain file", "file with bos"])
@pytest.mark.parametrize(
    ("wishes", "around"),
    [
        ({"add_bos_token": True}, ([BOS], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([BOS], [EOS])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "bos_token": None}, ([], [])),
    ],
    ids=str,
)
async def test_the_configuration_decides_what_stands_around_a_text(
    tmp_path: Path, with_bos: bool, wishes: dict[str, object], around: tuple[list[int], list[int]]
) -> None:
    change_config(write_checkpoint(tmp_path, with_bos=with_bos), **wishes)
    before, after = around
    tokenizer = Tokenizer.load(tmp_path)
    assert await tokenizer.encode(["a"], add_special_tokens=True) == [[*before, 97, *after]]
    assert await tokenizer.encode(["a"], add_special_tokens=False) == [[97]]


async def test_an_older_checkpoint_names_its_tokens_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|bos|>"}}))
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    assert await Tokenizer.load(tmp_path).encode(["a"], add_special_tokens=True) == [[BOS, 97]]


def test_a_bos_that_is_no_token_is_named(tmp_path: Path) -> None:
    wishes = {"add_bos_token": True, "bos_token": "<nobody>"}
    change_config(write_checkpoint(tmp_path), **wishes)
    with pytest.raises(ConfigError, match="the bos_token '<nobody>' is not in the vocabulary") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.param == "model.path"


async def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    inner.enable_truncation(max_length=2)
    inner.enable_padding(length=5)
    assert await wrap(inner).encode(["abc"], add_special_tokens=True) == [ids("abc")]


async def test_long_texts_leave_the_event_loop_and_short_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = wrap(byte_tokenizer())
    threads: list[int] = []

    def recording(texts: list[str]) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr("roseinfer.text.tokenizer.tokenizer._check_characters", recording)
    assert await tokenizer.encode(["x" * INLINE_CHARS], add_special_tokens=True) == [[ord("x")] * INLINE_CHARS]
    half = "y" * (INLINE_CHARS // 2 + 1)
    assert await tokenizer.encode([half, half], add_special_tokens=True) == [ids(half)] * 2
    assert threads[0] == threading.get_ident() != threads[1]
    tokenizer.close()


async def test_a_long_text_is_encoded_beside_the_event_loop_and_not_only_in_another_thread() -> None:
    """A library that kept the GIL would let the loop turn once, at the end."""
    tokenizer = wrap(byte_tokenizer())
    encoding = asyncio.ensure_future(tokenizer.encode(["word " * 100_000], add_special_tokens=True))
    num_turns = 0
    while not encoding.done():
        num_turns += 1
        await asyncio.sleep(0.001)
    assert len((await encoding)[0]) == 500_000
    assert num_turns > 10
    tokenizer.close()


async def test_very_long_texts_wait_for_each_other_and_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding takes a few hundred bytes for each token: two megabytes of text at a time are enough."""
    tokenizer = wrap(byte_tokenizer())
    num_given_back = num_at_work = 0
    both = threading.Barrier(2)

    def give_back() -> None:
        nonlocal num_given_back
        num_given_back += 1

    def work(number: int) -> int:
        nonlocal num_at_work
        num_at_work += 1
        assert num_at_work == 1
        time.sleep(0.02)  # for another to come in, if it may
        num_at_work -= 1
        return number

    monkeypatch.setattr("roseinfer.runtime.memory.give_back", give_back)
    long = [tokenizer.for_text(LONG_CHARS + 1, work, number) for number in range(4)]
    assert await asyncio.gather(*long) == [0, 1, 2, 3]
    assert num_given_back == 4
    short = [tokenizer.for_text(LONG_CHARS, both.wait, 10) for _ in range(2)]  # these meet
    assert sorted(await asyncio.gather(*short)) == [0, 1]
    assert num_given_back == 4
    tokenizer.close()


NICENESS_OF_THREADS = """
import asyncio, os
from pathlib import Path
from roseinfer.text.tokenizer.tokenizer import LONG_CHARS, Tokenizer
from tests.unit.server.harness import byte_tokenizer

def run_ms():
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e6 for task in TASKS.iterdir()}

async def main():
    tokenizer = Tokenizer.from_bytes(byte_tokenizer().to_str().encode())
    ordinary, long = "word " * 2000, "word " * (LONG_CHARS // 5 + 1)
    before, own = run_ms(), os.getpriority(os.PRIO_PROCESS, 0)
    for texts in ([long], [ordinary] * 10, [long] * 4, [ordinary] * 10):
        await tokenizer.encode(texts, add_special_tokens=True)
    added = {os.getpriority(os.PRIO_PROCESS, thread) - own: [] for thread in run_ms().keys() - before.keys()}
    for thread in run_ms().keys() - before.keys():
        added[os.getpriority(os.PRIO_PROCESS, thread) - own].append(run_ms()[thread] > 3)
    print({niceness: sorted(is_busy) for niceness, is_busy in sorted(added.items())})

TASKS = Path("/proc/self/task")
asyncio.run(main())
"""


def test_one_thread_encodes_long_texts_at_a_lower_priority_and_the_librarys_own_encode_none() -> None:
    done = subprocess.run([sys.executable, "-c", NICENESS_OF_THREADS], check=True, capture_output=True, text=True)
    of_ordinary, of_long = ast.literal_eval(done.stdout).values()
    assert of_ordinary[-2:] == [True, True]  # ordinary texts, and lists of long ones
    assert not any(of_ordinary[:-2])
    assert of_long == [True]


async def test_a_prompt_that_does_not_fit_is_refused_without_a_list_of_its_ids() -> None:
    tokenizer = wrap(byte_tokenizer())
    texts, names = ["a" * 5000, "b" * 6000], [PromptName("prompt[0]"), PromptName("prompt[1]")]
    assert await tokenizer.encode_prompts(texts, 6000, names, add_special_tokens=True) == [*map(ids, texts)]
    with pytest.raises(PromptTooLong, match="is 5999 tokens; the 6000 of") as caught:
        await tokenizer.encode_prompts(texts, 5999, names, add_special_tokens=True)
    assert caught.value.param == "prompt[1]"
    tokenizer.close()


def test_every_id_has_its_bytes() -> None:
    tokenizer = wrap(byte_tokenizer())
    assert [tokenizer.text_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.special_ids == {BOS, EOS}
    assert (tokenizer.text_bytes(EOS), tokenizer.spell(EOS)) == (b"", b"<|eos|>")
    assert tokenizer.text_bytes(TOOL) == b"<tool call>"
    assert tokenizer.text_bytes(10_000) == tokenizer.spell(10_000) == b"", "a model's vocabulary may be padded"


def test_a_sentencepiece_vocabulary() -> None:
    """Llama 2's way: U+2581 for a space, `<0xNN>` for a byte that is in no piece."""
    pieces = ["<unk>", "<s>", "\u2581Hello", "\u2581w", "orld", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = wrap(inner)
    wave = [5 + byte for byte in "👋".encode()]
    detokenizer = Detokenizer(tokenizer.text_bytes)
    assert "".join(detokenizer.push([token_id]) for token_id in [1, 2, 3, 4, *wave]) == " Hello world👋"


async def test_a_lone_surrogate_is_no_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(InvalidRequest, match="surrogate"):
        await Tokenizer.load(tmp_path).encode(["a\udcffb"], add_special_tokens=False)


def test_an_id_may_be_missing() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))  # noqa: S106
    inner.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_bytes(inner.to_str().encode())
    assert [tokenizer.spell(token_id) for token_id in (0, 1, 7, 8)] == [b"a", b"", b"b", b""]


def test_a_text_that_is_refused_unread_is_measured_in_characters() -> None:
    tokenizer = Tokenizer.from_bytes(byte_tokenizer().to_str().encode())
    most = 4 * len(HUGE_TEXT)
    tokenizer.check_length(["x" * most], 4, [PromptName("prompt")])
    with pytest.raises(PromptTooLong) as caught:
        tokenizer.check_length(["", "x" * (most + 1)], 4, [PromptName("prompt[0]"), PromptName("prompt[1]")])
    assert caught.value.param == "prompt[1]"
    assert caught.value.message == (
        f"This model's maximum context length is 4 tokens of at most {len(HUGE_TEXT)} characters each; "
        f"the {most + 1} characters of `prompt[1]` do not fit."
    )


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(1, 12))
def test_no_text_that_fits_is_refused(text: str, max_model_len: int) -> None:
    inner = byte_tokenizer()
    inner.add_tokens(["     ", "\u4e2d\u6587", "<|x|>"])
    tokenizer = Tokenizer.from_bytes(inner.to_str().encode())
    tokenizer._most_chars_per_token = 6  # without the huge token, whose text no example holds
    [token_ids] = asyncio.run(tokenizer.encode([text], add_special_tokens=False))
    try:
        tokenizer.check_length([text], max_model_len, [PromptName("prompt")])
    except PromptTooLong:
        assert len(token_ids) > max_model_len


ALPHABET = {character: 90 + i for i, character in enumerate("abcd\u2581")}
BYTES = {f"<0x{byte:02X}>": 200 + byte for byte in range(256)}
MERGED = {"ab": 1, "cd": 2, "abcd": 3, "\u2581ab": 4}
MERGES = [("a", "b"), ("c", "d"), ("ab", "cd"), ("\u2581", "ab")]
SUFFIXED = {"a": 0, "b": 1, "a</w>": 2, "##b</w>": 3, "##b": 4, "ab": 5, "ab</w>": 6}
ADDED = [
    AddedToken("<call>", normalized=False),
    AddedToken("abcd", lstrip=True, rstrip=True),  # which the model has
    AddedToken("<|end|>", special=True),
    AddedToken("word", single_word=True),
]


def merging(**options: Any) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({**ALPHABET, **BYTES, **MERGED}, MERGES, **options))


def decorated() -> tokenizers.Tokenizer:
    inner = merging(byte_fallback=True, fuse_unk=True, unk_token="a")  # noqa: S106
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_tokens(ADDED)
    inner.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 457)])
    inner.enable_truncation(9)
    inner.enable_padding(pad_id=3, pad_token="abcd")  # noqa: S106
    return inner


def suffixed() -> tokenizers.Tokenizer:
    merges = [("a", "##b"), ("a", "##b</w>")]
    return tokenizers.Tokenizer(
        models.BPE(SUFFIXED, merges, end_of_word_suffix="</w>", continuing_subword_prefix="##", dropout=0.5)
    )


@pytest.mark.parametrize(
    "inner",
    [
        byte_tokenizer(with_bos=True),
        merging(ignore_merges=True),
        decorated(),
        suffixed(),
        tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),  # noqa: S106
    ],
)
@pytest.mark.parametrize("form", ["pairs", "lines", "untyped"])
def test_a_vocabulary_is_what_the_librarys_own_reader_makes_of_it(inner: tokenizers.Tokenizer, form: str) -> None:
    file = json.loads(inner.to_str())
    if form == "lines" and "merges" in file["model"]:
        file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]
    if form == "untyped":
        del file["model"]["type"]
    content = json.dumps(file).encode()
    read, reference = read_library_tokenizer(content), tokenizers.Tokenizer.from_buffer(content)
    assert read.to_str() == reference.to_str()
    if file["model"].get("dropout") is None:
        for text in ("abcd ab<call>cd", " abcd word aword\u00e9", "a<|end|>b"):
            assert read.encode(text).ids == reference.encode(text).ids


READING = """
import sys
from pathlib import Path
from roseinfer.runtime import memory
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.text.tokenizer.tokenizer import Tokenizer

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

memory.prefer_giving_back()
before = resident_mb()
pauses, kept = GcPauses(), []
pauses.listeners.append(lambda *pause: kept.append(pause))
with pauses:
    tokenizer = Tokenizer.from_bytes(Path(sys.argv[1]).read_bytes())
memory.give_back()
print(resident_mb() - before)
"""


def test_reading_merges_leaves_no_holes_also_where_collections_are_observed(tmp_path: Path) -> None:
    """Of 150,000 tokens tables have 34 MB, and with what the library's own reader leaves it was 56."""
    characters = [chr(0x4E00 + i) for i in range(390)]
    merges = [(left, right) for left in characters for right in characters]
    vocab = {token: i for i, token in enumerate((*characters, *("".join(merge) for merge in merges)))}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges))
    inner.decoder = decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    arguments = [sys.executable, "-c", READING, str(tmp_path / "tokenizer.json")]
    taken_mb = float(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert taken_mb < 47

"""Checkpoints without tokenizer.json: each kind of file that transformers converts, made small, and kept afterwards."""

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, CharBPETokenizer
from transformers import AutoTokenizer, GPT2Tokenizer

from roseinfer.errors import ConfigError
from roseinfer.text.grammar.compiler import Vocabulary
from roseinfer.text.tokenizer import files as tokenizer_files
from roseinfer.text.tokenizer.files import tokenizer_file
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from roseinfer.text.tokenizer.vocabulary import _BYTE_OF
from tests.repo.tree import ROOT

TEXTS = [
    "Hello world",
    " leading and  double  spaces",
    "wörld, 漢字 🎉 \u200b",
    "tabs\tand\nnew lines\r\n",
    "x = f(1) + [2, 3]  # code",
    "‘curly’ — dashes… ﬁ ligature",
    "<s>no special</s>",
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SIZE = 600


def corpus(directory: Path) -> str:
    path = directory / "corpus"
    path.write_text((ROOT / "docs" / "architecture.md").read_text() * 3)
    return str(path)


def write(directory: Path, model_type: str, **config: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": SIZE}))


def sentence_pieces(kind: str, directory: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        input=corpus(directory),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=SIZE,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=3,
    )


def llama(directory: Path) -> None:
    sentence_pieces("bpe", directory)
    write(directory, "llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, **TOKENS)


def gemma(directory: Path) -> None:
    sentence_pieces("bpe", directory)
    write(directory, "gemma", tokenizer_class="GemmaTokenizer", pad_token="<unk>", **TOKENS)  # noqa: S106 - of text


def byte_level(directory: Path) -> None:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([corpus(directory)], vocab_size=SIZE - 1)
    tokenizer.save_model(str(directory))
    write(directory, "qwen2", tokenizer_class="Qwen2Tokenizer")


def tiktoken(directory: Path) -> None:
    byte_level(directory)
    vocab = json.loads((directory / "vocab.json").read_text())
    for name in ("vocab.json", "merges.txt"):
        (directory / name).unlink()
    ranked = [bytes(map(_BYTE_OF.__getitem__, piece)) for piece in sorted(vocab, key=vocab.__getitem__)]
    lines = (base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(ranked))
    (directory / "tokenizer.model").write_bytes(b"".join(lines))
    write(directory, "llama", tokenizer_class="PreTrainedTokenizerFast")


def word_pieces(directory: Path) -> None:
    tokenizer = BertWordPieceTokenizer(lowercase=False)
    tokenizer.train([corpus(directory)], vocab_size=SIZE)
    tokenizer.save_model(str(directory))
    write(directory, "bert", tokenizer_class="BertTokenizer", do_lower_case=False)


def word_ends(directory: Path) -> None:
    tokenizer = CharBPETokenizer(lowercase=True)
    tokenizer.train([corpus(directory)], vocab_size=SIZE)
    tokenizer.save_model(str(directory))
    write(directory, "openai-gpt", tokenizer_class="OpenAIGPTTokenizer", unk_token="<unk>")  # noqa: S106 - of text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def converted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported transformers; that takes one of its own two seconds."""

    def run(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        assert command[:3] == [sys.executable, "-m", tokenizer_files.__name__]
        return subprocess.CompletedProcess(command, tokenizer_files._main(*command[3:]))

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("converted_here")
@pytest.mark.parametrize("make", [llama, gemma, byte_level, tiktoken, word_pieces, word_ends])
def test_it_is_what_transformers_makes_of_the_files(make: Callable[[Path], None], home: Path) -> None:
    make(home)
    ours, theirs = Tokenizer.load(home), AutoTokenizer.from_pretrained(home)
    has_all_bytes = make not in {word_pieces, word_ends}
    for text in TEXTS:
        token_ids = ours.encode_here(text, add_special_tokens=True)
        assert token_ids == theirs(text).input_ids
        plain = ours.encode_here(text, add_special_tokens=False)
        if has_all_bytes:
            told = b"".join(map(ours.spell, plain)).decode()
            assert told.removeprefix(" ") == text.removeprefix(" ")
        else:
            told = b"".join(map(ours.text_bytes, plain)).decode()
            theirs_told = theirs.decode(plain, skip_special_tokens=True)  # which takes spaces before punctuation away
            assert "".join(told.split()) == "".join(theirs_told.split())
    if has_all_bytes:
        assert Vocabulary.load(home, SIZE, [2]).vocab_size == SIZE


@pytest.mark.usefixtures("converted_here")
@pytest.mark.parametrize("model_type", ["phi3", "mistral"])
def test_the_class_that_a_checkpoint_names_reads_what_its_type_does_not(model_type: str, home: Path) -> None:
    byte_level(home)
    write(home, model_type, tokenizer_class="GPT2TokenizerFast")
    ours, theirs = Tokenizer.load(home), GPT2Tokenizer.from_pretrained(home)
    for text in TEXTS:
        assert ours.encode_here(text, add_special_tokens=True) == theirs(text).input_ids


@pytest.mark.usefixtures("converted_here")
@pytest.mark.parametrize("name", ["AutoModel", "NoSuchTokenizer", None])
def test_a_class_that_is_no_tokenizer_is_named(name: str | None, home: Path) -> None:
    byte_level(home)
    write(home, "phi3", tokenizer_class=name)
    with pytest.raises(ValueError, match=f"no tokenizer by the `tokenizer_class` {name}"):
        Tokenizer.load(home)


def test_a_process_of_its_own_makes_it(home: Path) -> None:
    llama(home)
    loaded = Tokenizer.load(home)
    for text in TEXTS:
        theirs = AutoTokenizer.from_pretrained(home)(text).input_ids
        assert loaded.encode_here(text, add_special_tokens=True) == theirs


@pytest.mark.usefixtures("converted_here")
def test_it_is_kept_and_made_anew_when_damaged(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level(home)
    with tokenizer_file(home) as first:
        content = first.read_bytes()
    assert first.is_relative_to(home / ".cache")
    with monkeypatch.context() as patched:
        patched.setattr(tokenizer_files, "_convert", None)  # or it would be called
        with tokenizer_file(home) as second:
            assert second == first
    first.write_bytes(content[:100])
    with tokenizer_file(home) as anew:
        assert anew.read_bytes() == content
    (home / "merges.txt").write_text("#version: 0.2\n")
    with tokenizer_file(home) as other:
        assert other != first, "other files, another tokenizer"
    assert not list((home / ".cache").rglob("*.partial"))


@pytest.mark.usefixtures("converted_here")
def test_a_cache_that_cannot_be_written_is_no_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level(home)
    (home / ".cache").write_text("a file")
    (temporary := home / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert Tokenizer.load(home).encode_here("Hello", add_special_tokens=False)
    assert not list(temporary.iterdir()), "each start of a server would leave some more"


@pytest.mark.usefixtures("converted_here")
def test_a_user_without_a_home_is_no_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    byte_level(home)
    monkeypatch.setattr(Path, "home", refuse)
    assert Tokenizer.load(home).encode_here("Hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "The checkpoint has no tokenizer"),
        (
            {"tokenizer.model": b"neither", "config.json": b'{"model_type": "llama"}'},
            "cannot be converted",
        ),
        ({"vocab.json": b"{", "merges.txt": b"", "config.json": b'{"model_type": "gpt2"}'}, "cannot be converted"),
    ],
)
def test_files_that_are_none_are_named(files: dict[str, bytes], words: str, home: Path) -> None:
    for name, content in files.items():
        (home / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        Tokenizer.load(home)
    assert refused.value.param == "model.path"
    assert str(home) in refused.value.message

"""Checkpoints of bytes with added tokens that are written as those of Qwen2.5, Qwen3 and Hermes 3."""

from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from roseinfer.messages import EngineInfo
from roseinfer.text.answers.tool_formats import CALL_TAGS
from tests.unit.server import harness

Family = Literal["qwen2.5", "qwen3", "hermes3"]
FAMILIES: tuple[Family, ...] = ("qwen2.5", "qwen3", "hermes3")
EOS_TEXT = "<|im_end|>"
CONTROL = ("<|endoftext|>", "<|im_start|>", EOS_TEXT)
# Some begin with others, and one is written like no tag.
TEXT = ("<think>", "</think>", "<tool_response>", "<tool_call>s", "<|fim|>", "<|fim|>_pad", "[b]")

# The tags in pieces are some three tokens, as in a large vocabulary: the library looks no further back for another way.
WORDS = ("</", "<|", "|>", ">Ċ", "tool", "call", "response", "think", "fim", "pad", "user", "im", "end")


def make_tokenizer(family: Family) -> tokenizers.Tokenizer:
    """The first 256 ids are the bytes, in no order that matters; some tokens of several bytes follow."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(word[:i], word[i]) for word in WORDS for i in range(1, len(word))]
    vocab = {piece: i for i, piece in enumerate([*pieces, *("".join(merge) for merge in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*CONTROL[:2]])
    tags_are_special = family == "hermes3"
    tokenizer.add_tokens([AddedToken(tag, special=tags_are_special, normalized=False) for tag in CALL_TAGS])
    tokenizer.add_special_tokens([EOS_TEXT])  # behind tokens that are text
    if family != "qwen2.5":
        tokenizer.add_tokens([AddedToken(text, normalized=False, lstrip=text == "<think>") for text in TEXT])
    return tokenizer


def write_checkpoint(directory: Path, family: Family) -> Path:
    make_tokenizer(family).save(str(directory / "tokenizer.json"))
    return directory


def engine_info(directory: Path, family: Family) -> EngineInfo:
    tokenizer = make_tokenizer(family)
    return harness.engine_info(
        checkpoint_dir=str(directory),
        vocab_size=tokenizer.get_vocab_size() + 20,  # rows that no token belongs to
        eos_token_ids=[tokenizer.token_to_id(EOS_TEXT)],
        max_model_len=4096,
    )

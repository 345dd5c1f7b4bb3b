"""A checkpoint of bytes: ids 0 to 255 are the bytes themselves, with two special tokens above; the model has more."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from roseinfer.messages import EngineInfo
from tests.unit.server import harness

BOS, EOS = 256, 257
VOCAB_SIZE = 300


def write_checkpoint(directory: Path) -> Path:
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in alphabet]
    vocab = {chr(byte): byte for byte in alphabet} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def engine_info(directory: Path) -> EngineInfo:
    return harness.engine_info(checkpoint_dir=str(directory), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])

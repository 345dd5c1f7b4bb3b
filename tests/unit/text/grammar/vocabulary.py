"""A checkpoint of bytes: ids 0 to 255 are the bytes themselves, with two special tokens above; the model has more."""

from pathlib import Path

from roseinfer.messages import EngineInfo
from tests.unit.server import harness

BOS, EOS = 256, 257
VOCAB_SIZE = 300


def write_checkpoint(directory: Path) -> Path:
    harness.bytes_alone().save(str(directory / "tokenizer.json"))
    return directory


def engine_info(directory: Path) -> EngineInfo:
    return harness.engine_info(checkpoint_dir=str(directory), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])

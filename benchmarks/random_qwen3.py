"""Makes a checkpoint of random weights with the shape of Qwen3-0.6B, in bfloat16, and a tokenizer. Downloads nothing.

    python -m benchmarks.random_qwen3 [--directory DIR]

28 layers of width 1024, 16 heads of 128 over 8 of keys, 151,936 tokens whose embeddings are the head too: 596,049,920
parameters, 1.19 GB, made in about half a minute. For what depends on shapes and not on what a model has learnt: speed,
memory, the time until a server is ready. The tokenizer is `random_gpt2`'s with more tokens, each joined of two others.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.random_gpt2 import write_tokenizer

RECIPE = 1
NUM_TRAINED_TOKENS = 100_000  # the standard library has a few more
STD = 0.06  # as in random_gpt2: with flat logits a greedy choice would be decided by rounding
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def default_directory() -> Path:
    """In the user's cache, as that of `random_gpt2`."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return Path.home() / ".cache" / "roseinfer" / "benchmarks" / f"qwen3-0.6b-random-{RECIPE}-{version}"


def make(directory: Path) -> Path:
    """Make the checkpoint unless it is there. Returns its directory."""
    if not (directory / "config.json").is_file():
        new = directory.with_name(f"{directory.name}.new")  # renamed when it is complete
        new.mkdir(parents=True, exist_ok=True)
        write_tokenizer(new, NUM_TRAINED_TOKENS)
        join_tokens(new / "tokenizer.json", QWEN3_06B["vocab_size"])
        write_model(new)
        new.rename(directory)
    return directory


def join_tokens(file: Path, vocab_size: int) -> None:
    """Add tokens up to `vocab_size`, so that every id has a text; added tokens would take seconds to read."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for pair in itertools.pairwise(list(vocabulary)[1:]):  # but for the end of a text
        if len(vocabulary) == vocab_size:
            break
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            merges.append(list(pair))
    assert len(vocabulary) == vocab_size
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write_model(directory: Path, **changes: Any) -> None:
    """Write the weights and the configuration as transformers does; `changes` are of `QWEN3_06B`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**QWEN3_06B | changes), dtype=torch.bfloat16)  # noqa: SLF001
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=STD, generator=generator)
        else:
            torch.nn.init.ones_(parameter)
    model.save_pretrained(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=default_directory(), help="default: %(default)s")
    print(make(parser.parse_args().directory))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

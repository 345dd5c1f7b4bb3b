"""Makes a GPT-2 small of random weights, and a tokenizer from the standard library's sources. Downloads nothing.

    python -m benchmarks.random_gpt2 [--directory DIR] [--layers 12] [--width 768] [--vocab-size 50257]

Speed depends on shapes and not on what a model has learnt, so the shapes are those of GPT-2 small (Radford et al.
2019: 12 layers, width 768, 12 heads, 50257 tokens, 1024 positions, 124,439,808 parameters) and the numbers are drawn.
The same Python, torch and transformers give the same files. The default directory names the recipe's version, so a
changed recipe is a new directory.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RECIPE = 2
VOCAB_SIZE = 50257
END = "<|endoftext|>"
NUM_LAYERS, WIDTH, HEAD_DIM, NUM_POSITIONS = 12, 768, 64, 1024
MAX_CORPUS_BYTES = 32_000_000
EMBEDDING_STD = 0.02
# Three times what training begins with: with flat logits a greedy choice would be decided by rounding.
MATRIX_STD = 0.06


@dataclass(frozen=True, slots=True)
class Gpt2Shape:
    """Sizes of a GPT-2 with 1024 positions; heads are 64 wide."""

    num_layers: int
    width: int
    vocab_size: int


GPT2_SMALL = Gpt2Shape(NUM_LAYERS, WIDTH, VOCAB_SIZE)


def default_directory() -> Path:
    """In the user's cache; a tokenizer is of one standard library, so Python's version is part of the name."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return Path.home() / ".cache" / "roseinfer" / "benchmarks" / f"gpt2-random-{RECIPE}-{version}"


def make(directory: Path, shape: Gpt2Shape = GPT2_SMALL) -> Path:
    """Make the model unless it is there. Returns its directory."""
    if not (directory / "config.json").is_file():
        new = directory.with_name(f"{directory.name}.new")  # renamed when it is complete
        new.mkdir(parents=True, exist_ok=True)
        write_tokenizer(new, shape.vocab_size)
        write_model(new, shape)
        new.rename(directory)
    return directory


def corpus() -> Iterator[str]:
    """Sources of the standard library in the order of their names, up to MAX_CORPUS_BYTES."""
    num_bytes = 0
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or num_bytes > MAX_CORPUS_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # tests of other encodings
            continue
        num_bytes += len(text)
        yield text


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level BPE of `vocab_size` tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    # A small standard library yields fewer tokens; every id that the model can sample must have a text.
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|unused{i}|>") for i in range(missing)])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": NUM_POSITIONS,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def write_model(directory: Path, shape: Gpt2Shape) -> None:
    """Write the weights and the configuration as transformers does."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=NUM_POSITIONS,
        n_embd=shape.width,
        n_layer=shape.num_layers,
        n_head=shape.width // HEAD_DIM,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),  # END is the trainer's first token
    )
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = EMBEDDING_STD if name.endswith(("wte.weight", "wpe.weight")) else MATRIX_STD
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    model.save_pretrained(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=default_directory(), help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=WIDTH, help="default: %(default)s")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="default: %(default)s")
    arguments = parser.parse_args()
    shape = Gpt2Shape(arguments.layers, arguments.width, arguments.vocab_size)
    if shape != GPT2_SMALL and arguments.directory == default_directory():
        parser.error("--directory: the default is of GPT-2 small")
    print(make(arguments.directory, shape))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

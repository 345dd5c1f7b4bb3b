"""Times of the library of grammars: compiling a schema, a mask, a token; for the vocabularies of two checkpoints.

python benchmarks/grammar_masks.py CHECKPOINT VOCAB_SIZE
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from roseinfer.grammar.library import Vocabulary
from roseinfer.messages import Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{3,40}[0-9]*$"} for i in range(100)},
    "required": [f"p{i}" for i in range(100)],
    "additionalProperties": False,
}
SCHEMAS = {"three properties": PERSON, "any object": {"type": "object"}, "100 properties": WIDE}


def measure(vocabulary: Vocabulary, grammar: Grammar) -> str:
    """Medians over random walks of up to 200 tokens through the grammar, with eight seeds."""
    compiling, masks, accepting = [], [], []
    for _ in range(5):
        began = time.perf_counter()
        compiled = vocabulary.compile(grammar)
        compiling.append(time.perf_counter() - began)
    mask = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
    for seed in range(8):
        matcher, random = compiled.matcher(), np.random.default_rng(seed)
        for _ in range(200):
            began = time.perf_counter()
            matcher.fill(mask)
            masks.append(time.perf_counter() - began)
            token = int(random.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            began = time.perf_counter()
            matcher.accept(token)
            accepting.append(time.perf_counter() - began)
            if matcher.is_over or matcher.has_failed:
                break
    return (
        f"compile {np.median(compiling) * 1e3:.2f} ms, mask median {np.median(masks) * 1e6:.1f} us "
        f"p99 {np.percentile(masks, 99) * 1e6:.0f} us max {max(masks) * 1e6:.0f} us, "
        f"token {np.median(accepting) * 1e6:.1f} us"
    )


def main() -> None:
    vocabulary = Vocabulary.load(Path(sys.argv[1]), int(sys.argv[2]), [0])
    for name, schema in SCHEMAS.items():
        print(f"{name}: {measure(vocabulary, Grammar('json_schema', json.dumps(schema)))}")


if __name__ == "__main__":
    main()

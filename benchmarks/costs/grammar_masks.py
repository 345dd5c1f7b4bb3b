"""Measures the library of grammars: compiling a schema, a mask, a token; for the vocabulary of a checkpoint.

    python -m benchmarks.costs.grammar_masks CHECKPOINT VOCAB_SIZE

And the first masks of sequences whose schema has many optional properties, if the library's limit were higher.
"""

import json
import sys
import time
from pathlib import Path

import llguidance
import numpy as np

from roseinfer.messages import Grammar, Thought
from roseinfer.text.grammar import compiler
from roseinfer.text.grammar.compiler import GrammarCompiler, Vocabulary

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
SHORT = {"type": "array", "items": {"type": "string", "maxLength": 80}}
SCHEMAS = {
    "three properties": PERSON,
    "any object": {"type": "object"},
    "100 properties": WIDE,
    "strings of 80 characters": SHORT,
}


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


def measure_thoughts(vocabulary: Vocabulary) -> str:
    """Medians over a thought of 2,000 random tokens before any object."""
    thought = Thought("<think>", "</think>", is_open=True)
    began = time.perf_counter()
    vocabulary.thought_tokens(thought)
    preparing = time.perf_counter() - began
    matcher = GrammarCompiler(vocabulary).open(Grammar("json_schema", "{}", thought)).result()
    mask, masks, accepting = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32), [], []
    for token_id in np.random.default_rng(0).integers(1000, vocabulary.vocab_size, 2000).tolist():
        began = time.perf_counter()
        matcher.fill(mask)
        filled = time.perf_counter()
        matcher.accept(token_id)
        masks.append(filled - began)
        accepting.append(time.perf_counter() - filled)
    return (
        f"once {preparing * 1e3:.0f} ms, mask median {np.median(masks) * 1e6:.1f} us "
        f"p99 {np.percentile(masks, 99) * 1e6:.0f} us, token {np.median(accepting) * 1e6:.1f} us"
    )


def measure_optional(vocabulary: Vocabulary, num_properties: int) -> str:
    """The first mask of each of twenty sequences, in a step in which all streams wait for it."""
    properties = {f"p{i}": {"type": "integer"} for i in range(num_properties)}
    began, masks = time.perf_counter(), []
    compiled = vocabulary.compile(Grammar("json_schema", json.dumps({"type": "object", "properties": properties})))
    compiling = time.perf_counter() - began
    mask = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
    for _ in range(20):
        matcher = compiled.matcher()
        began = time.perf_counter()
        matcher.fill(mask)
        masks.append(time.perf_counter() - began)
    return f"compile {compiling * 1e3:.0f} ms, first mask median {np.median(masks) * 1e3:.1f} ms"


def main() -> None:
    vocabulary = Vocabulary.load(Path(sys.argv[1]), int(sys.argv[2]), [0])
    for name, schema in SCHEMAS.items():
        print(f"{name}: {measure(vocabulary, Grammar('json_schema', json.dumps(schema)))}")
    print(f"thoughts: {measure_thoughts(vocabulary)}")
    compiler._LIMITS = llguidance.LLParserLimits(max_items_in_row=50_000, verbose_errors=False)  # noqa: SLF001 - only here
    for num_properties in (100, 490, 1000, 2000, 3000):
        print(f"{num_properties} optional properties: {measure_optional(vocabulary, num_properties)}")


if __name__ == "__main__":
    main()

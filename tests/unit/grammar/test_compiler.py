"""Compiled grammars are kept up to a number of bytes, and matchers of one do not see each other."""

from pathlib import Path

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.grammar.compiler import ENTRY_BYTES, GrammarCache, GrammarCompiler, entry_bytes
from roseinfer.grammar.library import Vocabulary
from roseinfer.messages import Grammar
from tests.unit.grammar import vocabulary as checkpoint


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    directory: Path = checkpoint.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return Vocabulary.load(directory, checkpoint.VOCAB_SIZE, [checkpoint.EOS])


def grammar(i: int) -> Grammar:
    return Grammar("regex", f"a{{{i:03}}}")


def test_the_cache_drops_what_was_not_used_for_longest(vocabulary: Vocabulary) -> None:
    cache = GrammarCache(3 * entry_bytes(grammar(1)))
    compiled = {i: vocabulary.compile(grammar(i)) for i in range(1, 6)}
    for i in (1, 2, 3):
        cache.put(grammar(i), compiled[i])
    assert cache.get(grammar(1)) is compiled[1]
    cache.put(grammar(4), compiled[4])
    assert cache.get(grammar(2)) is None
    assert cache.get(grammar(1)) is compiled[1]
    assert len(cache) == 3
    cache.put(Grammar("regex", "b" * 8000), compiled[5])  # a longer one takes more room
    assert len(cache) < 3
    assert cache.num_bytes <= 3 * entry_bytes(grammar(1))


def test_two_thousand_grammars_leave_a_bounded_cache(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 20 * ENTRY_BYTES)
    for i in range(300):
        compiler.open(grammar(i + 1)).result()
    assert len(compiler._cache) <= 20


def test_matchers_of_one_grammar_go_their_own_ways(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 1 << 20)
    first, second = (compiler.open(Grammar("choice", '["ab", "cd"]')).result() for _ in range(2))
    for byte in b"ab":
        first.accept(byte)
    assert first.is_over
    assert not second.is_over
    second.accept(ord("c"))
    assert not second.has_failed


def test_what_does_not_compile_is_an_error_of_its_own_future(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 0)
    with pytest.raises(InvalidRequest):
        compiler.open(Grammar("regex", "(")).result()
    assert not compiler.open(Grammar("regex", "a")).result().is_over
    assert len(compiler._cache) == 0

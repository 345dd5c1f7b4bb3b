"""Compiled grammars are kept up to a number of bytes, and matchers of one do not see each other."""

from pathlib import Path

import llguidance
import numpy as np
import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar
from roseinfer.text.grammar.compiler import GrammarCache, GrammarCompiler, entry_bytes
from roseinfer.text.grammar.library import MAX_FOLLOWED_NS, Compiled, Vocabulary
from tests.unit.text.grammar import vocabulary as checkpoint


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
    cache.put(Grammar("regex", "b" * 40_000), compiled[5])  # a longer one takes more room
    assert len(cache) < 3
    assert cache.num_bytes <= 3 * entry_bytes(grammar(1))


def test_two_thousand_grammars_leave_a_bounded_cache(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 20 * entry_bytes(grammar(1)))
    for i in range(300):
        compiler.open(grammar(i + 1)).result()
    assert len(compiler._cache) <= 20
    assert compiler._cache.num_bytes == sum(map(entry_bytes, compiler._cache._entries))


def test_a_grammar_that_grew_to_its_limit_is_compiled_anew_for_the_next_one(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of a cached grammar share its states, of which there are so many; 2**12 would be needed here."""
    limits = llguidance.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("roseinfer.text.grammar.library._LIMITS", limits)
    compiler, mask = GrammarCompiler(vocabulary, 1 << 20), np.zeros(-(-checkpoint.VOCAB_SIZE // 32), np.uint32)
    exploding, random = Grammar("regex", "(a|b)*a(a|b){12}x"), np.random.default_rng(0)
    matcher = compiler.open(exploding).result()
    while not matcher.has_failed:
        matcher.fill(mask)
        matcher.accept(int(random.choice([*b"ab"])))
    again = compiler.open(exploding).result()
    again.fill(mask)
    assert not again.has_failed
    assert compiler._cache.num_bytes == entry_bytes(exploding)


def test_a_grammar_that_met_its_limit_in_a_token_is_compiled_anew(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask before it, or behind one that was made in time."""
    limits = llguidance.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("roseinfer.text.grammar.library._LIMITS", limits)
    compiled, random = vocabulary.compile(Grammar("regex", "(a|b)*a(a|b){12}x")), np.random.default_rng(0)
    matcher = compiled.matcher()
    while not matcher.has_failed:
        assert not compiled.is_worn
        matcher.accept(int(random.choice([*b"ab"])))
    assert compiled.is_worn


@pytest.mark.parametrize(
    ("schema", "wears_out"),
    [
        ('{"type": "object", "properties": {"n": {"type": "integer"}}}', False),
        ('{"type": "string", "pattern": "a+"}', True),
        ('{"type": "string", "p\\u0061ttern": "a+"}', True),
        ('{"type": "object", "patternProperties": {"a+": {"type": "null"}}}', True),
        ('{"type": "string", "minLength": 3}', True),
        ('{"type": "integer", "exclusiveMinimum": 3}', True),
    ],
)
def test_only_what_can_grow_wears_out_by_being_followed(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, schema: str, *, wears_out: bool
) -> None:
    """Many sequences together follow a usual one for long within a second, and would all wait for it to be compiled."""
    compiled = vocabulary.compile(Grammar("json_schema", schema))
    monkeypatch.setattr(compiled, "followed_ns", MAX_FOLLOWED_NS + 10**12)
    assert compiled.is_worn == wears_out


def test_a_grammar_that_was_followed_for_long_is_compiled_anew(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have grown meanwhile, by more than the cache counts."""
    cache, compiled = GrammarCache(1 << 30), vocabulary.compile(grammar(1))
    cache.put(grammar(1), compiled)
    compiled.matcher().fill(np.zeros(-(-checkpoint.VOCAB_SIZE // 32), np.uint32))
    assert compiled.followed_ns > 0
    assert cache.get(grammar(1)) is compiled
    monkeypatch.setattr(compiled, "followed_ns", MAX_FOLLOWED_NS + 10**12)
    assert cache.get(grammar(1)) is None
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_compiling_anew_takes_at_most_half_as_long_as_the_masks_did(vocabulary: Vocabulary) -> None:
    """However slow the machine is, and however many follow a grammar together."""
    compiled, compile_ns = vocabulary.compile(grammar(1)), 10 * MAX_FOLLOWED_NS
    compiled.begin(compile_ns)
    compiled.followed_ns = MAX_FOLLOWED_NS + 2 * compile_ns
    assert not compiled.is_worn
    compiled.followed_ns += 1
    assert compiled.is_worn


def test_matchers_that_nobody_has_asked_yet_hold_no_copy_of_the_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 512 sequences of a request wait for their turn, and a source may have 256 KiB."""
    copied: list[llguidance.LLMatcher] = []

    class Counting:
        def __init__(self, template: llguidance.LLMatcher) -> None:
            self._template = template

        def deep_copy(self) -> llguidance.LLMatcher:
            copied.append(self._template.deep_copy())
            return copied[-1]

    compiled = vocabulary.compile(grammar(1))
    monkeypatch.setattr(compiled, "_template", Counting(compiled._template))
    waiting, running = compiled.matcher(), compiled.matcher()
    running.fill(np.zeros(-(-checkpoint.VOCAB_SIZE // 32), np.uint32))
    running.accept(ord("a"))
    assert running.is_over
    assert len(copied) == 1
    assert not waiting.is_over
    assert len(copied) == 2


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


def test_the_sequences_of_one_request_share_a_grammar_that_no_cache_could_hold(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of up to 512 would compile it again, for as long as `structured.compile_timeout_s` allows."""
    compiled: list[Grammar] = []

    def counting(each: Grammar) -> Compiled:
        compiled.append(each)
        return Vocabulary.compile(vocabulary, each)

    monkeypatch.setattr(vocabulary, "compile", counting)
    compiler = GrammarCompiler(vocabulary, 0)
    for i in (1, 1, 1, 2, 2):
        compiler.open(grammar(i)).result()
    assert compiled == [grammar(1), grammar(2)]
    assert len(compiler._cache) == 1

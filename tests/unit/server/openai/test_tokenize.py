"""What long answers of /tokenize and /detokenize are encoded in: pieces, which joined are what they are at once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.server.openai import tokenize as text_endpoints
from tests.unit.server.harness import BOS, HUGE, VOCAB_SIZE, text_model

TOKENIZER = text_model().tokenizer
TOKEN_IDS = st.lists(st.integers(0, 255) | st.sampled_from([BOS, HUGE]), max_size=20) | st.text().map(
    lambda text: list(text.encode())
)


def spelled(token_ids: list[int]) -> str:
    answer = msgspec.json.decode(text_endpoints._spelled(TOKENIZER, token_ids, VOCAB_SIZE), type=dict[str, str])
    assert answer.keys() == {"prompt"}
    return answer["prompt"]


@given(TOKEN_IDS, st.integers(1, 5))
def test_a_text_that_is_spelled_in_pieces_is_the_same_wherever_they_end(token_ids: list[int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_endpoints, "PIECE", piece)
        assert spelled(token_ids) == b"".join(map(TOKENIZER.spell, token_ids)).decode(errors="replace")


def test_no_piece_of_a_text_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, within_quotes = list[int](), text_endpoints._within_quotes

    def note(text: str) -> bytes:
        lengths.append(len(text))
        return within_quotes(text)

    monkeypatch.setattr(text_endpoints, "_within_quotes", note)
    num_tokens = 10 * text_endpoints.PIECE + 1
    assert spelled([ord("a")] * num_tokens) == "a" * num_tokens
    assert sum(lengths) == num_tokens
    assert max(lengths) <= text_endpoints.PIECE

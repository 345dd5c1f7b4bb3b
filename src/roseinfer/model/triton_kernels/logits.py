"""Reads rows of logits for the sampling kernels, edited as requests ask, and computes the mass of a logit.

Edited logits are nowhere in memory: each kernel that reads logits edits them again. The changes, and their order, are
those of sampling/logit_edits.py, bit for bit.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.model.sampling.edit_table import (
    BARRED,
    BIAS_SHIFT,
    CHANGES,
    COUNT,
    COUNTS,
    EDIT,
    IS_MASKED,
    KNOWN,
    MAX_BIASES,
    EditTable,
    num_mask_words,
)
from roseinfer.model.sampling.slot_table import SLOT, SamplingTable
from roseinfer.model.triton_kernels.language import LOG2_E, Constant, Pointer, constant, kernel

PIECE = 4096  # of the vocabulary: what one program reads at a time
GROUP = 16  # of a piece: side by side, 64 bytes of float32
ALIGNMENT = 16  # numbers

LOWEST_LOGIT = tl.constexpr(float("-inf"))
LOWEST_KEY = tl.constexpr(-0x7F800001)  # of -inf
_LOG2_E = tl.constexpr(LOG2_E)
_CHANGES, _COUNTS, _IS_MASKED = tl.constexpr(CHANGES), tl.constexpr(COUNTS), tl.constexpr(IS_MASKED)
_COUNT, _KNOWN, _BARRED = tl.constexpr(COUNT), tl.constexpr(KNOWN), tl.constexpr(BARRED)
_BIAS_SHIFT, _MAX_BIASES = tl.constexpr(BIAS_SHIFT), tl.constexpr(MAX_BIASES)


class Logits(NamedTuple):
    """Numbers [rows, vocab_size], a row's side by side, and what slots change about them."""

    numbers: Pointer
    row_stride: int
    vocab_size: Constant
    width: Constant  # of a row, with what of the padding behind it may be read
    piece: Constant  # a power of two
    num_pieces: Constant
    padded_pieces: Constant  # the next power of two
    group: Constant  # a power of two that divides the piece
    # The tables of sampling/edit_table.py, and how they are laid out.
    are_changed: Constant  # else nothing of the rest is read
    words: Pointer  # int32
    biases: Pointer  # float32
    history: Pointer  # int32
    kinds: Pointer  # int32, the first field of the records
    penalties: Pointer  # float32, the records' other fields
    mask_rows: Pointer  # int32, of each slot
    masks: Pointer  # int32
    barred_before: Pointer  # int64, a field of the table of slots
    mask_words: Constant
    words_stride: Constant
    history_length: Constant
    edit_words: Constant  # length of a record, in int32
    record_words: Constant  # of a record of the table of slots, in int64


def logits_of(logits: torch.Tensor, table: SamplingTable, edits: EditTable, *, are_changed: bool) -> Logits:
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 or vocab_size == 1, "a row's logits lie side by side"
    num_pieces = -(-vocab_size // PIECE)
    return Logits(
        logits,
        logits.stride(0),
        constant(vocab_size),
        constant(_readable_width(logits)),
        constant(PIECE),
        constant(num_pieces),
        constant(next_power_of_2(num_pieces)),
        constant(GROUP),
        constant(are_changed),
        edits.words,
        edits.biases,
        edits.history,
        edits.records,
        edits.records.view(torch.float32),
        edits.masks[edits.mask_area.first_slot :],
        edits.masks,
        table.barred_before,
        constant(num_mask_words(vocab_size)),
        constant(edits.words.stride(0)),
        constant(edits.history.shape[1]),
        constant(EDIT.itemsize // 4),
        constant(SLOT.itemsize // 8),
    )


def _readable_width(logits: torch.Tensor) -> int:
    """The vocabulary, rounded up where rows of logits have that many numbers.

    A mask that ends at an odd place would have its load made number by number.
    """
    num_rows, vocab_size = logits.shape
    width, stride = -(-vocab_size // ALIGNMENT) * ALIGNMENT, logits.stride(0)
    length = logits.untyped_storage().nbytes() // logits.element_size() - int(logits.storage_offset())
    is_readable = stride >= width and (num_rows - 1) * stride + width <= length
    return width if is_readable else vocab_size


@kernel()
def raw_values_at(logits: Logits, row: tl.tensor, columns: tl.tensor, is_asked: tl.tensor) -> tl.tensor:
    """The model's own, float32; -inf where none is asked for or past the vocabulary.

    NaN becomes +inf: such a row has no token.
    """
    at = logits.numbers + row * logits.row_stride + columns
    values = tl.load(at, mask=is_asked & (columns < logits.width), other=LOWEST_LOGIT).to(tl.float32)
    values = tl.where(columns < logits.vocab_size, values, LOWEST_LOGIT)
    return tl.where(values == values, values, -LOWEST_LOGIT)  # noqa: PLR0124 - false for NaN


@kernel()
def values_at(logits: Logits, place: tl.tuple, columns: tl.tensor, is_asked: tl.tensor) -> tl.tensor:
    """What a token is drawn by: the row's own values, changed if the slot asks for it.

    The place is a row, its slot, and the position of the token to be drawn.
    """
    row, slot, position = place
    values = raw_values_at(logits, row, columns, is_asked)
    if logits.are_changed:
        kinds = tl.load(logits.kinds + slot * logits.edit_words)
        if (kinds & _CHANGES) != 0:
            values = _changed(logits, slot, position, values, columns, is_asked)
        if (kinds & _IS_MASKED) != 0:
            mask = logits.masks + tl.load(logits.mask_rows + slot).to(tl.int64) * logits.mask_words
            bits = tl.load(mask + columns // 32, mask=is_asked & (columns < logits.vocab_size), other=0)
            values = tl.where(((bits >> (columns % 32)) & 1) != 0, values, LOWEST_LOGIT)
    return values


@kernel()
def _changed(
    logits: Logits, slot: tl.tensor, position: tl.tensor, values: tl.tensor, columns: tl.tensor, is_asked: tl.tensor
) -> tl.tensor:
    penalties = logits.penalties + slot * logits.edit_words
    presence, frequency, repetition = tl.load(penalties + 1), tl.load(penalties + 2), tl.load(penalties + 3)
    is_column = is_asked & (columns < logits.vocab_size)
    is_word = is_asked & (columns < logits.words_stride)  # past the vocabulary they are 0
    words = tl.load(logits.words + slot * logits.words_stride + columns, mask=is_word, other=0)
    values += tl.load(logits.biases + slot * (_MAX_BIASES + 1) + ((words >> _BIAS_SHIFT) & _MAX_BIASES))
    zeros = tl.zeros(values.shape, tl.float32)
    scaled = tl.where(values > 0.0, tl.div_rn(values, zeros + repetition), values * repetition)
    values = tl.where((words & _KNOWN) != 0, scaled, values)
    count = (words & _COUNT).to(tl.float32)
    # `fma` keeps the compiler from fusing the product with the difference, which would round once and not twice.
    values -= tl.fma(count, zeros + frequency, zeros)
    values -= tl.where(count > 0.0, presence, 0.0)
    is_barred = ((words & _BARRED) != 0) & (position < tl.load(logits.barred_before + slot * logits.record_words))
    values = tl.where(is_column & (is_barred == 0), values, LOWEST_LOGIT)
    return tl.where(values == values, values, -LOWEST_LOGIT)  # noqa: PLR0124 - false for NaN


@kernel()
def note_token(logits: Logits, slot: tl.tensor, position: tl.tensor, token: tl.tensor) -> None:
    """Count a token that was drawn, if the slot wants that."""
    if logits.are_changed:  # noqa: SIM102 - known when the kernel is compiled; the other is not
        if (tl.load(logits.kinds + slot * logits.edit_words) & _COUNTS) != 0:
            place = logits.history + slot * logits.history_length + position
            tl.store(place, token.to(tl.int32), mask=position < logits.history_length)
            word = logits.words + slot * logits.words_stride + token
            tl.store(word, (tl.load(word) + 1) | _KNOWN)


@kernel()
def mass_of(values: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((value - peak) / temperature); 0 for -inf, whatever the peak."""
    return tl.where(values > LOWEST_LOGIT, tl.exp2((values - peak) * (_LOG2_E / temperature)), 0.0)


@kernel()
def key_of(values: tl.tensor) -> tl.tensor:
    """int32 in the order of float32."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel()
def value_of(key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

"""A step between its schedule and its commit: building its batch, judging failed rows, and building its outputs.

Structs of every step are msgspec's, since a frozen dataclass takes several times as long to make.
"""

from typing import Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from roseinfer.engine.core.batch import (
    NO_TOKEN,
    OWN_FAULT,
    POOLED_UNIT,
    IndexArray,
    Int32Array,
    Pooled,
    SampledTokens,
    ScheduledBatch,
    SlotBinding,
)
from roseinfer.engine.core.constraint import TokenMasks
from roseinfer.engine.core.decode_ring import DecodeRows, PlannedStep
from roseinfer.engine.core.sequence import Sequence, SlotTable
from roseinfer.messages import PromptLogprobs, TokenOutput
from roseinfer.records import BlockedBy, FinishReason

Chunk = tuple[Sequence, int]
"""A sequence, and how many of its known tokens a step computes."""

_NO_ROWS: frozenset[int] = frozenset()
_NO_TOKENS: Int32Array = np.zeros(0, np.int32)
MAX_FAILURES_IN_A_ROW = 4  # of one prompt each: one client may send it again and again


class StepCounts(msgspec.Struct, gc=False):
    """The scheduler's counts of one step; part of its `StepRecord`."""

    num_decode_seqs: int = 0
    num_prefill_seqs: int = 0
    num_prefill_tokens: int = 0
    num_not_selected: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_context_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    blocked_by: BlockedBy = BlockedBy.NOTHING


class Pacer(Protocol):
    """Learns what steps take: `engine/pace.py`."""

    cuts: bool  # prompts

    def learn_step(self, counts: StepCounts, duration_ns: int) -> None:
        """Note the time between the tokens of the step before and those of this one."""

    def most_prompt_tokens(self, num_rows: int, num_waiting: int) -> int:
        """The most prompt tokens beside `num_rows` decode rows, while `num_waiting` requests have no token yet."""


class SampledRows(msgspec.Struct, frozen=True, gc=False):
    """The rows of a step that sampled. Arrays have one entry a row."""

    slots: Int32Array
    index: IndexArray  # the same, as numpy indexes with
    ends: Int32Array  # position of the sampled token
    sampled: SampledTokens
    token_ids: list[int]  # the same as `sampled` has, which are few enough to be looked through faster so
    first: range  # rows whose token is the first one after a prefill
    has_last: bool  # some row sampled the last token that its request allows
    surplus: frozenset[int]  # rows of sequences that ended after the step was scheduled


class ScheduledStep(msgspec.Struct, frozen=True, gc=False):
    """A step that is scheduled and not committed. Arrays have one entry a row."""

    batch: ScheduledBatch
    index: IndexArray  # `batch.slots`, as numpy indexes with
    ends: Int32Array  # tokens in the row's KV cache after the step: the position of its sampled token
    has_last: bool  # some row may sample the last token that its request allows
    first_chunk: int  # rows from here on are chunks of prompts
    counts: StepCounts

    def holds(self, slot: int) -> bool:
        """Whether one of its rows is the slot's."""
        return bool((self.index == slot).any())

    def sampled_rows(self, sampled: SampledTokens, ended: list[Sequence]) -> SampledRows:
        """Its rows with their tokens; `ended` are the sequences that ended after it was scheduled."""
        slots, index, ends, surplus = self.batch.slots, self.index, self.ends, _NO_ROWS
        if len(sampled.token_ids) < len(slots):
            samples = self.batch.samples
            slots, index, ends = slots[samples], index[samples], ends[samples]
        if ended:
            of_ended = {sequence.slot for sequence in ended}
            surplus = frozenset(row for row, slot in enumerate(slots.tolist()) if slot in of_ended)
        token_ids, first = sampled.token_ids.tolist(), range(self.first_chunk, len(slots))
        return SampledRows(slots, index, ends, sampled, token_ids, first, self.has_last, surplus)

    def keep_of_prompts(self, sampled: SampledTokens, table: SlotTable) -> None:
        """Keep the scores of prompt tokens with their sequences, and add what was pooled to what those have."""
        for scored, scores in zip(self.batch.scored, sampled.scores, strict=True):
            sequence = table.owner(self.index[scored.row])
            assert sequence.scores is not None, "scores are output with the first token"
            sequence.scores.append(scores)
        for pooled, part in zip(self.batch.pooled, sampled.pooled, strict=True):
            sequence = table.owner(self.index[pooled.row])
            sequence.pooled = part if sequence.pooled is None else sequence.pooled + part


class Drafter(Protocol):
    """Guesses tokens that a step verifies beside the known ones: `engine/speculation.py`."""

    def bind(self, slot: int) -> None:
        """Forget the slot's last owner."""

    def draft(self, index: IndexArray, budget: int) -> dict[int, Int32Array]:
        """Drafts by slot for some of the decoding slots `index`, of `budget` tokens at most in all.

        An empty one is of a slot whose last token the runner does not hold: it drew more in the step before than held.
        """

    def judge(
        self, step: ScheduledStep, rows: SampledRows, last: dict[int, FinishReason]
    ) -> tuple[SampledRows, dict[int, FinishReason], list[int]]:
        """Return the rows that hold, those of them that end their sequences, and those that were of drafted tokens."""


class UnattributableFailure(Exception):
    """Rows failed together, or one after the other without end, so the cause is not in their requests."""


class RowFailures:
    """Decides whether rows without a token failed because of their own requests.

    A row that fails beside one that does not fails alone. When all rows of a step fail and they are of several
    prompts, or more prompts fail in succession than one client explains, the device or the weights are at fault. The
    choices of a prompt share its list and count once. A row that its own request spoiled (`OWN_FAULT`) is no evidence.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, list[int]] = {}  # by identity: those that failed since a row had a token

    def judge(self, rows: SampledRows, table: SlotTable) -> list[int]:
        """Return the rows that failed, surplus ones included. Raises UnattributableFailure."""
        if not rows.token_ids:  # no row sampled: no evidence
            return []
        token_ids = rows.sampled.token_ids
        if NO_TOKEN not in rows.token_ids and OWN_FAULT not in rows.token_ids:
            self._prompts.clear()
            return []
        failed: list[int] = (token_ids < 0).nonzero()[0].tolist()
        no_evidence = rows.surplus.union((token_ids == OWN_FAULT).nonzero()[0].tolist())
        judged = [row for row in failed if row not in no_evidence]
        if len(judged) < len(token_ids) - len(no_evidence):
            self._prompts.clear()
            return failed
        prompts = [table.owner(rows.index[row]).request.prompt_token_ids for row in judged]
        of_step = {id(prompt): prompt for prompt in prompts}
        self._prompts |= of_step  # kept alive, so that no other list gets the identity of one of them
        if len(of_step) > 1 or len(self._prompts) > MAX_FAILURES_IN_A_ROW:
            raise UnattributableFailure(f"no row of a step had a finite logit ({len(judged)} rows)")
        return failed


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outputs of a committed step; the columns are those of `StepOutput`."""

    slots: bytes
    token_ids: bytes
    outputs: list[TokenOutput]
    num_tokens: int


NOTHING = Outcome(b"", b"", [], 0)


def make_batch(
    step_id: int,
    table: SlotTable,
    decodes: DecodeRows,
    planned: PlannedStep | None,  # of `decodes`, without other rows
    drafts: dict[int, Int32Array],
    chunks: list[Chunk],
    bindings: tuple[SlotBinding, ...],
) -> tuple[ScheduledBatch, IndexArray, Int32Array]:
    """Return the batch, its slots as numpy indexes with, and the tokens in each row's KV cache after it."""
    slots, index, num_new_tokens = decodes.slots, decodes.index, decodes.num_new_tokens
    num_decodes = first_chunk = len(slots)
    if drafts or chunks:
        first_chunk += sum(1 + len(draft) for draft in drafts.values())
        drafting = [slot for slot, draft in drafts.items() for _ in range(1 + len(draft))]
        slots = np.concatenate([slots, np.array([*drafting, *(sequence.slot for sequence, _ in chunks)], np.int32)])
        lengths = np.array([1] * len(drafting) + [length for _, length in chunks], np.int32)
        index, num_new_tokens = slots.astype(np.intp), np.concatenate([num_new_tokens, lengths])
    starts, drafted = planned.starts if planned else table.num_computed[index], None
    if drafts:
        places = [place for draft in drafts.values() for place in range(1 + len(draft))]
        starts[num_decodes:first_chunk] += np.array(places, np.int32)
        tokens = [token for draft in drafts.values() for token in (NO_TOKEN, *draft.tolist())]
        if len(tokens) > len(drafts):
            drafted = np.full(len(slots), NO_TOKEN, np.int32)
            drafted[num_decodes:first_chunk] = tokens
    ends = planned.ends if planned else starts + num_new_tokens
    samples = ends >= table.num_given[index] if drafts or chunks else decodes.samples
    batch = ScheduledBatch(
        step_id=step_id,
        slots=slots,
        starts=starts,
        num_new_tokens=num_new_tokens,
        samples=samples,
        num_device_rows=num_decodes,
        token_ids=_known_tokens(table, drafts, chunks) if drafts or chunks else _NO_TOKENS,
        block_table=table.block_ids,
        bindings=bindings,
        drafted=drafted,
        scored=table.scored_rows(chunks, first_chunk) if chunks else (),
        masks=_masks(table, slots[samples], ends[samples]) if table.constraints else None,
        pooled=table.pooled_rows(slots, samples, first_chunk) if chunks else (),
    )
    return batch, index, ends


def _known_tokens(table: SlotTable, drafts: dict[int, Int32Array], chunks: list[Chunk]) -> Int32Array:
    """The tokens that the rows compute whose tokens are known or drafted, row after row."""
    pieces = [piece for slot, draft in drafts.items() for piece in (table.known_tokens(slot)[-1:], draft)]
    for sequence, length in chunks:
        start = table.num_computed.item(sequence.slot)
        pieces.append(table.token_ids[sequence.slot, start : start + length])
    return np.concatenate(pieces)


def _masks(table: SlotTable, slots: Int32Array, ends: Int32Array) -> TokenMasks | None:
    """The masks of the rows that sample under a grammar; None when there are none."""
    rows, of_slot = zip(slots.tolist(), ends.tolist(), strict=True), table.constraints
    found = {(slot, end): (of_slot[slot], end - table.num_tokens(slot)) for slot, end in rows if slot in of_slot}
    return TokenMasks(found) if found else None


def find_last_rows(rows: SampledRows, table: SlotTable, eos_token_ids: tuple[int, ...]) -> dict[int, FinishReason]:
    """Find rows whose token ends their sequence: the last one allowed, an eos id they heed, or a stop id."""
    index, token_ids = rows.index, rows.token_ids
    last: dict[int, FinishReason] = {}
    if rows.has_last:
        last = dict.fromkeys((rows.ends == table.last_positions[index]).nonzero()[0].tolist(), FinishReason.LENGTH)
    for eos_token_id in eos_token_ids:
        if eos_token_id in token_ids:
            found = (row for row, token_id in enumerate(token_ids) if token_id == eos_token_id)
            last |= {row: FinishReason.STOP for row in found if not table.ignores_eos[index[row]]}
    if table.stop_token_ids:
        for row, slot in enumerate(index.tolist()):
            if slot in table.stop_token_ids and token_ids[row] in table.stop_token_ids[slot]:
                last[row] = FinishReason.STOP
    for row in rows.surplus:
        last.pop(row, None)
    return last


def advance_grammars(rows: SampledRows, table: SlotTable, last: dict[int, FinishReason]) -> None:
    """Advance the rows' grammars by their tokens; adds rows to `last` whose text is complete or cannot go on."""
    for row, slot in enumerate(rows.index.tolist()):
        constraint = table.constraints.get(slot)
        if constraint is None or row in rows.surplus or last.get(row) is FinishReason.ERROR:
            continue
        if last.get(row) is not FinishReason.STOP:
            constraint.accept(rows.token_ids[row])
        if constraint.has_failed:  # perhaps before this token: then any could come, one that stops too
            last[row] = FinishReason.ERROR
        elif constraint.is_over:
            last[row] = FinishReason.STOP


def build_outcome(rows: SampledRows, table: SlotTable, last: dict[int, FinishReason], accepted: list[int]) -> Outcome:
    """Build a step's outputs: columns for rows with a token and nothing else, `TokenOutput`s for the others."""
    slots, token_ids, logprobs = rows.slots, rows.sampled.token_ids, rows.sampled.logprobs
    if not (rows.first or last or accepted or rows.surplus or logprobs):  # as in most steps
        return Outcome(slots.tobytes(), token_ids.tobytes(), [], len(slots))
    several = {each for row in accepted for each in (row - 1, row)}  # rows of sequences with more than one
    scored = () if logprobs is None else [row for row, entry in enumerate(logprobs) if entry is not None]
    in_full = {*rows.first, *last, *scored, *several} - rows.surplus
    is_plain = np.ones(len(slots), np.bool_)
    is_plain[[*in_full, *rows.surplus]] = False
    slots, token_ids = slots[is_plain], token_ids[is_plain]
    outputs = [_output(rows, row, table, last.get(row)) for row in sorted(in_full)]
    for row in reversed(accepted):  # its output goes into that of the row before, which is of the same sequence
        at = sorted(in_full).index(row)
        outputs[at - 1 : at + 1] = [_joined(outputs[at - 1], outputs[at])]
        in_full.remove(row)
    num_in_full = sum(len(output.token_ids) for output in outputs)
    return Outcome(slots.tobytes(), token_ids.tobytes(), outputs, len(slots) + num_in_full)


def _output(rows: SampledRows, row: int, table: SlotTable, finish_reason: FinishReason | None) -> TokenOutput:
    slot, token_id = int(rows.index[row]), rows.token_ids[row]
    sequence, is_first = table.owner(slot), row in rows.first
    logprobs = None if rows.sampled.logprobs is None else rows.sampled.logprobs[row]
    has_failed, constraint = finish_reason is FinishReason.ERROR, sequence.constraint
    ends_in_text = constraint is not None and constraint.is_over
    embedding = None if sequence.pooled is None or has_failed else _embedding(sequence.pooled, sequence)
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=[] if has_failed or embedding is not None else [token_id],
        logprobs=None if logprobs is None or has_failed else [logprobs],
        finish_reason=finish_reason if embedding is None else FinishReason.STOP,
        stop_token_id=token_id if finish_reason is FinishReason.STOP and not ends_in_text else None,
        times=sequence.times if is_first or finish_reason is not None else None,
        slot=slot if is_first else None,
        prompt_logprobs=None if sequence.scores is None else _pop_scores(sequence),
        embedding=embedding,
        grammar_error=constraint.error if has_failed and constraint is not None else "",
        is_own_fault=token_id == OWN_FAULT,
    )


def _joined(earlier: TokenOutput, later: TokenOutput) -> TokenOutput:
    """One output of two that follow each other in the same step."""
    logprobs = None if earlier.logprobs is None else [*earlier.logprobs, *(later.logprobs or ())]
    return replace(later, token_ids=[*earlier.token_ids, *later.token_ids], logprobs=logprobs)


def _embedding(pooled: Pooled, sequence: Sequence) -> bytes:
    if sequence.request.params.pooling == "mean":
        pooled = (pooled * (POOLED_UNIT / sequence.num_prompt_tokens)).astype(np.float32)
    return pooled.tobytes()


def _pop_scores(sequence: Sequence) -> PromptLogprobs:
    """All scores of the prompt, in one piece; they are output once."""
    assert sequence.scores is not None
    parts, sequence.scores = sequence.scores, None
    return PromptLogprobs(
        num_likeliest=sequence.request.params.num_prompt_logprobs or 0,
        logprobs=b"".join(part.logprobs.tobytes() for part in parts),
        top_token_ids=b"".join(part.top_token_ids.tobytes() for part in parts),
        top_logprobs=b"".join(part.top_logprobs.tobytes() for part in parts),
    )

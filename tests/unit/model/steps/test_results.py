"""Results of steps come to the host while later steps run, and nothing is lost or waited for."""

import torch

from roseinfer.model.sampling.logprobs import LogprobRows
from roseinfer.model.steps.results import Results
from tests.unit.model.fake_device import LateStream


def test_a_step_is_waited_for_and_nothing_after_it() -> None:
    stream = LateStream(is_late=True)
    results = Results(stream, 4)
    first, second = results.fetch(torch.tensor([5, 6]), None), results.fetch(torch.tensor([7]), None, graph_rows=2)
    assert first.wait().token_ids.tolist() == [5, 6]
    assert stream.num_pending == 1
    assert second.wait().token_ids.tolist() == [7]
    assert (first.graph_rows, second.graph_rows) == (0, 2)
    assert first.wait().logprobs is None


def test_tokens_not_yet_read_are_kept_when_their_buffer_is_needed() -> None:
    results = Results(LateStream(is_late=True), 4)
    launched = [results.fetch(torch.tensor([step, 10 * step]), None) for step in range(7)]
    assert [step.wait().token_ids.tolist() for step in launched] == [[step, 10 * step] for step in range(7)]


def test_memory_is_taken_once() -> None:
    stream = LateStream()
    results = Results(stream, 4)
    before = stream.num_allocations
    for _ in range(5):
        results.fetch(torch.tensor([1]), None).wait()
    assert stream.num_allocations == before


def test_logprobs_come_along() -> None:
    asked = LogprobRows(
        rows=[1],
        logprobs=torch.tensor([-0.5]),
        ranks=torch.tensor([2]),
        likeliest=[([0], torch.tensor([[8, 3]]), torch.tensor([[-0.25, -0.5]]))],
    )
    result = Results(LateStream(), 4).fetch(torch.tensor([4, 3]), asked).wait()
    assert result.logprobs is not None
    assert result.logprobs[0] is None
    told = result.logprobs[1]
    assert told is not None
    assert (told.logprob, told.rank, told.top_token_ids, told.top_logprobs) == (-0.5, 2, [8, 3], [-0.25, -0.5])

"""Models what a step costs, fitted to the steps of a recording.

A step takes a constant, so much for each decode row, for each prompt token, and for each token that attention reads
from the KV cache; none of them can be negative. What lies between two steps, the host's own work, is a constant of its
own. Steps that something else disturbed (a collection, a capture, a profiler) are left out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from roseinfer.errors import ConfigError
from roseinfer.observe.recorder.recording import Recording, RequestRecord, StructArray
from roseinfer.runtime.step_costs import FloatArray, fit_costs

_MIN_STEPS = 16
_OUTLIER = 5.0  # times the median residual: such a step was disturbed by something that no stamp names


class CostModel(NamedTuple):
    """Nanoseconds."""

    step_ns: float
    decode_row_ns: float
    prefill_token_ns: float
    context_token_ns: float
    host_ns: float  # between two steps that follow each other: commit, outputs, inbox, schedule
    arrival_ns: float = 0.0  # of a request on its way to the engine, which has to look into its inbox then
    prefill_is_free: bool = False  # rows of prompts cost nothing, as if no other prompt were ever computed

    def compute_ns(self, num_decode_rows: int, num_prefill_tokens: int, num_context_tokens: int) -> int:
        """Of one step."""
        return round(
            self.step_ns
            + self.decode_row_ns * num_decode_rows
            + (0.0 if self.prefill_is_free else self.prefill_token_ns * num_prefill_tokens)
            + self.context_token_ns * num_context_tokens
        )

    def line(self) -> str:
        return (
            f"{self.step_ns / 1e3:.1f} us a step, {self.decode_row_ns / 1e3:.2f} a decode row, "
            f"{self.prefill_token_ns / 1e3:.2f} a prompt token, {self.context_token_ns / 1e3:.4f} a context token, "
            f"{self.host_ns / 1e3:.1f} between steps, {self.arrival_ns / 1e3:.1f} until a request is in the inbox"
        )


DEFAULT = CostModel(
    step_ns=2_000_000,
    decode_row_ns=50_000,
    prefill_token_ns=50_000,
    context_token_ns=100,
    host_ns=100_000,
    arrival_ns=500_000,
)
"""Of no machine in particular, in the proportions of a small model on a CPU: a prompt token costs what a row does."""


class Fit(NamedTuple):
    """A model, and how well it fits the steps it was made of."""

    model: CostModel
    num_steps: int
    median_error: float  # of the computing of a step, relative

    def line(self) -> str:
        return f"{self.model.line()}; from {self.num_steps} steps, median error {self.median_error:.1%}"


def fit(recording: Recording) -> Fit:
    """The model of a recording's steps. Raises ConfigError when it holds too few."""
    steps = recording.steps
    disturbed = (steps["gc_ns"] > 0) | steps["is_profiled"] | (steps["capture_ns"] > 0)
    rows = steps["num_decode_seqs"] + steps["num_prefill_seqs"]
    is_usable = (rows > 0) & ~disturbed
    usable = steps[is_usable]
    if len(usable) < _MIN_STEPS:
        raise ConfigError(
            f"the recording holds {len(usable)} undisturbed steps and a cost model needs {_MIN_STEPS}",
            param="--cost-model",
        )
    features, times = _features(usable), _compute_ns(steps)[is_usable]
    coefficients, is_usual = fit_costs(features, times, _OUTLIER)
    errors = np.abs(features @ coefficients - times) / np.maximum(times, 1.0)
    step_ns, decode_row_ns, prefill_token_ns, context_token_ns = coefficients.tolist()
    host_ns, arrival_ns = _host_ns(steps), _arrival_ns(recording.requests)
    model = CostModel(step_ns, decode_row_ns, prefill_token_ns, context_token_ns, host_ns, arrival_ns)
    return Fit(model, int(is_usual.sum()), float(np.median(errors)))


def _features(steps: StructArray) -> FloatArray:
    """[steps, 4]: one, decode rows with drafts, prompt tokens, context tokens."""
    names = ("num_decode_seqs", "num_prefill_tokens", "num_context_tokens")
    features: FloatArray = np.stack([np.ones(len(steps)), *(steps[name].astype(np.float64) for name in names)], axis=1)
    features[:, 1] += steps["num_draft_tokens"]
    return features


def _compute_ns(steps: StructArray) -> FloatArray:
    """What the device and its driver took for each step: launch and wait.

    Of a step that was launched before the tokens of the one before it were known, they leave out what the device
    computed while the host did its own work: such a step takes from those tokens to its own.
    """
    times: FloatArray = (steps["launch_ns"] + steps["wait_ns"]).astype(np.float64)
    launched_ns = (steps["start_ns"] + steps["schedule_ns"] + steps["launch_ns"])[1:]
    is_queued = (np.diff(steps["step_id"]) == 1) & (launched_ns <= steps["tokens_ns"][:-1])
    times[1:][is_queued] = np.diff(steps["tokens_ns"])[is_queued]
    return times


def _host_ns(steps: StructArray) -> float:
    """The median time between the tokens of a step and the launch of the next, where one followed at once."""
    following = np.diff(steps["step_id"]) == 1
    busy = following & (steps["num_running"][:-1] > 0) & (steps["gc_ns"][1:] == 0)
    between = np.diff(steps["tokens_ns"]) - (steps["launch_ns"] + steps["wait_ns"])[1:]
    return max(0.0, float(np.median(between[busy]))) if busy.any() else 0.0


def _arrival_ns(requests: Sequence[RequestRecord]) -> float:
    """Reading and tokenising, the median; and crossing to the engine, the shortest: the others met a step under way."""
    reached = [request for request in requests if request.tokenized_ns and request.inbox_ns]
    if not reached:
        return 0.0
    reading = [request.tokenized_ns - request.recv_ns for request in reached]
    crossing = [request.inbox_ns - request.tokenized_ns for request in reached]
    return max(0.0, float(np.median(reading)) + min(crossing))

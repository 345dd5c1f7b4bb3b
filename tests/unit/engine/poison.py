"""A device whose logits are not finite here and there."""

from collections.abc import Callable

from roseinfer.engine.batch import NO_TOKEN, Launched, SampledTokens, ScheduledBatch
from roseinfer.engine.engine import Engine
from roseinfer.stopwatch import Watch

IsPoisoned = Callable[[str, int], bool]
"""(request id, position of the token to be sampled) -> whether its logits hold a NaN."""


class _Poisoned:
    graph_rows = h2d_bytes = 0

    def __init__(self, launched: Launched, rows: list[int]) -> None:
        self.launched, self.rows = launched, rows

    def wait(self) -> SampledTokens:
        sampled = self.launched.wait()
        token_ids = sampled.token_ids.copy()
        token_ids[self.rows] = NO_TOKEN
        return SampledTokens(token_ids, sampled.logprobs)


def poison(engine: Engine, is_poisoned: IsPoisoned) -> Engine:
    """The engine with such a device."""
    launch = engine.runner.launch

    def launch_poisoned(batch: ScheduledBatch, watch: Watch) -> Launched:
        owners = engine.scheduler.residency.table.owners
        rows = [
            (owners[slot], position)
            for slot, position, samples in zip(
                batch.slots.tolist(), (batch.starts + batch.num_new_tokens).tolist(), batch.samples, strict=True
            )
            if samples
        ]
        failed = [row for row, (owner, position) in enumerate(rows) if owner and is_poisoned(
            owner.request.request_id, position
        )]  # fmt: skip
        return _Poisoned(launch(batch, watch), failed)

    engine.runner.launch = launch_poisoned  # type: ignore[method-assign]
    return engine

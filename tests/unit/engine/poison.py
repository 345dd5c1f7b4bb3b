"""A device whose logits are not finite here and there."""

from collections.abc import Callable

from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT, Launched, SampledTokens, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine

IsPoisoned = Callable[[str, int], bool]
"""(request id, position of the token to be sampled) -> whether its logits hold a NaN."""


class _Poisoned:
    graph_rows = h2d_bytes = 0

    def __init__(self, launched: Launched, rows: list[int], own_faults: list[int]) -> None:
        self.launched, self.rows, self.own_faults = launched, rows, own_faults

    def wait(self) -> SampledTokens:
        sampled = self.launched.wait()
        token_ids = sampled.token_ids.copy()
        token_ids[self.rows] = NO_TOKEN
        token_ids[self.own_faults] = OWN_FAULT
        return SampledTokens(token_ids, sampled.logprobs)


def poison(
    engine: Engine, is_poisoned: IsPoisoned, is_own_fault: IsPoisoned = lambda _name, _position: False
) -> Engine:
    """The engine with such a device; some rows fail by what their own requests ask for."""
    launch = engine.runner.launch

    def launch_poisoned(batch: ScheduledBatch, watch: Watch) -> Launched:
        owners = engine.scheduler.kv_cache.table.owners
        rows = [
            (owners[slot], position)
            for slot, position, samples in zip(
                batch.slots.tolist(), (batch.starts + batch.num_new_tokens).tolist(), batch.samples, strict=True
            )
            if samples
        ]

        def those(fail: IsPoisoned) -> list[int]:
            return [row for row, (owner, p) in enumerate(rows) if owner and fail(owner.request.request_id, p)]

        return _Poisoned(launch(batch, watch), those(is_poisoned), those(is_own_fault))

    engine.runner.launch = launch_poisoned  # type: ignore[method-assign]
    return engine

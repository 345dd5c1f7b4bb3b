"""Turns the scheduler's configuration into concrete limits that do not contradict one another."""

from dataclasses import dataclass

from roseinfer.config import SchedulerConfig
from roseinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's limits with every default resolved.

    Two bounds on starvation follow from them. Decode: a sequence decodes at least once in
    ceil(max_active_seqs / max_num_seqs) steps, and no step carries more than `max_prefill_tokens` of others' prompts.
    Prefill: decode rows leave at least one block of the budget, so the oldest prompt advances in every step.
    """

    max_num_seqs: int
    max_prefill_seqs: int
    max_active_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int

    @classmethod
    def resolve(cls, config: SchedulerConfig, block_size: int) -> "Limits":
        """Raises ConfigError when the values contradict one another."""
        max_prefill_seqs = config.max_prefill_seqs or config.max_num_seqs
        if config.max_num_batched_tokens < config.max_num_seqs + block_size:
            raise ConfigError(
                f"{config.max_num_batched_tokens} is less than max_num_seqs + block_size = "
                f"{config.max_num_seqs + block_size}: decoding could shut prefill out",
                param="scheduler.max_num_batched_tokens",
            )
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_prefill_seqs=max_prefill_seqs,
            max_active_seqs=config.max_active_seqs or max(config.max_num_seqs, max_prefill_seqs),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_tokens=config.max_prefill_tokens or config.max_num_batched_tokens,
        )

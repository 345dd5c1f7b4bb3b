"""The sampling parameters of every slot, as one table for the host, the device and C++."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Int32Array, SlotBinding
from roseinfer.model.device_stream import Outbox

Int64Array = npt.NDArray[np.int64]

GREEDY, WHOLE, TRUNCATED = range(3)  # a slot's need: the maximum, a draw from all tokens, from the likeliest
# A draw lays the kept tokens side by side, each as wide as its mass: up to so large a top-k the likelier before the
# others, else the lower ids before the others. `kMaxSelected` in kernels/cpp/sampling.cpp.
MAX_RANKED = 2048

# One slot's parameters, laid out as `Slot` in kernels/cpp/sampling.cpp.
SLOT = np.dtype(
    [
        ("seed", np.int64),
        ("top_k", np.int64),  # 0: no limit
        ("barred_before", np.int64),  # position from which on the slot may stop
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("need", np.int32),
        ("num_logprobs", np.int32),  # -1: none
    ]
)


class SamplingTable:
    """The parameters of each slot's owner. A slot without an owner is greedy."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, outbox: Outbox | None = None) -> None:
        self._outbox = outbox or Outbox(device)
        self.host: npt.NDArray[Any] = np.zeros(num_slots, SLOT)
        self.host["top_p"] = self.host["temperature"] = 1.0
        self.host["num_logprobs"] = -1
        self.num_with_logprobs = 0  # slots
        self.num_barred = 0  # slots whose owners may not stop at once
        self.vocab_size = vocab_size
        self._barred_ids: list[Int64Array] = [np.zeros(0, np.int64)] * num_slots
        self._host_bytes = torch.from_numpy(self.host.view(np.uint8).reshape(num_slots, SLOT.itemsize))
        self._device_bytes = self._host_bytes.to(device)  # the same memory on a CPU
        self.seed = self._column("seed", torch.int64)
        self.top_k = self._column("top_k", torch.int64)
        self.top_p = self._column("top_p", torch.float64)
        self.temperature = self._column("temperature", torch.float32)
        self.min_p = self._column("min_p", torch.float32)
        self.need = self._column("need", torch.int32)
        self.num_logprobs = self._column("num_logprobs", torch.int32)
        self.barred_before = self._column("barred_before", torch.int64)

    def _column(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A view of one field of all slots [slots] on the device."""
        offset: int = SLOT.fields[name][1]  # type: ignore[index]
        return self._device_bytes.view(dtype)[:, offset // dtype.itemsize]

    def bind(self, binding: SlotBinding) -> None:
        """Use the parameters of the slot's new owner from now on, on the device for all that is queued after this."""
        slot, params = binding.slot, binding.params
        is_whole = params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0
        is_greedy = params.is_greedy or params.top_k == 1
        stops = np.array(sorted({*binding.eos_token_ids, *params.stop_token_ids}), np.int64)
        barred = stops[stops < self.vocab_size]
        is_barred = params.min_tokens > 0 and len(barred) > 0
        self._barred_ids[slot] = barred
        row = self.host[slot : slot + 1]
        row["seed"] = params.seed or 0  # only the warm-up has None: the front end draws one for each request
        row["top_k"] = min(params.top_k, self.vocab_size)
        self.num_barred += is_barred - int(row["barred_before"].item() > 0)
        row["barred_before"] = binding.num_prompt_tokens + params.min_tokens if is_barred else 0
        row["top_p"] = params.top_p
        row["temperature"] = 1.0 if is_greedy else params.temperature
        row["min_p"] = params.min_p
        row["need"] = GREEDY if is_greedy else WHOLE if is_whole else TRUNCATED
        num_logprobs = -1 if params.num_logprobs is None else min(params.num_logprobs, self.vocab_size)
        self.num_with_logprobs += (num_logprobs >= 0) - int(row["num_logprobs"].item() >= 0)
        row["num_logprobs"] = num_logprobs
        if self._device_bytes.device != self._host_bytes.device:
            self._outbox.put(self._device_bytes[slot].copy_, row.copy().view(np.uint8))

    def barred_ids_of(self, slot: int) -> Int64Array:
        """Eos and stop tokens that the slot's owner must not get before it may stop; empty if it may at once."""
        return self._barred_ids[slot] if self.host["barred_before"][slot] else np.zeros(0, np.int64)

    def barred(self, slots: Int32Array, positions: Int32Array) -> tuple[Int64Array, Int64Array] | None:
        """Rows, and token ids, that must not be sampled: eos and stop tokens of rows that may not stop yet."""
        if not self.num_barred:  # as in most steps, behind whose forward pass a look costs a tenth of a millisecond
            return None
        waiting = np.flatnonzero(positions < self.host["barred_before"][slots])
        if not len(waiting):
            return None
        ids = [self._barred_ids[slots[row]] for row in waiting]
        return np.repeat(waiting, [len(row) for row in ids]), np.concatenate(ids)

"""A driver for Triton without a GPU: kernels are compiled for a GPU that is not there, and launches do nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class AbsentGpu:
    """A driver for Triton. `capability` 90 is sm_90, and may be changed."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 1 << 30}, load_binary=lambda *_: (self, self, 0, 0, 1024)
        )

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def launcher_cls(self, _source: object, _metadata: object) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object) -> None: ...

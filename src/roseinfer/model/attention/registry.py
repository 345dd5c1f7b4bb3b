"""Attention backends by name, and the one that `auto` takes. To add one: write its file, and add its case here."""

import logging
from importlib.util import find_spec

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import AttentionBackend, AttentionSpec
from roseinfer.model.attention.gathered import GatheredAttention
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.attention.native import NativeAttention
from roseinfer.model.attention.reference import ReferenceAttention
from roseinfer.model.kernels.library import Kernels

_log = logging.getLogger(__name__)


def choose_attention(
    name: str, cache: KVCache, spec: AttentionSpec, kernels: Kernels | None, *, batch_invariant: bool = False
) -> AttentionBackend:
    """The backend called `name` in the configuration, over `cache`. Raises ConfigError where it cannot run.

    `batch_invariant` selects among a GPU's backends: a CPU's are batch-invariant.
    """
    is_on_cuda = _is_on_cuda(cache)
    if name == "auto" and is_on_cuda:
        return _best_on_cuda(cache, spec, batch_invariant)
    if name == "auto":
        name = "native" if kernels is not None and NativeAttention.can_compute(spec) else "gathered"
    if name in {"triton", "flashinfer"} and not is_on_cuda:
        raise _refusal(f"`{name}` runs on CUDA only")
    try:
        match name:
            case "native":
                return _native(cache, spec, kernels)
            case "gathered":
                return GatheredAttention(cache, spec)
            case "triton":
                from roseinfer.model.attention.triton import TritonAttention

                return TritonAttention(cache, spec, batch_invariant=batch_invariant)
            case "flashinfer":
                if batch_invariant:
                    raise _refusal("`flashinfer` is not batch-invariant; choose `triton`")
                from roseinfer.model.attention.flashinfer import FlashInferAttention

                return FlashInferAttention(cache, spec)
            case _:
                return ReferenceAttention(cache, spec)
    except ImportError as error:
        raise _refusal(f"`{name}` cannot be imported: {error}") from None


def _is_on_cuda(cache: KVCache) -> bool:
    return cache.keys[0].device.type == "cuda"


def _best_on_cuda(cache: KVCache, spec: AttentionSpec, batch_invariant: bool) -> AttentionBackend:
    """FlashInfer where it is installed and works, with a log line where it does not; else Triton's kernels alone."""
    if find_spec("flashinfer") is not None and not batch_invariant:
        try:
            return choose_attention("flashinfer", cache, spec, None)
        except ConfigError as error:
            _log.warning("attention runs in Triton's kernels alone: %s", error.message)
    return choose_attention("triton", cache, spec, None, batch_invariant=batch_invariant)


def _native(cache: KVCache, spec: AttentionSpec, kernels: Kernels | None) -> AttentionBackend:
    if cache.keys[0].device.type != "cpu":
        raise _refusal("`native` runs on a CPU only")
    if kernels is None:
        raise _refusal("`native` needs compiled kernels: run `roseinfer kernels build`, and leave runner.kernels on")
    if not NativeAttention.can_compute(spec):
        raise _refusal(f"`native` needs a head_dim that is a multiple of 8, and this model has {spec.head_dim}")
    return NativeAttention(cache, spec, kernels)


def _refusal(sentence: str) -> ConfigError:
    return ConfigError(f"{sentence}.", param="runner.attention")

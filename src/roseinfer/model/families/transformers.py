"""Any decoder that transformers knows: its modelling code on our packed batch and paged cache, with our layers.

transformers builds the modules of config.json and reads the weights (transformers_loading.py). Then its attention
function is ours (`_attend_packed`), and its modules are replaced by our layers where they compute the same
(transformers_layers.py). A first pass over one token shows the shape of each layer's attention. What our cache cannot
serve, such as recurrent layers, is refused.
"""

import copy
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn

from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.attention.reference import ReferenceAttention
from roseinfer.model.device import Placement, WeightMemory
from roseinfer.model.families.tested import TESTED
from roseinfer.model.families.transformers_layers import Layers, is_mixture
from roseinfer.model.families.transformers_loading import (
    IN_FIRST_PASS,
    IN_STEPS,
    MODEL_ERRORS,
    load,
    max_positions,
    reason_of,
    refuse,
    sparing_imports,
)
from roseinfer.model.weights.checkpoint import Checkpoint

_FAR = 2_000_000  # a position that is farther from the first than any window is wide

_NO_KEYS = -1  # in the place of a window


class _FirstPass(threading.local):
    """Whether a model of this thread is in it."""

    is_on = False


_first_pass = _FirstPass()


class _Unserved(Exception):
    """What a model does that cannot be served, as the rest of a sentence about it."""


class _LayerCall(NamedTuple):
    """What one layer asked of the attention function."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    window: int | None
    softcap: float
    sinks: torch.Tensor | None


class _Seam:
    """Where transformers' attention meets ours; every attention module of a model has the model's own as `.seam`."""

    def __init__(self) -> None:
        self.attend: Attend | None = None  # of the step; None in the first pass
        self.calls: dict[int, _LayerCall] = {}  # by layer, of the first pass
        self.scale = 1.0  # of the attention backend; layers with another scale their queries


def _attend_packed(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]; so are keys and values
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: [1, tokens, heads, value_dim], and no weights."""
    seam, layer = module.seam, module.layer_idx
    assert isinstance(seam, _Seam)
    assert isinstance(layer, int)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = float(options.get("scaling") or query.shape[-1] ** -0.5)
    if seam.attend is None:
        if layer in seam.calls:
            raise _Unserved("computes attention more than once in a layer")
        # What hides keys in transformers' own attention is the mask: not all code passes the window beside it.
        window = options.get("sliding_window") if attention_mask is None else _window_of(attention_mask)
        shape = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        softcap = float(options.get("softcap") or 0.0)
        seam.calls[layer] = _LayerCall(*shape, scale, window, softcap, options.get("s_aux"))
        return v.new_zeros(1, *q.shape[:2], v.shape[-1]), None
    if scale != seam.scale:
        q = q * (scale / seam.scale)
    if v.shape[-1] < q.shape[-1]:
        v = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = seam.attend(layer, q, k, v).view(1, *q.shape)
    return out if value.shape[-1] == q.shape[-1] else out[..., : value.shape[-1]], None


def _mask_of_first_pass(mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor | None:
    """Transformers' mask interface: the window that the mask is, 0 for none, in the shape of a mask of one token.

    No mask is made, since attention sees by positions. It must be causal or a window: both show a query the keys up to
    its own, from the first on or as many as to any other.
    """
    if not _first_pass.is_on:
        return None
    batch, head = torch.tensor(0), torch.tensor(0)
    keys = torch.arange(_FAR + 8)
    seen = [mask_function(batch, head, torch.tensor(_FAR + i), keys).expand(len(keys)).nonzero()[:, 0] for i in (0, 5)]
    if not all(map(len, seen)):
        return torch.full((1, 1, 1, 1), _NO_KEYS)  # of a kind of layers that the model has none of
    firsts, lasts = zip(*[(int(some[0]), int(some[-1])) for some in seen], strict=True)
    is_window = firsts[1] in {0, firsts[0] + 5}
    if lasts != (_FAR, _FAR + 5) or not is_window or any(len(s) != s[-1] - s[0] + 1 for s in seen):
        raise _Unserved("hides keys otherwise than by a causal mask or a window")
    return torch.full((1, 1, 1, 1), _FAR + 1 - firsts[0] if firsts[0] else 0)


def _window_of(mask: torch.Tensor) -> int | None:
    """The window that `_mask_of_first_pass` made this mask of."""
    if mask.shape != (1, 1, 1, 1) or mask.dtype != torch.long:
        raise _Unserved("computes masks of its own")
    if int(mask) == _NO_KEYS:
        raise _Unserved("has a window without keys")
    return int(mask) or None


transformers.utils.logging.disable_progress_bar()
with sparing_imports():
    for name in (IN_STEPS, IN_FIRST_PASS):
        transformers.AttentionInterface.register(name, _attend_packed)
    transformers.AttentionMaskInterface.register(IN_FIRST_PASS, _mask_of_first_pass)


class TransformersModel:
    """A decoder of transformers, in the placement's dtype."""

    def __init__(self, checkpoint: Checkpoint, placement: Placement) -> None:
        """Raises ConfigError for a checkpoint that cannot be computed as its config.json says."""
        self._placement = placement
        layers, findings = Layers(placement, checkpoint.let_go), TESTED.get(str(checkpoint.config.get("model_type")))
        if not findings and placement.quantization == "int4":  # too coarse to be compared: first its floats are
            TransformersModel(checkpoint, dataclasses.replace(placement, quantization="none", memory=WeightMemory()))
        model = load(checkpoint, placement.dtype, layers.take_experts if findings else None)
        self.is_capturable = findings is not None and findings.is_capturable
        config = model.config.get_text_config(decoder=True)
        self.model_type = model.config.model_type
        self.vocab_size = config.vocab_size
        self.max_positions = max_positions(config, checkpoint)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._model, self._base = model, getattr(model, model.base_model_prefix)
        expected = None
        if findings:
            layers.replace_in(model)
            self._use_attention_of(model, checkpoint)
        else:
            self._use_attention_of(model, checkpoint)
            expected = self._by_transformers(checkpoint)
            layers.replace_in(model)
        assert layers.head is not None
        self.layer_linears, self.head = list(layers.by_shape.values()), layers.head
        self._given = _Given()
        setattr(model, model.base_model_prefix, self._given)
        if expected is not None:
            self._compare(expected, checkpoint)

    def _use_attention_of(self, model: Any, checkpoint: Checkpoint) -> None:
        self._seam, self.attention_spec = _first_pass_of(model, checkpoint)
        self._seam.scale = self.attention_spec.scale
        model.set_attn_implementation(IN_STEPS)

    def _by_transformers(self, checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows and logits of a short text by transformers alone, which counts its positions itself."""
        token_ids, _ = _short_text(self.vocab_size)
        self._model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                hidden = self._base(input_ids=token_ids[None], use_cache=False)[0][0]
                logits = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        except MODEL_ERRORS as error:
            refuse(checkpoint, f"is a {self.model_type}, which transformers cannot compute ({reason_of(error)})")
        self._model.set_attn_implementation(IN_STEPS)
        return hidden.float(), logits.float()

    def _compare(self, expected: tuple[torch.Tensor, torch.Tensor], checkpoint: Checkpoint) -> None:
        """Refuse a model, of a type that no test compares, whose hidden rows or logits are not transformers' own."""
        if not bool(expected[0].isfinite().all()):
            refuse(checkpoint, f"is a {self.model_type} whose hidden rows are no finite numbers")
        num_tokens, half = len(expected[0]), len(expected[0]) // 2
        cache = KVCache(self.attention_spec, 2, num_tokens, self._placement)
        attention = ReferenceAttention(cache, self.attention_spec)
        try:
            # A text that begins in one step and ends in the next, there beside the same text whole.
            first = self._hidden_of(attention, (range(half),))
            both = self._hidden_of(attention, (range(half, num_tokens), range(num_tokens)))
            hidden = torch.cat([first, both])
            with torch.inference_mode():
                found = hidden.float().cpu(), self.logits(hidden).float().cpu()
        except MODEL_ERRORS as error:
            refuse(checkpoint, f"is a {self.model_type}, which does not run with other layers ({reason_of(error)})")
        distances = [
            (ours - theirs.repeat(2, 1)).norm() / theirs.norm() for ours, theirs in zip(found, expected, strict=True)
        ]
        distance = float(max(distances))
        is_exact = self._placement.dtype == torch.float32 and self._placement.quantization == "none"
        limit = math.inf if self._placement.quantization == "int4" else 1e-4 if is_exact else 0.2
        if not distance < limit:
            refuse(checkpoint, f"is a {self.model_type}, which comes out otherwise than in transformers")

    def _hidden_of(self, attention: ReferenceAttention, pieces: tuple[range, ...]) -> torch.Tensor:
        """The hidden rows of one step, on the device, with a piece of the short text for each slot."""
        slots, lengths = np.arange(len(pieces), dtype=np.int32), list(map(len, pieces))
        where = torch.tensor([position for piece in pieces for position in piece])
        token_ids, positions = (numbers[where] for numbers in _short_text(self.vocab_size))
        tokens = PackedTokens(
            slots=slots.repeat(lengths),
            positions=positions.numpy().astype(np.int32),
            query_starts=np.cumsum([0, *lengths], dtype=np.int32),
            block_table=slots[:, None],
            max_query_len=max(lengths),
            max_context_len=max(piece.stop for piece in pieces),
        )
        device, attend = self._placement.device, attention.prepare(tokens)
        with torch.inference_mode():
            return self.forward(token_ids.to(device), positions.to(device), attend)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._seam.attend = attend
        output = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output[0][0]
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head by the model's own code, which may scale or bend its result."""
        self._given.rows = hidden[None]
        logits: torch.Tensor = self._model(input_ids=None, use_cache=False).logits[0]
        return logits


def _first_pass_of(model: Any, checkpoint: Checkpoint) -> tuple[_Seam, AttentionSpec]:
    """Run one token without a cache, on the model's device, and read the shape of the attention of every layer."""
    config, base, seam = model.config.get_text_config(decoder=True), getattr(model, model.base_model_prefix), _Seam()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.seam = seam
    token_ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    has_numbers = model.device.type != "meta"
    mask = None if has_numbers else torch.ones_like(token_ids)  # without one, masks depend on the numbers of positions
    _first_pass.is_on = has_numbers
    try:
        with torch.inference_mode():
            base(input_ids=token_ids, position_ids=token_ids, attention_mask=mask, use_cache=False)
    except _Unserved as error:
        refuse(checkpoint, str(error))
    except MODEL_ERRORS as error:
        if isinstance(error, NotImplementedError) and not has_numbers:
            raise  # the code asks for numbers
        refuse(checkpoint, f"cannot be computed without its own attention ({reason_of(error)})")
    finally:
        _first_pass.is_on = False
    calls = [seam.calls.get(layer) for layer in range(config.num_hidden_layers)]
    known = [call for call in calls if call is not None]
    if len(known) < len(calls) or len(seam.calls) != len(calls):
        refuse(checkpoint, "has layers without attention over keys and values, or whose attention is their own")
    if not known:
        refuse(checkpoint, "has no layers")
    first = known[0]
    if any((call[:4], call.softcap) != (first[:4], first.softcap) for call in known):
        refuse(checkpoint, "has layers with attention of different shapes")
    if first.value_dim > first.head_dim:
        refuse(checkpoint, "has values wider than its keys")
    sinks = tuple(call.sinks.detach() for call in known if call.sinks is not None)
    if sinks and len(sinks) < len(known):
        refuse(checkpoint, "has attention sinks in some layers only")
    limit = max_positions(config, checkpoint)
    windows = (None if call.window is None or call.window >= limit else call.window for call in known)
    return seam, AttentionSpec(*first[:3], first.scale, tuple(windows), first.softcap, sinks or None)


def attention_of(model: Any, checkpoint: Checkpoint) -> AttentionSpec:
    """The attention of modules without numbers. Raises ConfigError where a cache cannot serve it, or nothing says."""
    for module in model.modules():
        if is_mixture(module):
            module.forward = lambda x, *_: x  # which experts rows go to depends on numbers
    try:
        return _first_pass_of(model, checkpoint)[1]
    except NotImplementedError:  # as of JetMoE, whose attention has experts: any numbers do
        pass
    try:
        with_numbers = copy.deepcopy(model).to_empty(device="cpu")  # memory that is not written to takes no room
    except RuntimeError as error:
        refuse(checkpoint, f"is too large to be run here, which its shape depends on ({reason_of(error)})")
    return _first_pass_of(with_numbers, checkpoint)[1]


def _short_text(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions [16]. The first ids of a vocabulary pad texts, and some code gives these no position."""
    positions = torch.arange(16)
    return (positions * 7919 + 11) % vocab_size, positions


class _Given(nn.Module):
    """Stands for the base model where hidden rows are there already and the head is to be run."""

    rows: torch.Tensor  # [1, rows, width]

    @property
    def decoder(self) -> "_Given":
        """What OPT asks in place of its base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_Hidden":
        return _Hidden(self.rows)


class _Hidden:
    """The output of a base model, with hidden rows and nothing else, whatever its kind."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]

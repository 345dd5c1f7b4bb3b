"""Any decoder that transformers knows: its modelling code on our packed batch and paged cache, with our layers.

transformers builds the modules of config.json and reads the weights. Then its attention function is ours
(`_attend_packed`), and its linears, experts, RMSNorms and activations are replaced by our layers where they compute the
same. A first pass over one token shows the shape of each layer's attention. What our cache cannot serve, such as
recurrent layers, is refused. No code of a checkpoint is ever run.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.reference import ReferenceAttention
from roseinfer.model.checkpoint import Checkpoint
from roseinfer.model.device import Placement
from roseinfer.model.kv_cache import KVCache
from roseinfer.model.layers.activation import Activation, SiluGate, activated
from roseinfer.model.layers.linear import Linear
from roseinfer.model.layers.norm import Norm

NAME = "roseinfer"  # of our functions, among transformers' own
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # that a cache of keys and values serves
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
}
# Model types that tests/integration/test_transformers_models.py compares with transformers.
TESTED = frozenset(
    """
    apertus arcee bitnet cohere cohere2 deepseek_v3 ernie4_5 ernie4_5_moe exaone4 gemma gemma2 gemma3_text glm glm4
    glm4_moe gpt_neox gpt_oss granite granitemoe helium hunyuan_v1_dense mixtral nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2_moe qwen3_moe seed_oss smollm3 stablelm starcoder2
    """.split()  # noqa: SIM905 - a line for each would be a page
)
_FAR = 10_000  # a position behind every window's first edge in small models, and within most windows in large ones


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
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = float(options.get("scaling") or query.shape[-1] ** -0.5)
    if seam.attend is None:
        if attention_mask is not None:
            raise _Unserved("computes masks of its own")
        if layer in seam.calls:
            raise _Unserved("computes attention more than once in a layer")
        shape = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        window, softcap = options.get("sliding_window"), float(options.get("softcap") or 0.0)
        seam.calls[layer] = _LayerCall(*shape, scale, window, softcap, options.get("s_aux"))
        return v.new_zeros(1, *q.shape[:2], v.shape[-1]), None
    if scale != seam.scale:
        q = q * (scale / seam.scale)
    if v.shape[-1] < q.shape[-1]:
        v = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = seam.attend(layer, q, k, v).view(1, *q.shape)
    return out[..., : value.shape[-1]], None


def _check_mask(mask_function: Callable[..., torch.Tensor], **_: Any) -> None:
    """Transformers' mask interface: no mask is made, since attention sees by positions.

    In the first pass it checks that the mask is causal or a window: both show a query the keys up to its own, from the
    first on or as many as to any other.
    """
    if not _first_pass.is_on:
        return
    batch, head = torch.tensor(0), torch.tensor(0)
    keys = torch.arange(_FAR + 8)
    seen = [mask_function(batch, head, torch.tensor(_FAR + i), keys).expand(len(keys)).nonzero()[:, 0] for i in (0, 5)]
    if not all(map(len, seen)):
        return  # a window of no keys: the mask of a kind of layers that the model has none of
    firsts, lasts = zip(*[(int(some[0]), int(some[-1])) for some in seen], strict=True)
    is_window = firsts[1] in {0, firsts[0] + 5}
    if lasts != (_FAR, _FAR + 5) or not is_window or any(len(s) != s[-1] - s[0] + 1 for s in seen):
        raise _Unserved("hides keys otherwise than by a causal mask or a window")


transformers.utils.logging.disable_progress_bar()
transformers.AttentionInterface.register(NAME, _attend_packed)
transformers.AttentionMaskInterface.register(NAME, _check_mask)


class TransformersModel:
    """A decoder of transformers, in the placement's dtype."""

    def __init__(self, checkpoint: Checkpoint, placement: Placement) -> None:
        """Raises ConfigError for a checkpoint that cannot be computed as its config.json says."""
        self._placement = placement
        model = _load(checkpoint, placement.dtype)
        config = model.config.get_text_config(decoder=True)
        self.model_type = model.config.model_type
        self.vocab_size = config.vocab_size
        self.max_positions = _max_positions(config, checkpoint)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._model, self._base = model, getattr(model, model.base_model_prefix)
        self._seam, self.attention_spec = _first_pass_of(model, checkpoint)
        self._seam.scale = self.attention_spec.scale
        expected = None if self.model_type in TESTED else self._hidden_by_transformers()
        layers = _Layers(placement, model.get_output_embeddings())
        layers.replace_within(model)
        assert layers.head is not None, "a causal model has a head"
        self.layer_linears, self.head = list(layers.by_shape.values()), layers.head
        model.to(placement.device)
        if expected is not None:
            self._compare(expected, checkpoint)
        self._given = _Given()
        setattr(model, model.base_model_prefix, self._given)

    def _hidden_by_transformers(self) -> torch.Tensor:
        """The hidden rows of a short text by transformers alone."""
        token_ids, positions = _short_text(self.vocab_size)
        self._model.set_attn_implementation("eager")
        with torch.inference_mode():
            output = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._model.set_attn_implementation(NAME)
        hidden: torch.Tensor = output[0][0].float()
        return hidden

    def _compare(self, expected: torch.Tensor, checkpoint: Checkpoint) -> None:
        """Refuse a model, of a type that no test compares, whose hidden rows are not those of transformers."""
        token_ids, positions = _short_text(self.vocab_size)
        num_tokens = len(token_ids)
        cache = KVCache(self.attention_spec, 1, num_tokens, self._placement)
        tokens = PackedTokens(
            slots=np.zeros(num_tokens, np.int32),
            positions=positions.numpy().astype(np.int32),
            query_starts=np.array([0, num_tokens], np.int32),
            block_table=np.zeros((1, 1), np.int32),
            max_query_len=num_tokens,
            max_context_len=num_tokens,
        )
        attend = ReferenceAttention(cache, self.attention_spec).prepare(tokens)
        device = self._placement.device
        try:
            with torch.inference_mode():
                hidden = self.forward(token_ids.to(device), positions.to(device), attend).float().cpu()
        except (RuntimeError, AttributeError) as error:
            _refuse(checkpoint, f"is a {self.model_type}, which does not run with other layers ({error})")
        distance = float((hidden - expected).norm() / expected.norm())
        is_exact = self._placement.dtype == torch.float32 and self._placement.quantization == "none"
        if not distance < (1e-4 if is_exact else 0.2):
            _refuse(checkpoint, f"is a {self.model_type}, which comes out otherwise than in transformers")

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden rows [tokens, width] behind the final norm."""
        self._seam.attend = attend
        output = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output[0][0]
        return hidden

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
        _refuse(checkpoint, str(error))
    except (RuntimeError, TypeError, LookupError, AttributeError) as error:
        _refuse(checkpoint, f"cannot be computed without its own attention ({error})")
    finally:
        _first_pass.is_on = False
    calls = [seam.calls.get(layer) for layer in range(config.num_hidden_layers)]
    known = [call for call in calls if call is not None]
    if len(known) < len(calls) or len(seam.calls) != len(calls):
        _refuse(checkpoint, "has layers without attention over keys and values, or whose attention is their own")
    first = known[0]
    if any((call[:4], call.softcap) != (first[:4], first.softcap) for call in known):
        _refuse(checkpoint, "has layers with attention of different shapes")
    if first.value_dim > first.head_dim:
        _refuse(checkpoint, "has values wider than its keys")
    sinks = tuple(call.sinks.detach() for call in known if call.sinks is not None)
    if sinks and len(sinks) < len(known):
        _refuse(checkpoint, "has attention sinks in some layers only")
    limit = _max_positions(config, checkpoint)
    windows = (None if call.window is None or call.window >= limit else call.window for call in known)
    return seam, AttentionSpec(*first[:3], first.scale, tuple(windows), first.softcap, sinks or None)


def modules(checkpoint: Checkpoint, attention: str = NAME) -> Any:
    """The modules of a checkpoint, without numbers. Raises ConfigError where transformers does not know them."""
    config, _ = _read_config(checkpoint)

    def make() -> Any:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)

    return _of_transformers(make, checkpoint)


def attention_of(model: Any, checkpoint: Checkpoint) -> AttentionSpec:
    """The attention of modules without numbers. Raises ConfigError where a cache cannot serve it."""
    for module in model.modules():
        if _is_mixture(module):
            module.forward = lambda x, *_: x  # which experts rows go to depends on numbers
    return _first_pass_of(model, checkpoint)[1]


def _read_config(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The configuration, and the class of transformers that computes the model."""

    def read() -> Any:
        return transformers.AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)

    config = _of_transformers(read, checkpoint)
    vars(config).pop("quantization_config", None)  # the weights come as floats
    return config, _model_class(config, checkpoint)


def _short_text(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions [16]."""
    positions = torch.arange(16)
    return positions * 7919 % vocab_size, positions


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


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The model of transformers with its weights on the host. Raises ConfigError."""
    config, model_class = _read_config(checkpoint)
    lazily = {name: _Lazy(checkpoint, name) for name in checkpoint.names} if checkpoint.quantization else {}

    def read() -> Any:
        try:
            return model_class.from_pretrained(
                None if lazily else checkpoint.directory,
                config=config,
                state_dict=lazily or None,
                dtype=dtype,
                attn_implementation=NAME,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except RuntimeError as error:
            for refusal in (tensor.refusal for tensor in lazily.values() if tensor.refusal):
                raise refusal from error
            raise

    model, found = _of_transformers(read, checkpoint)
    wrong = {name: sorted(map(str, found.get(name) or ())) for name in ("missing_keys", "mismatched_keys")}
    for name, keys in wrong.items():
        if keys:
            _refuse(checkpoint, f"has {name.replace('_', ' ')}, the first of them {keys[0]}")
    return model.train(False)


def _of_transformers(make: Callable[[], Any], checkpoint: Checkpoint) -> Any:
    """What transformers makes; its errors are ConfigError."""
    try:
        return make()
    except KeyError:
        _refuse(checkpoint, "has attention of its own, which no other can take the place of")
    except (ValueError, OSError, RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{checkpoint.directory}: transformers cannot load it: {reason}", param="model.path"
        ) from error


class _Lazy:
    """A tensor in a state dict, read and dequantised when transformers indexes it, as it does with a file's slices."""

    refusal: ConfigError | None = None  # which transformers does not pass on

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, _: Any) -> torch.Tensor:
        try:
            return self._checkpoint.tensor(self._name)
        except ConfigError as error:
            self.refusal = error
            raise


def _model_class(config: Any, checkpoint: Checkpoint) -> Any:
    """The class of transformers that computes it. Raises ConfigError for a model that cannot be served."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        _refuse(checkpoint, "is an encoder and a decoder")
    known = transformers.AutoModelForCausalLM._model_mapping  # noqa: SLF001
    found = known.get(type(config), ())
    classes = {each.__name__: each for each in (found if isinstance(found, tuple) else (found,))}
    asked = [name for name in config.architectures or classes if name in classes]
    if not asked:
        named = ", ".join(config.architectures or [config.model_type])
        _refuse(checkpoint, f"asks for {named}, which is no decoder we know")
    if others := set((text.layer_types if hasattr(text, "layer_types") else None) or ()) - _LAYER_TYPES:
        _refuse(checkpoint, f"has layers of {', '.join(sorted(others))}")
    if text.to_dict().get("use_bidirectional_attention"):
        _refuse(checkpoint, "sees the tokens behind each token too")
    return classes[asked[0]]


def _max_positions(config: Any, checkpoint: Checkpoint) -> int:
    limit = config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None
    if not isinstance(limit, int) or limit < 1:
        _refuse(checkpoint, "does not say how many positions it has (max_position_embeddings)")
    return limit


def _refuse(checkpoint: Checkpoint, what: str) -> NoReturn:
    raise ConfigError(f"{checkpoint.directory} {what}; it cannot be served.", param="model.path")


def _is_mixture(module: nn.Module) -> bool:
    """Whether it holds the weights of a mixture's experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


class _Layers:
    """Replaces modules of transformers by our layers."""

    def __init__(self, placement: Placement, head: nn.Module | None) -> None:
        self.by_shape: dict[tuple[int, int], Linear] = {}  # one of each, without the head
        self.head: Linear | None = None
        self._placement = placement
        self._head = head

    def replace_within(self, parent: nn.Module) -> None:
        """Replace the modules within, layer by layer, so that few weights are there twice."""
        for name, child in list(parent.named_children()):
            ours = self._replacement(child)
            if ours is None:
                self.replace_within(child)
            else:
                setattr(parent, name, ours)

    def _replacement(self, module: nn.Module) -> nn.Module | None:
        if type(module) is nn.Linear:
            return _Linear(self._linear(module.weight, module.bias, is_head=module is self._head), module.weight.dtype)
        if _is_mixture(module):
            return _Experts(module, self._linear)
        if type(module).__name__.endswith("Router") and "weight" in dict(module.named_parameters(recurse=False)):
            return _Router(module, self._placement)
        if (gated := self._gated(module)) is not None:
            return gated
        if activation := _ACTIVATIONS.get(type(module).__name__):
            return _Wrapped(lambda x: activated(x, activation))
        return self._norm(module) if type(module).__name__.endswith("RMSNorm") else None

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False) -> Linear:
        dtype = torch.float32 if is_head else None
        linear = Linear(weight.detach(), None if bias is None else bias.detach(), self._placement, dtype=dtype)
        if is_head:
            self.head = linear
        else:
            self.by_shape.setdefault((linear.num_outputs, linear.num_inputs), linear)
        return linear

    def _gated(self, module: nn.Module) -> nn.Module | None:
        """A SwiGLU as two linears with our gate between them; None for any other module."""
        parts = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        last = parts.get("down_proj")
        firsts = [parts[name] for name in ("gate_up_proj", "gate_proj", "up_proj") if name in parts]
        if last is None or sum(first.out_features for first in firsts) != 2 * last.in_features:
            return None
        weight = torch.cat([first.weight.detach() for first in firsts])
        has_bias = all(len(list(first.parameters())) == 2 for first in firsts)
        bias = torch.cat([first.bias.detach() for first in firsts]) if has_bias else None
        rows = torch.randn(1, 2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
        with torch.inference_mode():
            gate, up = nn.functional.linear(rows, weight, bias).chunk(2, -1)
            if not torch.allclose(module(rows), last(nn.functional.silu(gate) * up), 1e-2, 1e-4):
                return None
        first, second = self._linear(weight, bias), self._linear(last.weight, last.bias)
        swiglu = SiluGate(self._placement)
        return _Wrapped(lambda x: second(swiglu(first(x))))

    def _norm(self, module: nn.Module) -> nn.Module | None:
        """Ours, where it computes the same: some add 1 to the weight, some have none, some norm in other types."""
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        epsilon = vars(module).get("variance_epsilon", vars(module).get("eps"))
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
            return None
        rows = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0)).to(self._placement.dtype)
        rounding = 1e-5 if rows.dtype == torch.float32 else 1e-2
        with torch.inference_mode():
            expected = module(rows).float()
            for scale in (weight.detach().float(), weight.detach().float() + 1.0):
                ours = _Norm(Norm(scale, None, epsilon, self._placement))
                if torch.allclose(ours(rows.to(self._placement.device)).float().cpu(), expected, rounding, 1e-5):
                    return ours
        return None


class _Wrapped(nn.Module):
    """A function of rows [rows, inputs] as a module of any number of dimensions."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._function(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


class _Linear(_Wrapped):
    """A linear. Its weight has a type and no numbers: some code looks at the type."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__(linear)
        self.weight = torch.empty(0, dtype=dtype)


class _Norm(_Wrapped):
    """A norm of rows of the placement's dtype."""

    def __init__(self, norm: Norm) -> None:
        super().__init__(lambda x: norm(x.float().contiguous()))


class _Router(nn.Module):
    """A mixture's router, whose product is ours: torch's own depends on the number of rows."""

    def __init__(self, router: Any, placement: Placement) -> None:
        super().__init__()
        bias = dict(router.named_parameters(recurse=False)).get("bias")
        wide = Placement(placement.device, torch.float32, "none", placement.kernels)
        self._router = router
        self._product = _Product(Linear(router.weight.detach(), None if bias is None else bias.detach(), wide))

    def forward(self, *args: Any, **options: Any) -> Any:
        with self._product:
            return self._router(*args, **options)


class _Product(TorchFunctionMode):
    """Computes `functional.linear` by a linear of ours, whatever the weight is called."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is not nn.functional.linear:
            return function(*args, **(options or {}))
        x = args[0]
        return self._linear(x.reshape(-1, x.shape[-1]).float()).view(*x.shape[:-1], -1).to(x.dtype)


class _Experts(nn.Module):
    """A mixture's experts: the rows of each expert together, by two linears, in place of a loop over tokens."""

    def __init__(self, module: Any, make_linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]) -> None:
        super().__init__()
        first, last = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"

        def linears(name: str) -> list[Linear]:
            weights, biases = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
            return [
                make_linear(weight.t() if module.is_transposed else weight, None if biases is None else biases[i])
                for i, weight in enumerate(weights)
            ]

        self._first, self._last = linears(first), linears(last)
        self._gate = module._apply_gate if module.has_gate else module.act_fn  # noqa: SLF001
        self._norm = module.post_expert_norm if module.has_post_expert_norm else None

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows [rows, width], and of each row its experts and their weights [rows, k] -> [rows, width]."""
        order = experts.flatten().argsort(stable=True)
        rows = x.index_select(0, order // experts.shape[1])
        counts = experts.flatten().bincount(minlength=len(self._first)).tolist()
        parts = [self._expert(index, part) for index, part in _parts(rows, counts)]
        mixed = torch.empty(len(order), x.shape[-1], dtype=x.dtype, device=x.device)
        mixed.index_copy_(0, order, torch.cat(parts))
        weighted = mixed.view(*experts.shape, -1) * weights[..., None]
        return weighted.sum(1).to(x.dtype)

    def _expert(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        out = self._last[index](self._gate(self._first[index](rows)).contiguous())
        return out if self._norm is None else self._norm(out)


def _parts(rows: torch.Tensor, counts: Iterable[int]) -> Iterable[tuple[int, torch.Tensor]]:
    """The rows of each expert that has some; rows are sorted by expert."""
    start = 0
    for index, count in enumerate(counts):
        if count:
            yield index, rows[start : start + count]
            start += count

"""Our layers in the place of those in transformers' modules: linears, experts, norms, activations, embeddings.

A module is replaced where ours computes the same: by its class, or where numbers drawn at random come out equal.
Linears that read the same rows become one: queries, keys and values, and the two halves of a SwiGLU.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from roseinfer.model.device import Placement
from roseinfer.model.layers.activation import Activation, SiluGate, activated, sigmoid
from roseinfer.model.layers.linear import Embedding, Linear
from roseinfer.model.layers.norm import Norm

_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
}
_GATES = (("gate_up_proj",), ("gate_proj", "up_proj"))  # the first linears of a SwiGLU, by their names
_QKV = ("q_proj", "k_proj", "v_proj")
Rows = Callable[[torch.Tensor], torch.Tensor]  # a function of rows
_SIGMOIDS: dict[Callable[..., Any], Rows] = dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid), sigmoid)


def is_mixture(module: nn.Module) -> bool:
    """Whether it holds the weights of a mixture's experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


class Layers:
    """Replaces the modules of a causal model, one after the other, so that few weights are there twice."""

    def __init__(self, placement: Placement, let_go: Callable[[], None]) -> None:
        """`let_go` is called when numbers of the model were copied."""
        self.by_shape: dict[tuple[int, int], Linear] = {}  # one of each, without the head
        self.head: Linear | None = None
        self._placement = placement
        self._let_go = let_go
        self._made: dict[nn.Module, nn.Module] = {}  # what takes the place of a module
        self._gated_types: dict[type[nn.Module], bool] = {}

    def take_experts(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Torch's hook for the registration of parameters: packs the experts of a layer as soon as they are all there.

        They are most of a model, and transformers makes one tensor of them. The module is left without numbers.
        """
        if parameter is None or parameter.is_meta or not is_mixture(module) or name not in vars(module)["_parameters"]:
            return parameter
        parameters = vars(module)["_parameters"]
        if any(other is not None and other.is_meta for key, other in parameters.items() if key != name):
            return parameter
        parameters[name] = parameter
        self._made[module] = _Experts(module, self._linear, self._placement)
        for key, other in parameters.items():
            parameters[key] = None if other is None else nn.Parameter(other.to("meta"), requires_grad=False)
        return parameters[name]  # type: ignore[no-any-return]

    def replace_in(self, model: Any) -> None:
        """Replace the modules of a model. What stays of it is moved to the placement."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert type(head) is nn.Linear, "a causal model has a head"
        is_tied = embedding.weight is head.weight
        self.head = self._linear([head.weight], head.bias, dtype=torch.float32)
        self._made[head] = _Module(self.head, self._placement.dtype)
        if is_tied and self.head.has_rows:
            self._made[embedding] = self._embedding(embedding, self.head)
        self._replace_within(model)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                dtype = self._placement.dtype if parameter.itemsize < torch.float32.itemsize else parameter.dtype
                placed = parameter.detach().to(self._placement.device, dtype, copy=True)
                setattr(module, name, nn.Parameter(placed, requires_grad=False))
        model.to(self._placement.device)
        self._let_go()

    def _replace_within(self, parent: nn.Module) -> None:
        self._join_heads(parent)
        for name, child in list(parent.named_children()):
            ours = self._made.pop(child, None) or self._replacement(child)
            if ours is None:
                self._replace_within(child)
                ours = _with_ours(child, _SIGMOIDS) if _names_sigmoid(child) else child
            setattr(parent, name, ours)

    def _replacement(self, module: nn.Module) -> nn.Module | None:
        """Ours for a module; None if only those within it may have one."""
        name = type(module).__name__
        if type(module) is nn.Linear:
            return _Module(self._linear([module.weight], module.bias), self._placement.dtype)
        if type(module) is nn.Embedding:
            return self._embedding(module, None)
        if is_mixture(module):
            return _Experts(module, self._linear, self._placement)
        if name.endswith("Router") and "weight" in dict(module.named_parameters(recurse=False)):
            return self._router(module)
        if (activation := _activation(module, self._placement)) is not None:
            return activation
        return self._norm(module) if name.endswith("RMSNorm") else self._gated(module)

    def _linear(
        self, weights: list[torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> Linear:
        bias = None if bias is None else bias.detach()
        linear = Linear([weight.detach() for weight in weights], bias, self._placement, dtype=dtype)
        if dtype is None:
            self.by_shape.setdefault((linear.num_outputs, linear.num_inputs), linear)
        self._let_go()
        return linear

    def _joined(self, linears: list[nn.Linear]) -> Linear | None:
        """One linear of several that have as many inputs; None where only some have a bias."""
        biases = [linear.bias.detach() for linear in linears if "bias" in dict(linear.named_parameters())]
        if len(biases) not in {0, len(linears)} or len({linear.in_features for linear in linears}) > 1:
            return None
        return self._linear([linear.weight for linear in linears], torch.cat(biases) if biases else None)

    def _join_heads(self, attention: nn.Module) -> None:
        """Make the products for queries, keys and values one."""
        parts = [vars(attention)["_modules"].get(name) for name in _QKV]
        if all(type(part) is nn.Linear for part in parts) and (linear := self._joined(parts)) is not None:
            shared = _Shared(linear, [part.out_features for part in parts])
            for index, name in enumerate(_QKV):
                setattr(attention, name, _Function(partial(shared.piece, index), self._placement.dtype))

    def _gated(self, module: nn.Module) -> nn.Module | None:
        """A SwiGLU as two linears with our gate between them; None for any other module."""
        parts = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
        names = next((names for names in _GATES if all(name in parts for name in names)), None)
        last = parts.get("down_proj")
        if names is None or last is None or sum(parts[name].out_features for name in names) != 2 * last.in_features:
            return None
        if type(module) not in self._gated_types:
            self._gated_types[type(module)] = _computes_swiglu(module, names)
        if not self._gated_types[type(module)]:
            return None
        if (first := self._joined([parts[name] for name in names])) is None:
            return None
        second, gate = self._linear([last.weight], last.bias), SiluGate(self._placement)
        return _Module(lambda x: second(gate(first(x))), self._placement.dtype)

    def _norm(self, module: nn.Module) -> nn.Module | None:
        """Ours, where it computes the same: some add 1 to the weight, some have none, some norm in other types."""
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        epsilon = vars(module).get("variance_epsilon", vars(module).get("eps"))
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
            return None
        rows = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0)).to(self._placement.dtype)
        rounding = 1e-5 if rows.dtype == torch.float32 else 1e-2
        plain, norm = Placement(torch.device("cpu"), self._placement.dtype), None
        with torch.inference_mode():
            expected = module(rows).float()
            for scale in (weight.detach().float(), weight.detach().float() + 1.0):
                if torch.allclose(_normed(Norm(scale, None, epsilon, plain))(rows).float(), expected, rounding, 1e-5):
                    norm = Norm(scale, None, epsilon, self._placement)
        return None if norm is None else _Module(_normed(norm), self._placement.dtype)

    def _embedding(self, module: nn.Embedding, head: Linear | None) -> nn.Module:
        """A table in the type of its file, or the rows of the head; scaled as the module does it."""
        table, dtype = Embedding(module.weight.detach(), self._placement, head), self._placement.dtype

        def rows(ids: torch.Tensor) -> torch.Tensor:
            return table(ids.flatten()).to(dtype).view(*ids.shape, -1)

        if type(module) is nn.Embedding:
            return _Function(rows, dtype)
        module.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        return _with_ours(module, {nn.functional.embedding: rows})

    def _router(self, router: Any) -> nn.Module:
        """A mixture's router, whose product is ours: torch's own depends on the number of rows."""
        bias = dict(router.named_parameters(recurse=False)).get("bias")
        wide = Placement(self._placement.device, torch.float32, "none", self._placement.kernels)
        linear = Linear(router.weight.detach(), None if bias is None else bias.detach(), wide)

        def product(x: torch.Tensor) -> torch.Tensor:
            return linear(x.reshape(-1, x.shape[-1]).float()).view(*x.shape[:-1], -1).to(x.dtype)

        return _with_ours(router, {nn.functional.linear: product} | _SIGMOIDS)


def _activation(module: nn.Module, placement: Placement) -> nn.Module | None:
    """Ours, where there is one of its kind."""
    kind = _ACTIVATIONS.get(type(module).__name__)
    return None if kind is None else _Module(lambda x: activated(x, kind), placement.dtype)


def _normed(norm: Norm) -> Rows:
    return lambda x: norm(x.float().contiguous())


@torch.inference_mode()
def _computes_swiglu(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether it is last(silu(gate) * up), by functions in the place of its linears, of which `names` are the first."""
    rows = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    both = _Function(lambda x: torch.cat([2 * x, 3 * x], -1), rows.dtype)
    single = [_Function(lambda x: 2 * x, rows.dtype), _Function(lambda x: 3 * x, rows.dtype)]
    stubs = dict(zip(names, [both] if len(names) == 1 else single, strict=True))
    stubs["down_proj"] = _Function(lambda x: 5 * x, rows.dtype)
    kept = {name: getattr(module, name) for name in stubs}
    try:
        for name, stub in stubs.items():
            setattr(module, name, stub)
        out = module(rows)
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return False
    finally:
        for name, child in kept.items():
            setattr(module, name, child)
    expected = 5 * (nn.functional.silu(2 * rows) * (3 * rows))
    return isinstance(out, torch.Tensor) and out.shape == expected.shape and torch.allclose(out, expected, 1e-5, 1e-6)


class _Function(nn.Module):
    """A function as a module. Its weight has a type and no numbers: some code looks at the type."""

    def __init__(self, function: Rows, dtype: torch.dtype) -> None:
        super().__init__()
        self.forward = function
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Without a look for hooks, as there are none: it takes a microsecond, and a layer has seven of these."""
        out: torch.Tensor = self.forward(x)
        return out


class _Module(_Function):
    """A function of rows as a module of any number of dimensions."""

    def __init__(self, function: Rows, dtype: torch.dtype) -> None:
        def of_any(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 1 and x.dim() == 3:  # as it is in a step
                return function(x.squeeze(0)).unsqueeze(0)
            out = function(x.reshape(-1, x.shape[-1]))
            return out.view(*x.shape[:-1], out.shape[-1])

        super().__init__(of_any, dtype)


class _Shared:
    """A linear that several modules are parts of: the first of them to get some rows computes it for the others."""

    def __init__(self, linear: Linear, sizes: list[int]) -> None:
        self._linear = linear
        self._sizes = sizes
        self._x: torch.Tensor | None = None
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._num_left = 0

    def piece(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._x is not x:
            out = self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._x, self._pieces, self._num_left = x, torch.split(out, self._sizes, -1), len(self._sizes)
        piece = self._pieces[index]
        self._num_left -= 1
        if not self._num_left:
            self._x, self._pieces = None, ()
        return piece


def _with_ours(module: nn.Module, ours: dict[Callable[..., Any], Rows]) -> nn.Module:
    """The module, in whose forward ours take the place of functions of torch, whatever its weights are called."""
    forward, mode = module.forward, _InsteadMode(ours)

    def under_mode(*args: Any, **options: Any) -> Any:
        with mode:
            return forward(*args, **options)

    module.forward = under_mode
    return module


def _names_sigmoid(module: nn.Module) -> bool:
    """Whether its forward, behind what decorates it, calls a function or a method of that name."""
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and "sigmoid" in forward.__code__.co_names


class _InsteadMode(TorchFunctionMode):
    def __init__(self, ours: dict[Callable[..., Any], Rows]) -> None:
        super().__init__()
        self._ours = ours

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        ours = self._ours.get(function)
        return function(*args, **(options or {})) if ours is None else ours(args[0])


class _Experts(nn.Module):
    """A mixture's experts: the rows of each expert together, by two linears, in place of a loop over tokens.

    A row has the same bits whatever other rows its expert has, where linears do.
    """

    def __init__(
        self,
        module: Any,
        make_linear: Callable[[list[torch.Tensor], torch.Tensor | None], Linear],
        placement: Placement,
    ) -> None:
        super().__init__()
        first, last = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"

        def linears(name: str) -> list[Linear]:
            weights, biases = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
            return [
                make_linear([weight.t() if module.is_transposed else weight], None if biases is None else biases[i])
                for i, weight in enumerate(weights)
            ]

        self._first, self._last = linears(first), linears(last)
        self._padded_rows = placement.padded_rows
        if hasattr(module, "act_fn") and (ours := _activation(module.act_fn, placement)) is not None:
            module.act_fn = ours
        self._sigmoid = _InsteadMode(_SIGMOIDS)  # which gpt-oss has in its gate
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
        num_rows = len(rows)
        if num_more := self._padded_rows(num_rows) - num_rows:
            rows = torch.cat((rows, rows[-1:].expand(num_more, -1)))
        with self._sigmoid:
            gated = self._gate(self._first[index](rows))
        out = self._last[index](gated.contiguous())[:num_rows]
        return out if self._norm is None else self._norm(out)


def _parts(rows: torch.Tensor, counts: Iterable[int]) -> Iterable[tuple[int, torch.Tensor]]:
    """The rows of each expert that has some; rows are sorted by expert."""
    start = 0
    for index, count in enumerate(counts):
        if count:
            yield index, rows[start : start + count]
            start += count

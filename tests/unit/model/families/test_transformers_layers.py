"""Our layers in the place of transformers' modules: what no model small enough for the other tests would show."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from roseinfer.model.device import Placement
from roseinfer.model.families.tested import TESTED
from roseinfer.model.families.transformers_layers import Layers, _Experts, is_mixture
from roseinfer.model.layers.linear import Linear

NUM_ROWS, WIDTH, INNER = 157, 1024, 776  # of what torch shares out, no thread begins where a register would
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 2, "moe_k": 2},
    "glm4_moe": {"n_routed_experts": 2, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 2},
    "mixtral": {"num_local_experts": 2},
    "olmoe": {"num_experts": 2, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 2},
    "qwen2_moe": {"num_experts": 2, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 2, "num_experts_per_tok": 2},
}


@pytest.fixture
def _three_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


def test_every_mixture_is_tested() -> None:
    mixtures = {name for name, found in TESTED.items() if "mixture" in found.checkpoints or not found.is_capturable}
    assert EXPERTS.keys() == mixtures


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize("model_type", EXPERTS)
@torch.inference_mode()
def test_a_row_alone_and_among_those_of_its_experts(model_type: str) -> None:
    """Torch shares out its sigmoid by the number of rows, and computes the end of each share otherwise.

    One row goes through oneDNN in another way than several.
    """
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "moe_intermediate_size": INNER, "vocab_size": 64}
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **sizes, **shape, **ids, **EXPERTS[model_type])
    )
    module = next(module for module in model.modules() if is_mixture(module))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    placement = Placement(torch.device("cpu"), torch.float32)
    experts = _Experts(module, lambda weights, bias: Linear(weights, bias, placement), placement)
    x, weights = torch.randn(NUM_ROWS, WIDTH, generator=generator), torch.rand(NUM_ROWS, 2, generator=generator)
    first = torch.randint(0, 2, (NUM_ROWS, 1), generator=generator)
    chosen = torch.cat((first, 1 - first), 1)
    rows = zip(*(torch.split(each, 1) for each in (x, chosen, weights)), strict=True)
    assert torch.equal(experts(x, chosen, weights), torch.cat([experts(*row) for row in rows]))


def decorated(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def run(*args: Any) -> torch.Tensor:
        return forward(*args)

    return run


class Gated(nn.Module):
    """As a gate of attention or of a shared expert in a model that no test has."""

    kind = "full_attention"  # of which the layer around it asks

    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid()


class Causal(nn.Module):
    """As much of a causal model as `Layers` asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gated, self.head = nn.Embedding(4, 8), Gated(), nn.Linear(8, 4)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@torch.inference_mode()
def test_a_sigmoid_in_any_module_has_the_same_bits_wherever_a_row_lies() -> None:
    model = Causal()
    Layers(Placement(torch.device("cpu"), torch.float32), lambda: None).replace_in(model)
    x = torch.randn(NUM_ROWS, 13, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([model.gated(row) for row in torch.split(x, 1)])
    assert not torch.equal(x.sigmoid(), alone), "torch's own depends on the place"
    assert torch.equal(model.gated(x), alone)
    assert model.gated.kind == "full_attention"

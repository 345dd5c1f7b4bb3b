"""The performance model: its nodes and operations against counts made elsewhere, and loads against its own steps."""

import pytest

from benchmarks.figures import summarise
from benchmarks.gpu.performance_model import (
    GPUS,
    MODELS,
    NODE_S,
    Model,
    Node,
    Step,
    decode,
    markdown,
    nodes_of,
    of_device,
    prompt,
    step_s,
    streams_of,
)
from benchmarks.roofs import STEP_WEIGHTS
from benchmarks.workloads import Shape
from tests.unit.model.test_fake_cuda import EXPECTED, NUM_LAYERS

H100 = GPUS["H100"]
GPT2 = MODELS["GPT-2 small"]
PARAMETERS = {  # of the checkpoints
    "Qwen3-0.6B": 596_049_920,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
}


def num_nodes(model: Model, step: Step) -> int:
    return sum(node.num_nodes for node in nodes_of(model, step, H100))


@pytest.mark.parametrize("name", ["GPT-2 small", "Qwen3-0.6B"])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_nodes_are_those_of_the_captured_step(name: str, batch: int) -> None:
    """Counted by `fake_cuda.py`, with as many processors as an H100."""
    assert num_nodes(MODELS[name], decode(batch, 6)) == EXPECTED[f"{name}, batch {batch}"].nodes


def test_the_nodes_of_a_prompt_are_those_of_its_graph() -> None:
    assert num_nodes(GPT2._replace(num_layers=NUM_LAYERS), prompt(128)) == EXPECTED["prompt"].nodes


def num_operations(model: str, step: Step) -> int:
    return sum(node.num_nodes * node.num_operations for node in nodes_of(MODELS[model], step, H100))


def test_a_node_takes_the_longer_of_bytes_and_operations() -> None:
    read, computed = Node("read", 2, 3_350_000), Node("computed", 2, 3_350_000, 10_000_000_000)
    assert read.seconds(H100) == pytest.approx(2 * (1e-6 + NODE_S))
    assert computed.seconds(H100) == pytest.approx(2 * (1e10 / 989.5e12 + NODE_S))


def test_a_token_is_multiplied_by_every_weight_once() -> None:
    alone = Step(1, 1, 0, 0)
    assert num_operations("GPT-2 small", alone) == 2 * STEP_WEIGHTS
    for name, num_parameters in PARAMETERS.items():
        model = MODELS[name]
        is_tied = name != "Llama-3.1-8B"
        others = 0 if is_tied else model.vocab_size * model.width
        vectors = (2 * model.num_layers + 1) * model.width + 2 * model.head_dim * model.num_layers * ("Qwen3" in name)
        assert num_operations(name, alone) == 2 * (num_parameters - others - vectors), name


def test_what_a_step_reads_beside_weights_is_its_keys_and_values() -> None:
    def num_bytes(step: Step) -> int:
        return sum(node.num_nodes * node.num_bytes for node in nodes_of(MODELS["Llama-3.1-8B"], step, H100))

    a_token_of_all_layers = 32 * 2 * 8 * 128 * 2
    assert num_bytes(decode(64, 501)) - num_bytes(decode(64, 500)) == 64 * a_token_of_all_layers


def test_a_prompt_sees_half_a_square() -> None:
    pairs = num_operations("GPT-2 small", prompt(100)) - num_operations("GPT-2 small", Step(100, 1, 100, 0))
    assert pairs == 4 * 12 * 768 * (100 * 101 // 2)


def test_a_stream_gets_a_token_in_each_step_of_the_model() -> None:
    figures = summarise(streams_of(Shape(1, 0.0, (128,), 32), H100, 64))
    assert figures["tpot_p50_ms"] == pytest.approx(step_s(GPT2, decode(1, 144), H100) * 1e3, rel=0.01)
    assert figures["ttft_p50_ms"] == pytest.approx(step_s(GPT2, prompt(128), H100) * 1e3, rel=0.05)


def test_a_burst_shares_the_weights() -> None:
    figures = summarise(streams_of(Shape(64, 0.0, (4,), 64), H100, 64))
    assert figures["tokens"] == 64 * 64
    assert figures["tpot_p50_ms"] == pytest.approx(step_s(GPT2, decode(64, 36), H100) * 1e3, rel=0.05)


def test_a_gpu_without_published_rates_has_no_prediction() -> None:
    assert of_device("NVIDIA H200") is GPUS["H200"]
    assert of_device("NVIDIA H100 PCIe") is None, "another card, with other rates"


def test_the_table_has_every_model_and_every_source() -> None:
    text = markdown()
    assert all(text.count(f"| {name} |") == 5 for name in MODELS)
    assert all(gpu.source in text for gpu in GPUS.values())

"""The dashboard of GPUs: what NVIDIA's DCGM exporter says, and the tokens that the servers make of it."""

from monitoring.board import SHOWN, Board
from monitoring.panels import Placed, Query, lines
from monitoring.promql import foreign, nonzero

BY_GPU = "{{Hostname}} gpu {{gpu}}"


def device(name: str) -> str:
    """Of the GPUs of the pods, under the labels of the exporter with honorLabels and without."""
    full = f"DCGM_FI_{name}"
    own = foreign(full, 'namespace=~"$namespace"', 'pod=~"$pod"')
    exported = foreign(full, 'exported_namespace=~"$namespace"', 'exported_pod=~"$pod"')
    return f"({own} or {exported})"


def board() -> Board:
    return Board(
        "gpu",
        "GPU",
        "The devices under the servers, as NVIDIA's DCGM exporter tells of them, and what they yield.",
        {
            "Work": _work(),
            "Memory": _memory(),
            "Yield": _yield(),
            "Health": _health(),
        },
    )


def _panel(title: str, unit: str, description: str, *queries: tuple[str, str], limit: float | None = None) -> Placed:
    by_gpu = [
        Query(f"max by (Hostname, gpu) ({expression})", f"{BY_GPU} {legend}".strip()) for legend, expression in queries
    ]
    return lines(title, description, *by_gpu, unit=unit, limit=limit)


def _work() -> list[Placed]:
    return [
        _panel(
            "Engine active",
            "percentunit",
            "Share of the time in which any kernel ran. Below 0.9 with requests waiting, the host is too slow: "
            "see gaps of `schedule` and `h2d_copy` on roseinfer / Jitter.",
            ("", device("PROF_GR_ENGINE_ACTIVE")),
        ),
        _panel(
            "Multiprocessors active",
            "percentunit",
            "Share of multiprocessors with work. Low while the engine is active: the batch is small; more "
            "requests a server cost little.",
            ("", device("PROF_SM_ACTIVE")),
        ),
        _panel(
            "Tensor cores active",
            "percentunit",
            "Share of cycles of tensor cores. High while prompts are read, low while decoding: that is how it "
            "should be.",
            ("", device("PROF_PIPE_TENSOR_ACTIVE")),
        ),
    ]


def _memory() -> list[Placed]:
    return [
        _panel(
            "Memory bus active",
            "percentunit",
            "Share of cycles in which memory moves. Decoding lives off it: near its ceiling, only smaller weights "
            "or a smaller KV cache make a step shorter.",
            ("", device("PROF_DRAM_ACTIVE")),
        ),
        _panel(
            "Memory in use",
            "decmbytes",
            "Weights, graphs and the KV cache, all taken at the start. It should be flat; free memory that stays "
            "is a larger cache.memory_utilization.",
            ("used", device("DEV_FB_USED")),
            ("free", device("DEV_FB_FREE")),
        ),
        _panel(
            "PCIe",
            "Bps",
            "Bytes a second to and from the host. More than a few MB/s while decoding: weights or the KV cache do "
            "not stay on the device.",
            ("to the device", device("PROF_PCIE_RX_BYTES")),
            ("from the device", device("PROF_PCIE_TX_BYTES")),
        ),
    ]


def _yield() -> list[Placed]:
    tokens = SHOWN.total("generation_tokens_total")
    power, active = device("DEV_POWER_USAGE"), device("PROF_GR_ENGINE_ACTIVE")
    return [
        lines(
            "Energy of a token",
            "Power of all devices over generated tokens a second. It falls with larger batches: the cheapest "
            "token is made by a busy server.",
            Query(f"sum({power}) / {nonzero(tokens)} and on () {tokens} > 0 or on () vector(0)", "joules a token"),
            unit="joule",
        ),
        lines(
            "Tokens of a GPU",
            "Generated tokens a second for each device. The figure to size a fleet with: take it at the knee of "
            "the load test.",
            Query(f"{tokens} / count({active})", "tokens a second"),
            unit="none",
        ),
        _panel(
            "Power",
            "watt",
            "Watts. At the limit of the device clocks fall: compare with *Clock*.",
            ("", power),
        ),
    ]


def _health() -> list[Placed]:
    return [
        _panel(
            "Clock",
            "hertz",
            "Clock of the multiprocessors. A fall under load is heat or the power limit, and makes every step longer.",
            ("", f"{device('DEV_SM_CLOCK')} * 1e6"),
        ),
        _panel(
            "Temperature",
            "celsius",
            "Above some 85 degrees devices slow down: airflow, or the power limit.",
            ("", device("DEV_GPU_TEMP")),
            limit=85,
        ),
        _panel(
            "Last XID",
            "none",
            "Code of the device's last error, 0 if none. Any change pages: RoseinferGPUXid in docs/operations.md "
            "says what to do about which code.",
            ("", device("DEV_XID_ERRORS")),
        ),
    ]

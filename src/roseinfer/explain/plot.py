"""Draws the distribution of gaps, and what its tail went to; needs the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from roseinfer.errors import ConfigError
from roseinfer.explain.explanation import Explanation, ms, percent
from roseinfer.observe.gaps.request_gaps import Gap

_DPI = 150
_NUM_BINS = 80


def require_matplotlib() -> None:
    """Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "needs matplotlib, which the extra `plot` brings: pip install 'roseinfer[plot]'", param="--plot"
        ) from None


def write_plot(path: Path, explanation: Explanation, gaps: Sequence[Gap]) -> None:
    """Writes a PNG file. Raises ConfigError for a path that cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    durations_ms = np.maximum(np.array([gap.duration_ns for gap in gaps]) / 1e6, 1e-3)
    low, high = durations_ms.min(), durations_ms.max()
    above.hist(durations_ms, np.geomspace(low * 0.95, high * 1.05, _NUM_BINS), color="#7a8ca6")
    above.set_xscale("log")
    above.set_yscale("log")
    above.xaxis.set_major_formatter("{x:g}")
    above.set_xlabel("gap, ms")
    above.set_ylabel("gaps")
    above.set_title(f"{explanation.num_gaps} gaps by the clock {explanation.clock}, {explanation.model_name}")
    for name, seconds, style in (("p50", explanation.p50_s, ":"), ("p99", explanation.p99_s, "--")):
        above.axvline(seconds * 1e3, color="#b03a48", linestyle=style, label=f"{name} {ms(seconds)}")
    above.legend()
    causes = [share for share in explanation.causes if share.share >= 0.005][::-1]
    bars = below.barh(
        [str(share.cause) for share in causes], [share.seconds * 1e3 for share in causes], color="#b03a48"
    )
    below.margins(x=0.1)
    below.bar_label(bars, [percent(share.share) for share in causes], padding=3)
    below.set_xlabel(f"share of p99 - p50 = {ms(explanation.p99_s - explanation.p50_s)}, in ms")
    try:
        figure.savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param="--plot") from None

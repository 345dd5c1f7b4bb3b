"""The colours of causes stay apart for every reader: any two a little, those beside each other in a panel more.

A CIEDE2000 difference of about 1 is the least that is seen; 10 is seen at a glance between patches that touch.
"""

from itertools import combinations, pairwise

import numpy as np
import pytest

from roseinfer.observe.gaps.causes import CAUSES, Cause
from tests.unit.observe.gaps.color_vision import PUBLISHED, VISIONS, difference, seen

ANY_TWO, IN_A_PANEL, IN_A_STACK = 10.0, 14.0, 22.0
BACKGROUNDS = {  # the page's cards and lanes of decoding in both schemes, and Grafana's panels
    **dict.fromkeys(("#ffffff", "#1d1a22", "#181b1f"), 12.0),
    **dict.fromkeys(("#8fd6c9", "#2f7f74"), 9.0),
}


def apart(pairs: list[tuple[Cause, Cause]], vision: str) -> dict[tuple[Cause, Cause], float]:
    first, second = (seen([pair[place].row.color for pair in pairs], VISIONS[vision]) for place in (0, 1))
    return dict(zip(pairs, difference(first, second).tolist(), strict=True))


@pytest.mark.parametrize(("one", "other", "expected"), PUBLISHED)
def test_differences_are_those_that_are_published(
    one: tuple[float, ...], other: tuple[float, ...], expected: float
) -> None:
    assert difference(np.array(one), np.array(other)) == pytest.approx(expected, abs=5e-5)


def test_what_a_dichromat_confuses_is_confused() -> None:
    """Red and green of one lightness are far apart for most readers and close to each other for two kinds."""
    far = {
        name: float(difference(*seen(["#c03a2b", "#6b7d1c"], vision)[:, None])[0]) for name, vision in VISIONS.items()
    }
    assert min(far["trichromat"], far["tritanope"]) > 30
    assert max(far["deuteranope"], far["protanope"]) < 15


@pytest.mark.parametrize("vision", VISIONS)
def test_causes_stay_apart(vision: str) -> None:
    panels = [pair for pair in combinations(CAUSES, 2) if pair[0].row.place == pair[1].row.place]
    for pairs, least in (
        (list(combinations(CAUSES, 2)), ANY_TWO),
        (panels, IN_A_PANEL),
        (list(pairwise(sorted(CAUSES))), IN_A_STACK),  # Prometheus answers in the order of labels
    ):
        assert {pair: far for pair, far in apart(pairs, vision).items() if far < least} == {}


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_causes_stand_out_from_what_is_behind_them(background: str, vision: str) -> None:
    colors = seen([cause.row.color for cause in CAUSES], VISIONS[vision])
    behind = np.broadcast_to(seen([background], VISIONS[vision]), colors.shape)
    far = dict(zip(CAUSES, difference(colors, behind).tolist(), strict=True))
    assert {cause: value for cause, value in far.items() if value < BACKGROUNDS[background]} == {}

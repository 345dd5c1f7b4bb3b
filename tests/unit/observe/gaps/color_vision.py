"""How far apart two colours are for readers with each kind of colour vision, as CIEDE2000 differences.

Colours are sRGB (IEC 61966-2-1), to CIELAB under D65. What a dichromat sees is by the matrices of Machado, Oliveira and
Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE Transactions on Visualization
and Computer Graphics 15(6), 2009, at severity 1.0, on linear RGB. Differences are by Sharma, Wu and Dalal, "The
CIEDE2000 Color-Difference Formula: Implementation Notes, Supplementary Test Data, and Mathematical Observations", Color
Research and Application 30(1), 2005, of which `PUBLISHED` has rows of table 1.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

VISIONS = {
    "trichromat": np.eye(3),
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanope": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = _XYZ.sum(axis=1)

PUBLISHED = (  # L*, a*, b* of two colours, and their difference
    ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
    ((50.0, -1.0, 2.0), (50.0, 0.0, 0.0), 2.3669),
    ((50.0, 2.49, -0.001), (50.0, -2.49, 0.0011), 7.2195),
    ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
    ((50.0, 2.5, 0.0), (61.0, -5.0, 29.0), 22.8977),
    ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
)


def seen(codes: Sequence[str], vision: Array) -> Array:
    """L*, a* and b* of colours such as `#ee8800`, `(num_colors, 3)`, as a reader with that vision has them."""
    srgb = np.array([[int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)] for code in codes])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    relative = np.clip(linear @ vision.T, 0, 1) @ _XYZ.T / _WHITE
    cube = np.where(relative > (6 / 29) ** 3, np.cbrt(relative), relative / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(cube, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def difference(one: Array, other: Array) -> Array:
    """CIEDE2000 between colours in CIELAB, of arrays of one shape `(…, 3)`."""
    light, other_light = one[..., 0], other[..., 0]
    mean_chroma = (np.hypot(one[..., 1], one[..., 2]) + np.hypot(other[..., 1], other[..., 2])) / 2
    stretch = 1 + 0.5 * (1 - _saturation(mean_chroma))
    chroma, hue = _polar(one[..., 1] * stretch, one[..., 2])
    other_chroma, other_hue = _polar(other[..., 1] * stretch, other[..., 2])
    is_grey = chroma * other_chroma == 0
    turn = np.where(is_grey, 0.0, (other_hue - hue + 180) % 360 - 180)
    middle = np.where(is_grey, hue + other_hue, (hue + turn / 2) % 360)
    mean_light, mean_chroma = (light + other_light) / 2, (chroma + other_chroma) / 2
    tone = (
        1
        - 0.17 * _cos(middle - 30)
        + 0.24 * _cos(2 * middle)
        + 0.32 * _cos(3 * middle + 6)
        - 0.20 * _cos(4 * middle - 63)
    )
    rotation = -2 * _saturation(mean_chroma) * np.sin(np.radians(60 * np.exp(-(((middle - 275) / 25) ** 2))))
    by_light = (other_light - light) / (1 + 0.015 * (mean_light - 50) ** 2 / np.sqrt(20 + (mean_light - 50) ** 2))
    by_chroma = (other_chroma - chroma) / (1 + 0.045 * mean_chroma)
    by_hue = 2 * np.sqrt(chroma * other_chroma) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * mean_chroma * tone)
    found: Array = np.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue)
    return found


def _saturation(chroma: Array) -> Array:
    found: Array = np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    return found


def _polar(a: Array, b: Array) -> tuple[Array, Array]:
    return np.hypot(a, b), np.degrees(np.arctan2(b, a)) % 360


def _cos(degrees: Array) -> Array:
    found: Array = np.cos(np.radians(degrees))
    return found

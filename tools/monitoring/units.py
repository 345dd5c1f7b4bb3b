"""Numbers turned into the words that Grafana would use for a panel's unit; knows no panel."""

import math

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_SUFFIXES = {
    "reqps": " /s",
    "ops": " /s",
    "joule": " J",
    "watt": " W",
    "celsius": " °C",
    "hertz": "Hz",
    "Bps": "B/s",
    "bytes": "B",
    "decmbytes": "B",
}
_SCALES = {"decmbytes": 1e6}


def told(value: float, unit: str, digits: int = 3) -> str:
    """`0.0125` of unit `s` is `12.5 ms`."""
    if math.isnan(value):
        return "–"
    if unit == "s":
        return _seconds(value, digits)
    if unit == "percentunit":
        return f"{value * 100:.{digits}g} %" if abs(value) < 0.9995 else f"{value * 100:.2f} %"
    value *= _SCALES.get(unit, 1.0)
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {prefix}{_SUFFIXES.get(unit, '').strip()}".rstrip()
    return f"{value:.{digits}g}{_SUFFIXES.get(unit, '')}"


def _seconds(value: float, digits: int) -> str:
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {name}"
    return "0 s" if value == 0 else f"{value / 1e-9:.{digits}g} ns"

"""Formats durations and shares for people."""


def ms(seconds: float) -> str:
    """Formats seconds as milliseconds with three digits."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def percent(share: float) -> str:
    """Formats a share of 1 as a percentage, with a digit more where it is small."""
    value = share * 100
    return f"{value:.0f} %" if value >= 10 or value == 0 else f"{value:.1f} %"

"""Reads the service level objectives: which events are good, and which are counted."""

from pathlib import Path

import msgspec


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One promise, as `objectives.yaml` has it."""

    key: str  # in the names of recorded series: roseinfer:<key>_good:ratio_rate5m
    name: str  # in the names of alerts
    title: str
    bad: str  # what a bad event is, in the plural, for sentences
    wanted: str
    good: str
    all: str
    threshold: str = ""  # `le`, where being late is being bad
    min_per_second: str = "0.1"


OBJECTIVES = msgspec.yaml.decode(Path(__file__).with_name("objectives.yaml").read_text(), type=tuple[Objective, ...])

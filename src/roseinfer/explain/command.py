"""Runs `roseinfer explain` on a server or a file."""

import argparse
from pathlib import Path

import msgspec

from roseinfer.cli.output_files import check_outputs
from roseinfer.config.api_keys import read_keys
from roseinfer.config.options import Config
from roseinfer.config.sources import LoadedConfig
from roseinfer.explain import text
from roseinfer.explain.evidence import read_evidence
from roseinfer.explain.explanation import Timing, explain
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.logs import escape
from roseinfer.observe.recorder.recording import Recording, refusing_contradictions


def run_explain(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Prints the explanation. Raises InvalidRequest for a source that holds no recording."""
    _check_plot(arguments.plot)
    recording, ledgers = read_evidence(arguments.source, read_key(loaded.config))
    clock: Timing = _clock_of(recording, arguments.clock) if ledgers is None else "ledger"
    with refusing_contradictions("It", arguments.source):
        gaps = gaps_of(recording, arguments.clock) if ledgers is None else ledgers
        if arguments.last is not None and gaps:
            begin_ns = gaps[-1].end_ns - int(arguments.last * 1e9)
            gaps = [gap for gap in gaps if gap.end_ns > begin_ns]
        source = arguments.source.encode(errors="backslashreplace").decode()  # a file's name need not be UTF-8
        explanation = explain(gaps, recording, source, clock)
    if arguments.plot is not None:
        from roseinfer.explain.plot import write_plot

        write_plot(arguments.plot, explanation, gaps)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(explanation), indent=2).decode())
    else:
        for line in text.lines(explanation):
            print(escape(line))  # a recording may come from anybody
    return 0


def _check_plot(path: Path | None) -> None:
    """Checks that a plot can be written, before a server is asked for its last seconds. Raises ConfigError."""
    if path is not None:
        from roseinfer.explain.plot import require_matplotlib

        require_matplotlib()
        check_outputs(plot=path)


def _clock_of(recording: Recording, wanted: Timing) -> Timing:
    """Returns the clock asked for, or `engine` where nothing was streamed, as in a simulation."""
    return wanted if any(request.is_streamed for request in recording.requests) else "engine"


def read_key(config: Config) -> str | None:
    """Returns the first key of the key file, if one is configured. Raises ConfigError."""
    path = config.server.api_key_file
    return None if path is None else read_keys(Path(path))[0].key

"""The `roseinfer` command: parses arguments, runs one command, and turns errors into exit codes.

Exit codes: 0 done or drained, 2 a given value cannot be used, 70 the engine failed, 130 or 143 interrupted.
"""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from roseinfer.cli.commands import make_parser
from roseinfer.config.flags import values_given
from roseinfer.config.sources import Given, build, gather
from roseinfer.errors import ConfigError, EngineError, RoseinferError
from roseinfer.runtime.child_process import live_as_child
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer

EXIT_USAGE = 2
EXIT_ENGINE = 70
EXIT_INTERRUPTED = 130
EXIT_SIGNALLED = 128  # and the signal's number, as shells have it

_NO_THREAD = "can't start new thread"  # CPython's words; it has no class for this
_TOO_FEW_PROCESSES = ConfigError(
    "more processes and threads are needed than may run: raise `ulimit -u`, or the container's limit of pids"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["engine"], ["telemetry"]) and arguments[1:2] == ["--fd"]:
        return _run_child(arguments[0], int(arguments[2]))  # of `serve`, which needs none of the rest
    _open_standard_streams()
    _keep_ends_of_children()
    with _signals_end_the_start() if arguments[:1] == ["serve"] else _signals_unwind():
        try:
            code = _run_command(arguments)
        except SystemExit as end:  # by --help, or by a signal
            if isinstance(end.__context__, BrokenPipeError):  # rich ends the process so
                return 0
            if failed := _finish_output(0):
                return int(end.code or failed)
            raise
        return _finish_output(code)


def _run_command(arguments: Sequence[str]) -> int:
    given: dict[str, Given] = {}
    try:
        parsed = make_parser().parse_args(arguments)
        given.update(parsed.defaults)
        given.update(_from_system(os.environ))
        given.update(gather(values_given(parsed), os.environ, parsed.config))
        return int(parsed.run(parsed, build(given)))
    except EngineError as error:
        return _fail(error, given, EXIT_ENGINE)
    except RoseinferError as error:
        return _fail(error, given, EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        _drop_output()
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error.__context__, SystemExit):  # what a command does last, on a terminal that is gone
            raise error.__context__ from None
        return _fail_system(error)


def _open_standard_streams() -> None:
    """Open those that the caller has closed: what is opened later would take their descriptors, and get their text.

    What the encoding of the output lacks, a character of a text or a byte in the name of a file, is escaped.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # the engine has them too
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - until the exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _keep_ends_of_children() -> None:
    """A caller that ignores SIGCHLD, as some supervisors do, has passed that on: then no child can be waited for."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _finish_output(code: int) -> int:
    """Write what is left of standard output, and return the exit code; an error at Python's exit is a traceback."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        failed = _fail_output(error)
        return code or failed
    return code


def _can_write_output() -> bool:
    """By an empty line, since what could not be written is not tried again."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail_system(error: OSError | MemoryError | RuntimeError) -> int:
    if isinstance(error, RuntimeError):
        if str(error) != _NO_THREAD:
            raise error
        return _fail(_TOO_FEW_PROCESSES, {}, EXIT_USAGE)
    if isinstance(error, MemoryError):
        return _fail(ConfigError("what was asked for takes more memory than there is"), {}, EXIT_USAGE)
    if error.errno == errno.EMFILE:
        return _fail(ConfigError("more files are needed than may be open: raise `ulimit -n`"), {}, EXIT_USAGE)
    if error.errno == errno.EAGAIN:  # of fork(2)
        return _fail(_TOO_FEW_PROCESSES, {}, EXIT_USAGE)
    if _can_write_output():
        raise error
    return _fail_output(error)


def _fail_output(error: OSError) -> int:
    _drop_output()
    return _fail(ConfigError(f"standard output cannot be written: {error.strerror}"), {}, EXIT_USAGE)


def _signals_end_the_start() -> AbstractContextManager[None]:
    """Until the server hears signals itself, they end the process as they end a server: with exit code 0.

    They do so at once, and raise nothing: an import that is interrupted could take it for a failure of its own.
    """
    return _handling(lambda *_: os._exit(0), signal.SIGTERM, signal.SIGINT, *_end_of_terminal())


def _signals_unwind() -> AbstractContextManager[None]:
    """SIGTERM, and the end of the terminal, unwind other commands, as Ctrl-C does.

    Otherwise a server that a comparison has started would go on for ever, and `top` would leave its screen behind.
    """
    numbers = [number for number in (signal.SIGTERM, *_end_of_terminal()) if signal.getsignal(number) == signal.SIG_DFL]
    return _handling(_unwind, *numbers)


def _end_of_terminal() -> list[signal.Signals]:
    """SIGHUP, unless `nohup` has it ignored."""
    return [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]


def _unwind(number: int, _: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGNALLED + number)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Have signals handled, which only the main thread may."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in (numbers if is_main else ())}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _run_child(name: str, fd: int) -> int:
    live_as_child()  # before it imports: on a busy machine that takes long, and it may hold the operations port
    if name == "telemetry":
        be_nicer(FRONT_END_NICENESS)  # before it imports; its forks become nicer
        from roseinfer.observing import telemetry_main

        return telemetry_main(fd)
    from roseinfer.wiring import engine_main

    return engine_main(fd)


def _from_system(env: Mapping[str, str]) -> dict[str, Given]:
    """Options that variables of the system set; every other source is stronger."""
    cache = env.get("XDG_CACHE_HOME", "")
    return {"runner.kernels_dir": Given(f"{cache}/roseinfer/kernels", "XDG_CACHE_HOME")} if cache else {}


def _fail(error: RoseinferError, given: Mapping[str, Given], code: int) -> int:
    """Print one line that names the value and its source, and return the exit code."""
    where = ""
    if error.param is not None:
        source = f" (from {given[error.param].source})" if error.param in given else ""
        where = f"{error.param}{source}: "
    from roseinfer.observe.logs import escape

    said = f"roseinfer: {where}{error.reason}".splitlines()  # with the log of a server that did not start they are more
    with suppress(OSError):  # where standard error cannot be written, the exit code says enough
        print(*map(escape, said), sep="\n", file=sys.stderr)  # a file or a server may come from anybody
    return code

"""Structured log lines: text for people by default, or one JSON object per line.

In the processes of baton, the lines of libraries, warnings and uncaught errors have this form; in a
process that only imports baton they are left alone. Prompts are never logged unless `log.prompts`
asks for it, and then only through `clip`.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

from baton.protocol.config import LogConfig

ROOT = "baton"
MAX_PROMPT_CHARS = 200


class Log:
    """A logger whose keyword arguments become `key=value` or JSON fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{ROOT}.{name}")

    def debug(self, message: str, **fields: object) -> None:
        self._log(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: object) -> None:
        self._log(logging.INFO, message, fields)

    def warning(self, message: str, **fields: object) -> None:
        self._log(logging.WARNING, message, fields)

    def error(self, message: str, **fields: object) -> None:
        self._log(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: object) -> None:
        """Log an error with the traceback of the exception being handled."""
        self._logger.error(message, exc_info=True, extra={"fields": fields})

    def _log(self, level: int, message: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"fields": fields})


def logger(name: str) -> Log:
    return Log(name)


def clip(text: str) -> str:
    return text if len(text) <= MAX_PROMPT_CHARS else text[:MAX_PROMPT_CHARS] + "…"


def setup_process_log(config: LogConfig, name: str) -> None:
    """Send all log lines of this process, which is called `name`, to stderr in one form."""
    setup(config, name)
    everything = logging.getLogger()
    everything.handlers[:] = logging.getLogger(ROOT).handlers
    everything.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    if config.json:
        sys.excepthook = _log_end
        threading.excepthook = _log_broken_thread


def _log_end(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "an unexpected error ends the process"
    logging.getLogger(ROOT).critical(text, exc_info=(kind, error, trace))


def _log_broken_thread(uncaught: threading.ExceptHookArgs) -> None:
    error = uncaught.exc_value
    if error is not None and not isinstance(error, SystemExit):
        logging.getLogger(ROOT).critical(
            "an unexpected error ended a thread", exc_info=error
        )


def is_json() -> bool:
    formatters = [handler.formatter for handler in logging.getLogger(ROOT).handlers]
    return any(isinstance(one, LineFormatter) and one.is_json for one in formatters)


def say(text: str, stream: TextIO | None = None) -> None:
    """Write lines for people to `stream` (default: stderr). A full disk there ends nothing."""
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stderr, flush=True)


def print_failure(message: str, code: str) -> None:
    """Write the one line that says why a command ends."""
    if is_json():
        Log("command").error(message, code=code)
    else:
        say(f"baton: {message}")


def print_warning(message: str) -> None:
    """Write one line about what a command was given and does not use."""
    if is_json():
        Log("command").warning(message)
    else:
        say(f"baton: warning: {message}")


def relayed(name: str, line: str) -> str:
    """Return a line of the child `name` in the form in which this process prints it."""
    if line.startswith("{"):
        return line
    if is_json():
        fields = {
            "time": _stamp(time.time()),
            "level": "info",
            "process": name,
            "message": line,
        }
        return json.dumps(fields)
    return line if f" {name}: " in line else f"{name} | {line}"


def setup(config: LogConfig, name: str, stream: TextIO | None = None) -> None:
    """Send every line of baton, in a process named `name`, to `stream` (default: stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(name, is_json=config.json))
    root = logging.getLogger(ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    root.propagate = False


class LineFormatter(logging.Formatter):
    """One JSON object with time (RFC 3339), level, process, message and the fields; or text:

    `2026-01-31T12:00:01.250+01:00 INFO    router: node lost node=d0 reason="no heartbeats"`.
    """

    def __init__(self, process: str, *, is_json: bool) -> None:
        super().__init__()
        self._process = process
        self.is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        return self._json(record) if self.is_json else self._text(record)

    def _text(self, record: logging.LogRecord) -> str:
        stamp = (
            datetime.fromtimestamp(record.created)
            .astimezone()
            .isoformat("T", "milliseconds")
        )
        parts = [
            f"{stamp} {record.levelname:<7} {self._process}: {_one_line(record.getMessage())}"
        ]
        parts += [f"{key}={_value(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        return (
            f"{line}\n{self.formatException(record.exc_info)}"
            if record.exc_info
            else line
        )

    def _json(self, record: logging.LogRecord) -> str:
        own = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        line = own | _fields(record) | own
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _stamp(unix_s: float) -> str:
    """Return a time as RFC 3339 writes it, in UTC, which collectors of logs read."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat("T", "microseconds")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # Quoting also prevents text from a client from forging a log line.
    plain = text and text.isprintable() and not any(char in ' "=' for char in text)
    return text if plain else json.dumps(text)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]

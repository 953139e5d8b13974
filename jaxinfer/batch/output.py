"""Result lines in input order, none lost when the run dies.

A result whose turn it is goes straight to the output file. One that finished early waits in `<output>.journal`, a file
of the same lines in the order they finished; only its place there is kept in memory. Every line is handed to the
operating system in one write as soon as it is known, so killing the process loses nothing that was answered, and at
worst leaves an unfinished last line in either file. The output file is always a correct prefix of the whole result.

A later run reads the output beside the input: each result's id must be that of the input line in the same place. An
unfinished last line is cut off. Then it takes from the journal what is already known, and goes on. The journal is
deleted when all lines are answered.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol, cast, runtime_checkable

from jaxinfer.batch.lines import InputLine
from jaxinfer.errors import ConfigError

_RECORD_START = b'{"id": "batch_req_'
_RECORD_ID = re.compile(rb'\{"id": "(batch_req_([0-9]+)_[0-9a-f]+)"')


@runtime_checkable
class ByteSink(Protocol):
    """An open binary stream."""

    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...


class OrderedOutput:
    """Takes results in any order, writes them in input order.

    Args:
      target: a path, to be continued if it holds results of an earlier run; or an open stream, such as standard output,
        where nothing can be continued.

    Raises:
      ConfigError: the path cannot be written, is being written by another run, or it or its journal is something else.
    """

    def __init__(self, target: Path | ByteSink):
        self._next = 0  # place whose result is to be written next
        self._early: dict[int, tuple[int, int]] = {}  # place → (offset, length) in the journal
        self._known: dict[str, tuple[int, int]] = {}  # id → the same, from an earlier run
        self._finished = False
        self._existing: io.BufferedReader | None = (
            None  # the earlier run's output, until it was compared to its end
        )
        self._path = (
            target if isinstance(target, Path) and (target.is_file() or not target.exists()) else None
        )
        self._created = self._path is not None and not self._path.exists()
        with contextlib.ExitStack() as stack:
            if isinstance(target, Path):
                file = stack.enter_context(_open(target, "ab"))
                if self._path is not None:
                    _lock(file, target)
                    self._journal_path = journal_of(self._path)
                    stack.callback(self._remove_empty, self._path)
                self._file: ByteSink = file
            else:
                self._file = target
            if self._path is None:
                self._journal = cast(io.FileIO, stack.enter_context(tempfile.TemporaryFile(buffering=0)))
            else:
                self._existing = stack.enter_context(open(self._path, "rb"))
                if not _RECORD_START.startswith(self._existing.read(len(_RECORD_START))):
                    raise ConfigError(
                        f"{self._path} holds something else than results of a batch: {_MOVE_AWAY}"
                    )
                self._existing.seek(0)
                self._journal = stack.enter_context(_open(self._journal_path, "a+b"))
                self._read_journal()
            self._files = stack.pop_all()

    def claim(self, place: int, line: InputLine) -> bytes | None:
        """The result that an earlier run left for a line, or None. Call for every line, in order, before `put`.

        Raises:
          ConfigError: the output holds something else in this place: the input or the settings have changed.
        """
        record = self._claim_written(line)
        known = self._known.pop(line.id, None)
        if record is not None:
            self._next = place + 1
        elif known is not None:
            self._early[place] = known
            record = self._read(known)
            self._write_ready()
        return record

    def put(self, place: int, record: bytes) -> None:
        """Keeps a result: `record` is one line with its line end."""
        if place == self._next:
            self._write(record)
            self._next += 1
            self._write_ready()
        else:
            offset = self._journal.seek(0, os.SEEK_END)
            self._journal.write(record)
            self._early[place] = (offset, len(record))

    def finish(self) -> None:
        """Call when the input has ended and all its lines have their result.

        Raises:
          ConfigError: the output of the earlier run has more lines than the input.
        """
        if self._existing is not None and self._existing.readline():
            raise ConfigError(f"{self._path} has more results than the input has lines: {_MOVE_AWAY}")
        self._finished = True
        if self._path is not None:
            self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes what it opened, and removes files it made that hold nothing, unless that is the whole result.

        On a stream early results are written first, out of turn, since they would be lost.
        """
        with self._files:
            if self._path is None:
                for place in sorted(self._early):
                    self._write(self._read(self._early[place]))

    def _remove_empty(self, path: Path) -> None:
        """A run that could not begin leaves nothing behind. Called while the lock is held."""
        if _is_empty(self._journal_path):
            self._journal_path.unlink()
        holds_results = self._finished or self._early or self._known
        if self._created and not holds_results and _is_empty(path):
            path.unlink()

    def _claim_written(self, line: InputLine) -> bytes | None:
        if self._path is None or self._existing is None:
            return None
        offset = self._existing.tell()
        record = self._existing.readline()
        head = b'{"id": "%s"' % line.id.encode()
        if record.endswith(b"\n") and record.startswith(head):
            return record
        if record and (record.endswith(b"\n") or not (record.startswith(head) or head.startswith(record))):
            raise ConfigError(
                f"{self._path} does not answer input line {line.number}: the input or the settings have changed since; "
                f"{_MOVE_AWAY}"
            )
        os.truncate(self._path, offset)
        self._existing.close()
        self._existing = None
        return None

    def _read_journal(self) -> None:
        offset = 0
        with open(self._journal_path, "rb") as journal:
            for record in journal:
                if not record.endswith(b"\n"):
                    self._journal.truncate(offset)
                    return
                found = _RECORD_ID.match(record)
                if found is None:
                    raise ConfigError(f"{self._journal_path} is not the journal of a batch: move it away")
                self._known[found[1].decode()] = (offset, len(record))
                offset += len(record)

    def _write_ready(self) -> None:
        if self._next not in self._early:
            return
        while self._next in self._early:
            self._write(self._read(self._early[self._next]))
            del self._early[self._next]
            self._next += 1
        if not self._early and not self._known:
            self._journal.truncate(0)

    def _write(self, record: bytes) -> None:
        self._file.write(record)
        self._file.flush()

    def _read(self, where: tuple[int, int]) -> bytes:
        offset, length = where
        self._journal.seek(offset)
        return self._journal.read(length)


def journal_of(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


def read_results(path: Path) -> Iterator[bytes]:
    """What a run that is not to go on has left: its results in input order, those in the journal too; torn lines are left out."""
    last = 0  # line number of the newest result in the output: the journal may still hold earlier ones, written since
    for number, record in _records(path):
        last = number
        yield record
    journal = journal_of(path)
    offset = 0
    early: list[tuple[int, int]] = []  # (line number, offset in the journal)
    for number, record in _records(journal):
        if number > last:
            early.append((number, offset))
        offset += len(record)
    if early:
        with open(journal, "rb") as file:
            for _, offset in sorted(early):
                file.seek(offset)
                yield file.readline()


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole results with the numbers of their input lines, up to a torn one; none when there is no such file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for record in file:
            found = _RECORD_ID.match(record)
            if found is None or not record.endswith(b"\n"):
                return
            yield int(found[2]), record


_MOVE_AWAY = "move it away or choose another output"


def _open(path: Path, mode: Literal["ab", "a+b"]) -> io.FileIO:
    try:
        return open(path, mode, buffering=0)
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from None


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _lock(file: io.FileIO, path: Path) -> None:
    busy = ConfigError(f"{path} is being written by another run")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:  # a file system without locks
        return
    # Its last holder may have removed it, empty, since it was opened here.
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise busy

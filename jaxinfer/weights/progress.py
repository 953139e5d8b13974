"""A progress bar on stderr while weights are loaded."""

from __future__ import annotations

import sys


class LoadProgress:
    """A bar of bytes that goes away when done; shows nothing where stderr is no terminal.

    Args:
      total: bytes to load.
    """

    def __init__(self, total: int):
        self._bar = None
        if not sys.stderr.isatty():
            return
        # Only here: importing it takes a while.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("weights", total=total)

    def __enter__(self) -> LoadProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, count: int) -> None:
        """Counts bytes that have been loaded."""
        if self._bar is not None:
            self._bar.advance(self._task, count)

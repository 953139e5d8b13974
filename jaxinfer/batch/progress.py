"""Progress of a batch on stderr: a bar on a terminal, else a plain line now and then; a summary at the end."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxinfer.batch.runner import BatchProgress

_BAR_PERIOD = 0.2  # seconds between redraws
_LINE_PERIOD = 5.0  # seconds between plain lines


class ProgressDisplay:
    """Call it with the counts as often as you like; it shows them as often as is useful.

    Args:
      total: lines to answer, None when unknown.
      console: where to write, usually stderr.
    """

    def __init__(self, total: int | None, console: Console):
        self._total = total
        self._console = console
        self._shown_at = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.completed:.0f}/" + ("?" if total is None else str(total)) + " lines"),
                BarColumn(),
                TextColumn("{task.fields[failed]} failed"),
                TextColumn("{task.fields[rate]:.1f} tokens/s"),
                TimeRemainingColumn(),
                console=console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("batch", total=total, failed=0, rate=0.0)

    def __enter__(self) -> ProgressDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        if now - self._shown_at < (_LINE_PERIOD if self._bar is None else _BAR_PERIOD):
            return
        self._shown_at = now
        if self._bar is None:
            self._print(_counts(progress, self._total))
        else:
            self._draw(self._bar, progress)

    def summary(self, progress: BatchProgress) -> None:
        """The last word, after the run."""
        if self._bar is not None:
            self._draw(self._bar, progress)
            self._bar.stop()
        kept = f", {progress.kept} of them kept from an earlier run" if progress.kept else ""
        if progress.interrupted:
            self._print(
                f"interrupted: {_counts(progress, self._total)}{kept}; the same command goes on from here"
            )
        else:
            self._print(f"finished: {_counts(progress, progress.done)}{kept}")

    def _draw(self, bar: Progress, progress: BatchProgress) -> None:
        rate = progress.tokens_per_second
        bar.update(self._task, completed=progress.done, failed=progress.failed, rate=rate, refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def count_lines(path: Path) -> int:
    """Lines of a file that are not blank, read in small pieces."""
    count = 0
    filled = False  # the line being read has something in it
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            first, *rest = block.split(b"\n")
            filled = filled or bool(first.strip())
            for piece in rest:
                count += filled
                filled = bool(piece.strip())
    return count + filled


def _counts(progress: BatchProgress, total: int | None) -> str:
    return (
        f"{progress.done}/{'?' if total is None else total} lines, {progress.failed} failed, "
        f"{progress.generated_tokens} tokens, {progress.tokens_per_second:.1f} tokens/s"
    )

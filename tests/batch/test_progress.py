from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxinfer.batch import progress as progress_module
from jaxinfer.batch.lines import read_lines
from jaxinfer.batch.progress import ProgressDisplay, count_lines
from jaxinfer.batch.runner import BatchProgress


def test_plain_lines_come_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = BatchProgress(started=99.0)
    with ProgressDisplay(4, Console(file=stream)) as display:
        for second in range(12):
            now[0] = 100.0 + second
            progress.done = second // 3
            progress.generated_tokens = second * 10
            display(progress)
    assert stream.getvalue() == (
        "1/4 lines, 0 failed, 50 tokens, 8.3 tokens/s\n3/4 lines, 0 failed, 100 tokens, 9.1 tokens/s\n"
    )


def test_the_summary_says_what_happened():
    stream = io.StringIO()
    with ProgressDisplay(None, Console(file=stream)) as display:
        display.summary(BatchProgress(done=3, failed=1, kept=2))
        display.summary(BatchProgress(done=1, interrupted=True))
    finished, interrupted = stream.getvalue().splitlines()
    assert finished.startswith("finished: 3/3 lines, 1 failed, 0 tokens")
    assert "2 of them kept" in finished
    assert interrupted.startswith("interrupted: 1/? lines")


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    with ProgressDisplay(5, Console(file=stream, force_terminal=True, width=100)) as display:
        display(BatchProgress(done=1))
        display.summary(BatchProgress(done=5, failed=2))
    assert "5/5 lines" in stream.getvalue()
    assert "2 failed" in stream.getvalue()


@given(st.lists(st.sampled_from([b"a", b"", b" ", b"\r", b"xy"])), st.booleans())
def test_count_lines_counts_what_read_lines_yields(tmp_path_factory, lines, ended):
    path = tmp_path_factory.mktemp("count") / "in"
    path.write_bytes(b"\n".join(lines) + b"\n" * ended)
    with open(path, "rb") as file:
        assert count_lines(path) == len(list(read_lines(file)))

from __future__ import annotations

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer.batch.lines import InputLine, read_lines
from jaxinfer.batch.output import OrderedOutput, journal_of, read_results
from jaxinfer.errors import ConfigError


def lines_of(count: int, text: str = "line") -> list[InputLine]:
    return list(read_lines(io.BytesIO(b"".join(b"%s %d\n" % (text.encode(), i) for i in range(count)))))


def record(line: InputLine) -> bytes:
    return b'{"id": "%s", "n": %d}\n' % (line.id.encode(), line.number)


def whole(lines: list[InputLine]) -> bytes:
    return b"".join(map(record, lines))


def run(path, lines, order, *, finish=True) -> list[int]:
    """Claims all lines, answers those that are not kept in the given order; returns the places it answered."""
    output = OrderedOutput(path)
    try:
        missing = [place for place, line in enumerate(lines) if output.claim(place, line) is None]
        answered = [place for place in order if place in missing]
        for place in answered:
            output.put(place, record(lines[place]))
        if finish:
            output.finish()
    finally:
        output.close()
    return answered


@given(st.permutations(range(6)))
def test_any_order_in_is_input_order_out(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("out") / "o.jsonl"
    lines = lines_of(6)
    run(path, lines, order)
    assert path.read_bytes() == whole(lines)
    assert not path.with_name("o.jsonl.journal").exists()


@given(st.permutations(range(6)), st.integers(0, 6), st.integers(0, 300), st.integers(0, 300))
def test_nothing_answered_is_lost_wherever_the_files_were_torn(
    tmp_path_factory, order, done, out_cut, journal_cut
):
    """A run answers some lines and dies, perhaps within a write; the next one answers only what is missing."""
    path = tmp_path_factory.mktemp("out") / "o.jsonl"
    journal = path.with_name("o.jsonl.journal")
    lines = lines_of(6)
    run(path, lines, order[:done], finish=False)
    lost = 0
    assert path.exists() == (done > 0)
    for file, cut in ((path, out_cut), (journal, journal_cut)):
        data = file.read_bytes() if file.exists() else b""
        last = data.rstrip(b"\n").rfind(b"\n") + 1
        if data and last + cut < len(data):  # tear the last line only: what a single write can leave
            file.write_bytes(data[: last + cut])
            lost += 1
    again = run(path, lines, range(6))
    assert path.read_bytes() == whole(lines)
    assert 6 - done <= len(again) <= 6 - done + lost
    assert run(path, lines, range(6)) == []


def test_the_output_is_a_correct_prefix_at_all_times_and_early_results_are_in_the_journal(tmp_path):
    path = tmp_path / "o.jsonl"
    lines = lines_of(3)
    output = OrderedOutput(path)
    assert [output.claim(i, line) for i, line in enumerate(lines)] == [None] * 3
    output.put(2, record(lines[2]))
    assert path.read_bytes() == b""
    assert (tmp_path / "o.jsonl.journal").read_bytes() == record(lines[2])
    output.put(0, record(lines[0]))
    assert path.read_bytes() == whole(lines[:1])
    output.put(1, record(lines[1]))
    assert path.read_bytes() == whole(lines)
    assert (tmp_path / "o.jsonl.journal").read_bytes() == b""
    output.close()


@given(st.permutations(range(6)), st.integers(0, 6), st.integers(0, 300), st.integers(0, 300))
@example(order=[1, 3, 0, 2, 4, 5], done=3, out_cut=300, journal_cut=300)  # 1 is in both files
def test_all_that_an_ended_run_answered_is_read_in_input_order(
    tmp_path_factory, order, done, out_cut, journal_cut
):
    path = tmp_path_factory.mktemp("out") / "o.jsonl"
    lines = lines_of(6)
    run(path, lines, order[:done], finish=False)
    assert list(read_results(path)) == [record(lines[place]) for place in sorted(order[:done])]
    for file, cut in ((path, out_cut), (journal_of(path), journal_cut)):
        if file.exists():
            file.write_bytes(file.read_bytes()[:cut])
    kept = list(read_results(path))
    assert kept == [record(line) for line in lines if record(line) in kept]


def test_an_edited_input_is_detected_and_nothing_is_touched(tmp_path):
    path = tmp_path / "o.jsonl"
    lines = lines_of(3)
    run(path, lines, range(3))
    edited = [lines[0], lines_of(3, "other")[1], lines[2]]
    with pytest.raises(ConfigError, match="input line 2"):
        run(path, edited, range(3))
    assert path.read_bytes() == whole(lines)


def test_an_edited_line_that_was_answered_early_is_answered_anew(tmp_path):
    path = tmp_path / "o.jsonl"
    lines = lines_of(3)
    run(path, lines, [0, 2], finish=False)
    edited = [*lines[:2], lines_of(3, "other")[2]]
    assert run(path, edited, range(3)) == [1, 2]
    assert path.read_bytes() == whole(edited)


def test_an_input_that_grew_goes_on(tmp_path):
    path = tmp_path / "o.jsonl"
    lines = lines_of(5)
    run(path, lines[:3], range(3))
    assert run(path, lines, range(5)) == [3, 4]
    assert path.read_bytes() == whole(lines)


def test_an_input_that_shrank_is_detected(tmp_path):
    path = tmp_path / "o.jsonl"
    lines = lines_of(3)
    run(path, lines, range(3))
    with pytest.raises(ConfigError, match="more results"):
        run(path, lines[:2], range(2))
    assert path.read_bytes() == whole(lines)


@pytest.mark.parametrize(
    "content", [b"my notes\n", b"my notes", b'{"id": "batch_req_9_ab"', b'{"id": "x', b"\n"]
)
def test_a_file_that_is_not_ours_is_not_touched(tmp_path, content):
    path = tmp_path / "o.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"does not answer input line 1|something else"):
        run(path, lines_of(1), [0])
    assert path.read_bytes() == content


def test_a_journal_that_is_not_ours_is_not_touched(tmp_path):
    (tmp_path / "o.jsonl.journal").write_bytes(b"my diary\n")
    with pytest.raises(ConfigError, match="not the journal"):
        OrderedOutput(tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl.journal").read_bytes() == b"my diary\n"


@pytest.mark.parametrize("reason", ["nothing answered", "journal is foreign", "journal is a folder"])
def test_a_run_that_could_not_begin_leaves_no_files(tmp_path, reason):
    journal = tmp_path / "o.jsonl.journal"
    if reason == "nothing answered":
        OrderedOutput(tmp_path / "o.jsonl").close()
        assert list(tmp_path.iterdir()) == []
        return
    if reason == "journal is foreign":
        journal.write_bytes(b"my diary\n")
    else:
        journal.mkdir()
    with pytest.raises(ConfigError):
        OrderedOutput(tmp_path / "o.jsonl")
    assert list(tmp_path.iterdir()) == [journal]


def test_an_empty_result_and_a_file_that_was_there_are_kept(tmp_path):
    run(tmp_path / "of no lines", [], [])
    (tmp_path / "theirs").touch()
    OrderedOutput(tmp_path / "theirs").close()
    assert {path.name for path in tmp_path.iterdir()} == {"of no lines", "theirs"}


def test_two_runs_cannot_write_one_output(tmp_path):
    first = OrderedOutput(tmp_path / "o.jsonl")
    with pytest.raises(ConfigError, match="another run"):
        OrderedOutput(tmp_path / "o.jsonl")
    first.close()
    OrderedOutput(tmp_path / "o.jsonl").close()


@pytest.mark.parametrize("name", ["", "no/such/folder/o.jsonl"])
def test_an_output_that_cannot_be_written(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot write"):
        OrderedOutput(tmp_path / name)


def test_a_stream_gets_the_early_results_at_the_end_when_interrupted():
    stream = io.BytesIO()
    lines = lines_of(4)
    output = OrderedOutput(stream)
    for place, line in enumerate(lines):
        assert output.claim(place, line) is None
    for place in (3, 0, 2):
        output.put(place, record(lines[place]))
    assert stream.getvalue() == whole(lines[:1])
    output.close()
    assert stream.getvalue() == whole([lines[0], lines[2], lines[3]])


def test_a_device_is_a_stream(tmp_path):
    from pathlib import Path

    run(Path("/dev/null"), lines_of(3), [2, 1, 0])
    assert not Path("/dev/null.journal").exists()

import itertools
import subprocess
import sys

import pytest

from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import Sequence, SequenceStatus, Step
from jaxinfer.errors import ConfigError, OverloadError, RequestError
from jaxinfer.kv.manager import KVManager
from jaxinfer.kv.pages import PageGroup

_ids = itertools.count()
_FULL = (PageGroup(),)


def sequence(prompt, new=10, **fields) -> Sequence:
    tokens = list(range(prompt)) if isinstance(prompt, int) else list(prompt)
    return Sequence(
        seq_id=next(_ids), tokens=tokens, num_prompt=len(tokens), max_total=len(tokens) + new, **fields
    )


def scheduler(pages=100, page_size=4, groups=_FULL, prefix_caching=True, **options) -> Scheduler:
    options = {"max_num_seqs": 8, "max_prefill_tokens": 64, **options}
    return Scheduler(KVManager(pages + 1, page_size, groups, prefix_caching=prefix_caching), **options)


def add(sched: Scheduler, *seqs: Sequence) -> tuple[Sequence, ...]:
    for seq in seqs:
        sched.add(seq)
    return seqs


def read(sched, step: Step, token=7):
    """The tokens of a step arrive."""
    for seq in [*step.decode, *(chunk.seq for chunk in step.prefill if chunk.samples)]:
        sched.append_token(seq, token)


def dispatch(sched: Scheduler) -> Step:
    """A step whose tokens are not read yet."""
    step = sched.schedule()
    sched.check_integrity()
    assert step is not None
    return step


def run(sched: Scheduler, steps=1) -> Step:
    """Steps whose tokens are read at once; returns the last."""
    for _ in range(steps - 1):
        read(sched, dispatch(sched))
    step = dispatch(sched)
    read(sched, step)
    return step


def chunks(step):
    return [(start, length, samples) for _, start, length, samples in step.prefill]


def test_needs_neither_jax_nor_numpy():
    code = "import sys, jaxinfer.engine.scheduler; print(sorted({'jax', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_sequence_from_prompt_to_end_with_tokens_read_a_step_late():
    sched = scheduler()
    (seq,) = add(sched, sequence(6, new=3))
    one = dispatch(sched)
    assert chunks(one) == [(0, 6, True)]
    assert one.table_updates == [(seq.slot, 0, 0, seq.tables[0][0]), (seq.slot, 0, 1, seq.tables[0][1])]
    assert (seq.num_computed, seq.num_pending) == (6, 1)
    two = dispatch(sched)  # its input token is still on the device
    assert two.decode == [seq]
    assert (seq.num_computed, seq.num_pending) == (7, 2)
    assert not two.table_updates
    read(sched, one)
    three = dispatch(sched)
    assert three.decode == [seq]
    read(sched, two)
    assert sched.schedule() is None  # the third and last token is on its way
    assert sched.has_work
    read(sched, three)
    assert sched.schedule() is None
    assert len(seq.tokens) == seq.max_total
    sched.finish(seq)
    assert not sched.has_work
    assert sched.kv.pool.available == sched.kv.pool.total
    assert not sched.append_token(seq, 1)  # a late token
    assert len(seq.tokens) == seq.max_total


def test_decodes_run_every_step_in_a_stable_order_and_prefills_beside_them():
    sched = scheduler()
    a, b = add(sched, sequence(3), sequence([9, 9]))
    run(sched)
    (c,) = add(sched, sequence([8, 8, 8]))
    step = run(sched)
    assert step.decode == [a, b]
    assert [chunk.seq for chunk in step.prefill] == [c]
    assert run(sched).decode == [a, b, c]
    sched.finish(a)
    assert run(sched).decode == [b, c]


def test_a_long_prompt_is_cut_and_the_budget_is_shared():
    sched = scheduler(max_prefill_tokens=10)
    add(sched, sequence(14), sequence([9] * 9))
    assert chunks(run(sched)) == [(0, 10, False)]
    assert chunks(run(sched)) == [(10, 4, True), (0, 6, False)]
    assert chunks(run(sched)) == [(6, 3, True)]


def test_chunks_are_charged_in_whole_blocks():
    sched = scheduler(max_prefill_tokens=14, prefill_block=4)
    add(sched, sequence([1] * 5), sequence([2] * 9), sequence([3] * 3))
    # 5 tokens cost 8; 6 are left; a chunk that is not a prompt's last is whole blocks.
    assert chunks(run(sched)) == [(0, 5, True), (0, 4, False)]
    assert chunks(run(sched)) == [(4, 5, True), (0, 3, True)]
    with pytest.raises(ConfigError, match="block of 8"):
        scheduler(max_prefill_tokens=7, prefill_block=8)


def test_at_most_so_many_chunks_a_step():
    sched = scheduler(max_prefill_seqs=2)
    add(sched, *(sequence([i] * 3) for i in range(5)))
    assert [len(run(sched).prefill) for _ in range(3)] == [2, 2, 1]


def test_slots_limit_and_come_back():
    sched = scheduler(max_num_seqs=2)
    a, b, c = add(sched, *(sequence([i] * 3) for i in range(3)))
    run(sched, 2)
    assert {a.slot, b.slot} == {0, 1}
    assert sched.waiting == [c]
    freed = a.slot
    sched.finish(a)
    assert [chunk.seq for chunk in run(sched).prefill] == [c]
    assert c.slot == freed


def test_waiting_sequences_go_by_priority_then_arrival():
    sched = scheduler(max_num_seqs=4, max_prefill_seqs=1)
    a, b, c, d = add(
        sched, sequence([1]), sequence([2]), sequence([3], priority=-1), sequence([4], priority=1)
    )
    assert [run(sched).prefill[0].seq for _ in range(4)] == [c, a, b, d]


def test_too_many_waiting_is_an_overload():
    sched = scheduler(max_waiting=1)
    add(sched, sequence(3))
    refused = sequence(3)
    with pytest.raises(OverloadError, match="1 requests are waiting"):
        sched.add(refused)
    sched.abort(refused)  # harmless, and takes nobody else out of the queue
    assert len(sched.waiting) == 1


@pytest.mark.parametrize(("prompt", "new"), [(0, 5), (5, 0), (30, 12)])
def test_what_can_never_run_is_refused(prompt, new):
    sched = scheduler(pages=10, page_size=4)
    with pytest.raises(RequestError):
        sched.add(sequence(prompt, new=new))
    add(sched, sequence(30, new=11))  # the last token is never computed


def test_a_window_needs_fewer_pages_than_the_sequence_has_tokens():
    with pytest.raises(RequestError, match="25 KV pages"):
        scheduler(pages=8).add(sequence(90))
    sched = scheduler(pages=8, groups=(PageGroup("sliding", 10),), max_prefill_tokens=16)
    (seq,) = add(sched, sequence(90, new=10))
    for _ in range(6 + 9):
        run(sched)
    assert len(seq.tokens) == seq.max_total
    assert sum(page > 0 for page in seq.tables[0]) <= 4


def test_a_prefix_is_shared_from_the_step_after_the_one_that_fills_it():
    sched = scheduler(max_num_seqs=4)
    a, b = add(sched, sequence(9), sequence(9))
    assert chunks(run(sched)) == [(0, 9, True), (0, 9, True)]  # the same step: each computes its own
    (c,) = add(sched, sequence(9))
    step = dispatch(sched)
    assert chunks(step) == [(8, 1, True)]
    assert c.tables[0][:2] == a.tables[0][:2] != b.tables[0][:2]
    assert [update for update in step.table_updates if update[0] == c.slot] == [
        (c.slot, 0, index, page) for index, page in enumerate(c.tables[0])
    ]
    assert (a.cached_tokens, b.cached_tokens, c.cached_tokens) == (0, 0, 8)
    sched.check_integrity()


def test_generated_tokens_are_shared_once_their_page_is_full_and_known():
    sched = scheduler()
    (a,) = add(sched, sequence(3, new=8))
    run(sched, 6)  # 8 tokens computed, 9 known
    assert len(a.tokens) == 9
    sched.finish(a)
    (b,) = add(sched, sequence(a.tokens))
    run(sched)
    assert b.cached_tokens == 8


def test_tokens_still_on_the_device_are_not_hashed():
    sched = scheduler(page_size=2)
    (a,) = add(sched, sequence(2, new=8))
    steps = [dispatch(sched) for _ in range(3)]
    assert (a.num_computed, a.num_pending, len(a.tokens)) == (4, 3, 2)
    sched.finish(a)
    assert len(sched.kv.cache.keys) == 1
    for step in steps:
        read(sched, step)
    assert len(a.tokens) == 2


def test_preemption_takes_the_worst_and_its_work_of_this_step():
    sched = scheduler(pages=4, page_size=2)
    a, b = add(sched, sequence([1, 1, 1], new=6), sequence([2, 2, 2], new=6))
    run(sched, 2)  # both hold two full pages, none is left
    step = dispatch(sched)
    assert step.preempted == [b]
    assert step.decode == [a]
    assert (b.status, b.num_computed, b.slot, b.tables) == (SequenceStatus.WAITING, 0, -1, [])
    assert b.num_pending == 0
    assert b.num_preemptions == 1
    read(sched, step)
    while len(a.tokens) < a.max_total:
        assert run(sched).decode == [a]
    sched.finish(a)
    again = dispatch(sched)
    assert again.prefill[0].seq is b
    assert again.prefill[0].samples  # it recomputes what it generated and goes on
    assert again.prefill[0].start + again.prefill[0].length == 5
    assert b.cached_tokens == 0  # what it found on the way back is no merit of the cache


def test_nobody_is_admitted_in_a_step_that_ran_out_of_pages():
    sched = scheduler(pages=4, page_size=2, max_prefill_tokens=2, prefix_caching=False)
    a, b = add(sched, sequence([1] * 2, new=6), sequence([2] * 4, new=4))
    run(sched, 3)
    step = run(sched)
    assert (step.decode, step.preempted, step.prefill) == ([a], [b], [])
    assert sched.kv.pool.available == 1  # enough for b to start again and soon lose it once more


def test_a_victim_already_in_the_step_is_taken_out():
    sched = scheduler(pages=4, page_size=2)
    worse, better = add(sched, sequence([2] * 2, new=7, priority=1), sequence([1] * 3, new=6, priority=1))
    run(sched)
    worse.priority, better.priority = 1, 0  # so that the worse one is first in the order of rows
    (head,) = add(sched, sequence([3], new=2, priority=1))
    run(sched)
    assert [worse, better] == sched.decoding
    step = dispatch(sched)
    assert step.preempted == [worse]
    assert step.decode == [better]
    assert sched.waiting[0] is worse
    assert sched.waiting[1] is head
    assert (len(worse.tokens), worse.num_pending) == (4, 0)


def test_a_preempted_sequence_waits_for_its_tokens_and_for_its_turn():
    sched = scheduler(pages=4, page_size=2)
    a, b = add(sched, sequence([1, 1, 1], new=4), sequence([2, 2, 2], new=6))
    run(sched)
    late = dispatch(sched)
    assert late.decode == [a, b]
    (c,) = add(sched, sequence([3], new=2))
    step = dispatch(sched)
    assert step.preempted == [b]
    assert (len(b.tokens), b.num_pending) == (4, 1)
    sched.finish(a)
    assert (
        sched.schedule() is None
    )  # b has the next turn, and one of its tokens is not read: c may not overtake it
    read(sched, late)
    step = dispatch(sched)
    assert [chunk.seq for chunk in step.prefill] == [b, c]
    assert step.prefill[0].start + step.prefill[0].length == 5
    assert c.tokens == [3]


def test_the_worst_sits_out_rather_than_lose_its_pages():
    sched = scheduler(pages=4, page_size=2)
    a, b = add(sched, sequence([1, 1], new=6), sequence([2, 2, 2], new=6))
    run(sched, 2)
    assert (a.num_computed, b.num_computed) == (3, 4)
    step = run(sched)  # b needs a page, none is left, nobody is worse
    assert step.decode == [a]
    assert not step.preempted
    assert len(b.tables[0]) == 2
    sched.finish(a)
    assert run(sched).decode == [b]


def test_a_prefill_takes_pages_of_worse_decodes():
    sched = scheduler(pages=6, page_size=2, max_prefill_tokens=6)
    (worse,) = add(sched, sequence([2] * 2, new=8, priority=1))
    run(sched, 4)
    add(sched, sequence([1] * 9, new=2))
    step = run(sched)
    assert (step.decode, chunks(step)) == ([worse], [(0, 6, False)])
    step = run(sched)
    assert (step.decode, step.preempted, chunks(step)) == ([], [worse], [(6, 3, True)])


def test_better_priority_displaces_the_worst_one_a_step():
    sched = scheduler(max_num_seqs=2)
    a, b = add(sched, sequence([1] * 3), sequence([2] * 3))
    run(sched, 2)
    equal, first, second = add(sched, sequence([3]), sequence([4], priority=-1), sequence([5], priority=-1))
    step = run(sched)
    assert step.preempted == [b]
    assert step.decode == [a]
    assert [chunk.seq for chunk in step.prefill] == [first]
    step = run(sched)
    assert step.preempted == [a]
    assert step.decode == [first]
    assert [chunk.seq for chunk in step.prefill] == [second]
    step = run(sched)
    assert not step.preempted
    assert sched.waiting == [a, b, equal]


def test_a_displaced_chunk_is_taken_out_of_the_step():
    sched = scheduler(max_num_seqs=1, max_prefill_tokens=8)
    (worse,) = add(sched, sequence([1] * 12))
    run(sched)
    (better,) = add(sched, sequence([2] * 6, priority=-1))
    step = run(sched)
    assert step.preempted == [worse]
    assert [(chunk.seq, chunk.length) for chunk in step.prefill] == [(better, 4)]
    assert worse.num_computed == 0


def test_a_displacement_that_is_not_enough_blocks_nothing_later():
    sched = scheduler(pages=4, page_size=2)
    a, b = add(sched, sequence([1] * 3, new=1, priority=-1), sequence([2] * 3, new=1))
    first = dispatch(sched)
    (head,) = add(sched, sequence([3] * 7, new=1, priority=-1))
    assert sched.schedule() is None  # b is displaced, but a still holds half of the pages
    assert sched.waiting == [head, b]
    assert sched.schedule() is None  # b has all its tokens sampled: it is not run again
    read(sched, first)
    sched.finish(a)
    sched.finish(b)
    step = run(sched)
    assert [chunk.seq for chunk in step.prefill] == [head]
    assert step.preempted == []  # b is done meanwhile


def test_admission_does_not_preempt_for_equal_priority():
    sched = scheduler(pages=4, page_size=2)
    a, b = add(sched, sequence([1] * 5, new=3), sequence([2] * 4, new=3))
    step = run(sched)
    assert [chunk.seq for chunk in step.prefill] == [a]
    assert sched.waiting == [b]
    assert not b.tables
    sched.finish(a)
    assert [chunk.seq for chunk in run(sched).prefill] == [b]


def test_a_share_of_the_pool_is_left_to_those_who_run():
    sched = scheduler(pages=100, page_size=1, max_prefill_tokens=100)
    a, b = add(sched, sequence([1] * 90, new=2), sequence([2] * 10, new=2))
    assert [chunk.seq for chunk in run(sched).prefill] == [
        a
    ]  # 10 would fit, but nothing would be left to grow
    sched.finish(a)
    assert [chunk.seq for chunk in run(sched).prefill] == [b]


def test_siblings_wait_for_their_leaders_prompt():
    sched = scheduler(max_prefill_tokens=5)
    leader = sequence(10)
    sibling = sequence(10, leader=leader)
    add(sched, leader, sibling, other := sequence([5] * 2))
    assert [chunk.seq for chunk in run(sched).prefill] == [leader]
    assert [chunk.seq for chunk in run(sched).prefill] == [leader]
    step = run(sched)
    assert [(chunk.seq, chunk.start) for chunk in step.prefill] == [(sibling, 8), (other, 0)]
    assert sibling.tables[0][:2] == leader.tables[0][:2]


def test_others_pass_a_waiting_sibling():
    sched = scheduler()
    leader = sequence(9)
    add(sched, leader, sibling := sequence(9, leader=leader), other := sequence([5]))
    assert [chunk.seq for chunk in run(sched).prefill] == [leader, other]
    assert sched.waiting == [sibling]


def test_a_sibling_does_not_wait_for_a_leader_who_is_gone():
    sched = scheduler(max_prefill_tokens=5)
    leader = sequence(9)
    add(sched, leader, sibling := sequence(9, leader=leader))
    run(sched)
    sched.abort(leader)
    assert [chunk.seq for chunk in run(sched).prefill] == [sibling]
    assert sibling.cached_tokens == 4  # what the leader had computed


@pytest.mark.parametrize(
    ("moment", "steps"), [("waiting", 0), ("prefilling", 1), ("decoding", 2), ("preempted", 3)]
)
def test_abort_at_any_moment_gives_everything_back(moment, steps):
    sched = scheduler(pages=4, page_size=2, max_prefill_tokens=6)
    prompt = 7 if moment == "prefilling" else 3
    other, seq = add(sched, sequence([1] * 3, new=5), sequence([2] * prompt, new=2))
    in_flight = [dispatch(sched) for _ in range(steps)]
    assert (seq in sched.waiting) == (moment in ("waiting", "preempted"))
    assert (seq in sched.prefilling) == (moment == "prefilling")
    assert (seq in sched.decoding) == (moment == "decoding")
    assert seq.num_preemptions == (moment == "preempted")
    sched.abort(seq)
    sched.abort(seq)
    sched.check_integrity()
    assert seq.status is SequenceStatus.FINISHED
    assert not seq.tables
    for step in in_flight:
        read(sched, step)
    assert len(seq.tokens) == prompt  # late tokens are dropped
    sched.finish(other)
    assert not sched.has_work
    assert sched.schedule() is None
    assert sched.kv.pool.available == sched.kv.pool.total


def test_table_updates_outlive_a_schedule_that_finds_no_work():
    sched = scheduler(pages=6, page_size=2, groups=(PageGroup("sliding", 1), PageGroup()))
    seq, other = add(sched, sequence([1, 1], new=4), sequence([2, 2, 2], new=1, priority=-1))
    step = dispatch(sched)
    # seq gives a page of its window back but needs two; the other only waits for its token to be read.
    assert sched.schedule() is None
    assert seq.tables[0] == [0]
    read(sched, step)
    sched.finish(other)
    step = dispatch(sched)
    assert step.decode == [seq]
    assert step.table_updates == [
        (seq.slot, 0, 0, 0),
        (seq.slot, 0, 1, seq.tables[0][1]),
        (seq.slot, 1, 1, seq.tables[1][1]),
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sched, seq: sched._slots.append(seq.slot), "slots"),
        (lambda sched, seq: sched.waiting.reverse(), "out of order"),
        (lambda sched, seq: setattr(sched.waiting[0], "slot", 3), "still holds"),
        (lambda sched, seq: setattr(seq, "num_pending", 1), "counts"),
        (lambda sched, seq: sched.kv.pool.refs.__setitem__(seq.tables[0][0], 0), "disagree"),
    ],
)
def test_integrity_check_sees_damage(damage, message):
    sched = scheduler(max_num_seqs=1)
    seq, _, _ = add(sched, sequence(3), sequence([8]), sequence([9]))
    run(sched)
    sched.check_integrity()
    damage(sched, seq)
    with pytest.raises(RuntimeError, match=message):
        sched.check_integrity()

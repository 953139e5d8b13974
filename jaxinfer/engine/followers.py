"""Several processes, one engine: process 0 schedules, and tells the others each call of its runner before it makes it itself.

Messages are msgpack of the types below. Whoever receives one makes the same call with the same arrays, and needs nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxinfer.engine.batch import StepInputs
from jaxinfer.engine.buckets import Bucket
from jaxinfer.engine.runner import Dispatched, ModelRunner
from jaxinfer.engine.teacher import TeacherForcing
from jaxinfer.errors import RequestError
from jaxinfer.media.item import MediaItem
from jaxinfer.parallel.processes import Follower, Leader


class PackedArray(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, array: np.ndarray) -> PackedArray:
        array = np.ascontiguousarray(array)
        return cls(array.dtype.str, array.shape, array.reshape(-1).view(np.uint8).data)

    def unpack(self) -> np.ndarray:
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


class PackedMedia(msgspec.Struct, array_like=True, frozen=True):
    pixel_values: PackedArray
    num_tokens: int
    grid_thw: tuple[int, int, int] | None

    @classmethod
    def of(cls, item: MediaItem) -> PackedMedia:
        return cls(PackedArray.of(np.asarray(item.pixel_values)), item.num_tokens, item.grid_thw)

    def unpack(self) -> MediaItem:
        return MediaItem(self.pixel_values.unpack(), self.num_tokens, b"", self.grid_thw)


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class DispatchStep(_Message):
    bucket: tuple[int, int, int, int]
    ints: PackedArray
    rows: PackedArray
    samples: bool
    full: bool
    logprobs: bool


class ScoreStep(_Message):
    """Of the step dispatched last."""

    targets: PackedArray


class CompleteStep(_Message):
    number: int


class EncodeMedia(_Message):
    item: PackedMedia
    rows: list[int]


class SetCounts(_Message):
    slot: int
    counts: PackedArray


class SetBias(_Message):
    slot: int
    bias: PackedArray


class SetAllowed(_Message):
    allowed: PackedArray


class TeacherLogits(_Message):
    token_ids: list[int]
    media: list[PackedMedia]


class TeacherStates(_Message):
    token_ids: list[int]
    layers: list[int]


Message = (
    DispatchStep
    | ScoreStep
    | CompleteStep
    | EncodeMedia
    | SetCounts
    | SetBias
    | SetAllowed
    | TeacherLogits
    | TeacherStates
)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Telling:
    """Sends messages, one call at a time: all processes must dispatch in one order."""

    def __init__(self, leader: Leader):
        self._leader = leader
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, message: Message) -> Iterator[None]:
        with self._lock:
            self._leader.send(_encode(message))
            yield


class LeadingRunner(ModelRunner):
    """A ModelRunner whose calls the followers make too."""

    def __init__(self, tell: Telling, *args: Any):
        super().__init__(*args)
        self._tell = tell

    def dispatch(self, arrays: StepInputs, *, logprobs: bool) -> Dispatched:
        b = arrays.bucket
        message = DispatchStep(
            bucket=(b.decode, b.blocks, b.block, b.samples),
            ints=PackedArray.of(arrays.ints),
            rows=PackedArray.of(arrays.rows),
            samples=arrays.samples,
            full=arrays.full,
            logprobs=logprobs,
        )
        with self._tell(message):
            return super().dispatch(arrays, logprobs=logprobs)

    def score(self, step: Dispatched, targets: np.ndarray) -> None:
        with self._tell(ScoreStep(PackedArray.of(targets))):
            super().score(step, targets)

    def complete(self, number: int) -> None:
        if not self.is_complete(number):
            with self._tell(CompleteStep(number)):
                super().complete(number)

    def encode(self, item: MediaItem, rows: list[int]) -> None:
        with self._tell(EncodeMedia(PackedMedia.of(item), rows)):
            super().encode(item, rows)

    def set_counts(self, slot: int, counts: np.ndarray) -> None:
        with self._tell(SetCounts(slot, PackedArray.of(counts))):
            super().set_counts(slot, counts)

    def set_bias(self, slot: int, bias: np.ndarray) -> None:
        with self._tell(SetBias(slot, PackedArray.of(bias))):
            super().set_bias(slot, bias)

    def set_allowed(self, allowed: np.ndarray) -> None:
        with self._tell(SetAllowed(PackedArray.of(allowed))):
            super().set_allowed(allowed)


class LeadingTeacher(TeacherForcing):
    """A TeacherForcing whose calls the followers make too."""

    def __init__(self, tell: Telling, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._tell = tell

    def logits(self, token_ids: Sequence[int] | np.ndarray, media: Sequence[MediaItem] = ()) -> np.ndarray:
        ids = self.checked(token_ids)
        with self._tell(TeacherLogits(ids, [PackedMedia.of(item) for item in media])):
            return super().logits(ids, media)

    def hidden_states(
        self, token_ids: Sequence[int] | np.ndarray, layers: Sequence[int]
    ) -> dict[int, np.ndarray]:
        ids, numbers = self.checked(token_ids), self.checked_layers(layers)
        with self._tell(TeacherStates(ids, numbers)):
            return super().hidden_states(ids, numbers)


def follow(follower: Follower, runner: ModelRunner, teacher: TeacherForcing) -> None:
    """Makes the leader's calls until it ends. Any failure ends the group, by name."""
    last: Dispatched | None = None
    try:
        for content in follower.messages():
            message = _decode(content)
            if isinstance(message, DispatchStep):
                last = runner.dispatch(_inputs(message), logprobs=message.logprobs)
            elif isinstance(message, ScoreStep):
                assert last is not None
                runner.score(last, message.targets.unpack())
            else:
                _carry_out(message, runner, teacher)
        runner.wait()
    except Exception as e:
        follower.fail(f"{type(e).__name__}: {e}")


def _carry_out(message: Any, runner: ModelRunner, teacher: TeacherForcing) -> None:
    match message:
        case CompleteStep(number):
            runner.complete(number)
        case EncodeMedia(item, rows):
            runner.encode(item.unpack(), rows)
        case SetCounts(slot, counts):
            runner.set_counts(slot, counts.unpack())
        case SetBias(slot, bias):
            runner.set_bias(slot, bias.unpack())
        case SetAllowed(allowed):
            runner.set_allowed(allowed.unpack())
        case TeacherLogits(token_ids, media):
            with contextlib.suppress(RequestError):  # images that do not fit: before anything is dispatched
                teacher.logits(token_ids, [item.unpack() for item in media])
        case TeacherStates(token_ids, layers):
            teacher.hidden_states(token_ids, layers)


def _inputs(message: DispatchStep) -> StepInputs:
    return StepInputs(
        bucket=Bucket(*message.bucket),
        ints=message.ints.unpack(),
        rows=message.rows.unpack(),
        samples=message.samples,
        full=message.full,
    )

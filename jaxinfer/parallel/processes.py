"""A group of processes that run one model: process 0 leads, and tells the others over TCP what it is about to dispatch.

All processes must dispatch the same programs in the same order, since these wait for each other on the devices. What is to be
dispatched is known to the leader alone. A process that ends takes the others with it: nobody could finish what it was part of.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from jaxinfer import compat
from jaxinfer.config.mesh import MeshConfig
from jaxinfer.config.processes import DETECT, ProcessConfig
from jaxinfer.errors import ConfigError

_KEY = "jaxinfer/leader"  # address and password, in the coordinator's store
_LENGTH = struct.Struct("<Q")
_MAX_MESSAGE = 1 << 31
_START_TIMEOUT = 120  # seconds until all processes must have come
_GOODBYE = "goodbye"  # of a follower that was let go
_GRACE = 2.0  # seconds that the leader has to say what happened before it ends
_KEEPALIVE = {
    "TCP_KEEPIDLE": 3,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
}  # a machine that is gone is missed in 9 s


def start_processes(config: ProcessConfig, mesh: MeshConfig) -> Leader | Follower | None:
    """Joins the group; None when this process is alone. Before JAX has looked for devices.

    Raises ConfigError when the processes do not divide the mesh, or when the others do not come.
    """
    if not config.several:
        return None
    if mesh.dp > 1:
        raise ConfigError(
            f"dp={mesh.dp}: copies of a model share no process group: start one for each, and dp=1"
        )
    if config.num_processes is not None and mesh.num_devices % config.num_processes:
        raise ConfigError(
            f"{config.num_processes} processes do not divide {mesh.num_devices} devices "
            f"(dp={mesh.dp} x pp={mesh.pp} x ep={mesh.ep} x tp={mesh.tp}): each needs equally many"
        )
    coordinator = None if config.coordinator == DETECT else config.coordinator
    try:
        store = compat.join_processes(
            coordinator, config.num_processes, config.process_id, mesh.num_devices, _START_TIMEOUT
        )
        if store.num_processes == 1:
            return None
        return Leader(store) if store.process_id == 0 else Follower(store)
    except (RuntimeError, ValueError, OSError) as e:
        reason = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise ConfigError(
            f"the processes did not find each other ({reason[:300]}): start all of them, with the same coordinator and num_processes"
        ) from e


class Leader:
    """Process 0. One thread sends; another watches for processes that end."""

    def __init__(self, store: compat.Store):
        password = secrets.token_bytes(16)
        with socket.create_server((store.host, 0), backlog=store.num_processes) as server:
            port = server.getsockname()[1]
            store.set(_KEY, f"{store.host}\n{port}\n{password.hex()}")
            self._links = _accept(server, store.num_processes, password)
        self._ended = False
        for index, link in self._links.items():
            threading.Thread(target=self._watch, args=(index, link), daemon=True).start()
        atexit.register(self.end)

    def send(self, message: bytes) -> None:
        """Sends one message to every follower."""
        message = _LENGTH.pack(len(message)) + message
        for index, link in self._links.items():
            try:
                link.sendall(message)
            except OSError as e:
                _give_up(f"process {index} of the group cannot be reached ({e})")

    def end(self) -> None:
        """Lets the followers go."""
        if not self._ended:
            self._ended = True
            for link in self._links.values():
                try:
                    link.sendall(_LENGTH.pack(0))
                except OSError:
                    return  # the thread that watches says so

    def _watch(self, index: int, link: socket.socket) -> None:
        reason = _read_to_end(link)
        if reason == _GOODBYE:
            return
        if self._ended:
            _leave(1)  # JAX's own end would wait for that process
        _give_up(f"process {index} of the group ended{f': {reason}' if reason else ''}")


class Follower:
    """Any other process: does what the leader says, in its order."""

    def __init__(self, store: compat.Store):
        host, port, password = store.get(_KEY, _START_TIMEOUT).split("\n")
        self.process_id = store.process_id
        self._link = _tuned(socket.create_connection((host, int(port)), timeout=_START_TIMEOUT))
        self._link.settimeout(None)
        self._link.sendall(bytes.fromhex(password) + _LENGTH.pack(store.process_id))
        # JAX would note the signal and go on.
        signal.signal(signal.SIGTERM, lambda *_: _leave(143))
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches all of a terminal's processes: the leader says what follows

    def messages(self) -> Iterator[bytearray]:
        """Until the leader says that it ends. When it ends without a word, so does this process."""
        while True:
            head = self._read(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            if not length:
                self._link.sendall(_GOODBYE.encode())
                return
            yield self._read(length)

    def fail(self, reason: str) -> NoReturn:
        """Ends this process, and so the group, for a reason that the leader will name."""
        with contextlib.suppress(OSError):
            self._link.sendall(reason.encode()[:1000])
        print(f"error: {reason}", file=sys.stderr, flush=True)
        _leave(1)

    def _read(self, length: int) -> bytearray:
        if length > _MAX_MESSAGE:
            self.fail(f"a message of {length} bytes from the leader")
        message = bytearray(length)
        view = memoryview(message)
        while view:
            try:
                count = self._link.recv_into(view)
            except OSError:
                count = 0
            if not count:
                print("error: process 0 of the group ended", file=sys.stderr, flush=True)
                _leave(1)
            view = view[count:]
        return message


def least(value: int) -> int:
    """The least of all processes' values. Each must call it at the same point."""
    return int(np.min(compat.gather_from_processes(value)))


def check_same(settings: str) -> None:
    """ConfigError unless all processes call it with the same text."""
    found = compat.gather_from_processes(zlib.crc32(settings.encode()))
    others = [i for i, value in enumerate(found) if value != found[0]]
    if others:
        raise ConfigError(
            f"process {others[0]} has another model or other settings than process 0: start all with the same command, "
            "but for process_id"
        )


def _accept(server: socket.socket, num_processes: int, password: bytes) -> dict[int, socket.socket]:
    """A link to each of the other processes. Whoever does not know the password is turned away."""
    links: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _START_TIMEOUT
    while len(links) < num_processes - 1:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        link, _ = server.accept()
        link.settimeout(5)
        try:
            greeting = _read_exactly(link, len(password) + _LENGTH.size)
        except OSError:
            link.close()
            continue
        (index,) = _LENGTH.unpack(greeting[len(password) :])
        known = secrets.compare_digest(greeting[: len(password)], password)
        if not known or index in links or not 0 < index < num_processes:
            link.close()
            continue
        link.settimeout(None)
        links[index] = _tuned(link)
    return links


def _tuned(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _read_exactly(link: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        part = link.recv(length - len(content))
        if not part:
            raise ConnectionError("closed")
        content += part
    return content


def _read_to_end(link: socket.socket) -> str:
    content = b""
    try:
        while part := link.recv(4096):
            content = (content + part)[:4096]
    except OSError:
        pass
    return content.decode(errors="replace")


_given_up = threading.Lock()


def _give_up(reason: str) -> None:
    """Ends the leader: what it has dispatched may never finish, so no ordinary end is possible."""
    if not _given_up.acquire(blocking=False):
        return
    print(f"error: {reason}; the model cannot go on without it", file=sys.stderr, flush=True)
    time.sleep(_GRACE)  # the engine may have seen it too, and clients be told
    _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends at once: JAX's own end waits for processes that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""CURVE, ZeroMQ's encryption, for processes that connect over tcp: key files and access control.

Where sockets are bound, ``--curve-dir`` holds ``server.key``, ``server.secret`` and the list
``allowed`` of keys that may connect. Where engines run, it holds ``engine.key``, ``engine.secret``
and a copy of ``server.key``. Keys are written in hexadecimal, because ZeroMQ's own encoding, Z85,
has characters with a meaning in shells.

The protocol is CurveZMQ (https://rfc.zeromq.org/spec/26/): both sides prove that they have the
secrets of their public keys, and each connection uses fresh keys.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shared.logs import RateLimitedLogger
from shared.network.allow_list import AllowedKey, AllowList, AllowListError, AllowListUnreadable
from shared.network.named_address import is_named
from shared.network.peer_limit import PeerLimit, PeerWatch
from shared.watched_file import stamp

logger = logging.getLogger(__name__)

ALLOW_LIST = "allowed"
Role = Literal["server", "engine"]

HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ENGINE_FILES = ("engine.key", "engine.secret", "server.key")
_POLL_S = 0.5
_MAX_LOGGED_KEYS = 1000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 5000


class CurveError(Exception):
    """The keys are not usable; the message is one line for the user."""


@dataclass(frozen=True)
class KeyPair:
    """A public key and its secret, 64 hexadecimal digits each."""

    public: str
    secret: str

    @classmethod
    def fresh(cls) -> KeyPair:
        """Return a new key pair, not yet in a file."""
        return cls(*(z85.decode(key).hex() for key in zmq.curve_keypair()))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Use these keys on a socket that will be bound. Any client with the public key may
        connect, unless a `Gatekeeper` restricts access.
        """
        socket.curve_server = True
        socket.curve_secretkey = _z85(self.secret)


@dataclass(frozen=True)
class EngineKeys:
    """The keys that an engine connects with: its own key pair and the server's public key."""

    own: KeyPair
    server: str

    @classmethod
    def load(cls, directory: Path) -> EngineKeys:
        """Raises `CurveError`."""
        return cls(load_pair(directory, "engine"), load_public(directory, "server"))

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Use these keys on a socket that will connect."""
        socket.curve_publickey = _z85(self.own.public)
        socket.curve_secretkey = _z85(self.own.secret)
        socket.curve_serverkey = _z85(self.server)


class EngineKeyFiles:
    """The keys in ``directory``, which may be replaced while a process uses them."""

    def __init__(self, directory: Path) -> None:
        """Raises `CurveError`."""
        self._directory = directory
        self._stamps = self._look()
        self._warnings = RateLimitedLogger(logger)
        self.keys = EngineKeys.load(directory)

    def refresh(self) -> EngineKeys:
        """Return the keys, read again if the files have changed. If they cannot be used, or not all
        are replaced yet, the keys stay as they were until the next call."""
        stamps = self._look()
        if stamps != self._stamps:
            try:
                self.keys = EngineKeys.load(self._directory)
                self._stamps = stamps
            except CurveError as error:
                self._warnings.warning("cannot use the new keys yet: %s", error)
        return self.keys

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [stamp(self._directory / name) for name in _ENGINE_FILES]


def engine_keys(directory: Path | None, endpoint: str) -> EngineKeyFiles | None:
    """Return the keys for a connection to ``endpoint``, or None if it is unencrypted. Raises
    `CurveError`.
    """
    over_tcp = endpoint.startswith("tcp:") or is_named(endpoint)
    return EngineKeyFiles(directory) if directory and over_tcp else None


def create_pair(directory: Path, role: Role) -> KeyPair:
    """Create a key pair in a private directory. Raises `CurveError`, also if one exists."""
    public, secret = (z85.decode(key).hex() for key in zmq.curve_keypair())
    try:
        check_free(directory, role)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(directory / f"{role}.secret", flags, 0o600), "w") as file:
            file.write(secret + "\n")
        (directory / f"{role}.key").write_text(public + "\n")
    except FileExistsError:
        raise CurveError(f"{directory} already has keys of {_a(role)}") from None
    except OSError as error:
        raise CurveError(f"cannot write keys to {directory}: {error.strerror}") from None
    return KeyPair(public, secret)


def check_free(directory: Path, *roles: Role) -> None:
    """Raise `CurveError` if ``directory`` has keys of one of ``roles``, or the public key alone: an
    engine's directory has the one of a server elsewhere."""
    for role in roles:
        if (directory / f"{role}.secret").exists():
            raise CurveError(f"{directory} already has keys of {_a(role)}")
        if (directory / f"{role}.key").exists():
            raise CurveError(
                f"{directory} has the {role}.key of another machine: use another directory"
            )


def load_pair(directory: Path, role: Role) -> KeyPair:
    """Raises `CurveError`, also for a secret that other users can read."""
    public = load_public(directory, role)
    path = directory / f"{role}.secret"
    secret = _read(path)
    try:
        mode = path.stat().st_mode
    except OSError as error:  # removed meanwhile
        raise CurveError(f"cannot read {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise CurveError(f"{path} can be read by other users: chmod 600 {path}")
    if z85.decode(zmq.curve_public(_z85(secret))).hex() != public:
        raise CurveError(f"{path} is not the secret key of {role}.key")
    return KeyPair(public, secret)


def load_public(directory: Path, role: Role) -> str:
    """Raises `CurveError`."""
    return _read(directory / f"{role}.key")


def is_key(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


class Gatekeeper:
    """Accepts connections to the CURVE sockets of ``context`` by keys on the allow list.

    A refused key is logged once. The list is reloaded when it changes; messages from a key that was
    removed are no longer accepted (`find`).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        directory: Path,
        *,
        on_refused: Callable[[str], None] = lambda reason: None,
        any_model_only: bool = False,
    ) -> None:
        """Call ``on_refused`` with "key", "handshake" or "connections" for each refused connection,
        on a thread. With ``any_model_only``, keys restricted to some models are refused.

        Raises `CurveError`.
        """
        self._pair = load_pair(directory, "server")
        try:
            self._list = AllowList(directory / ALLOW_LIST)
        except AllowListError as error:
            raise CurveError(str(error)) from None
        self._on_refused, self._any_model_only = on_refused, any_model_only
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._warnings = RateLimitedLogger(logger)
        self._monitors: list[zmq.Socket[bytes]] = []
        self._peers = PeerLimit()
        self._closing = threading.Event()
        self._authenticator = _HexAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _Credentials(self._check))
        self._watcher = threading.Thread(target=self._watch, name="gatekeeper", daemon=True)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Authenticate the clients of a socket that will be bound. Call it before `start`."""
        socket.curve_server = True
        socket.curve_publickey = _z85(self._pair.public)
        socket.curve_secretkey = _z85(self._pair.secret)
        self._monitors.append(socket.get_monitor_socket(HANDSHAKE_FAILED | zmq.EVENT_ACCEPTED))

    def start(self) -> None:
        self._watcher.start()

    def find(self, frames: Sequence[zmq.Frame]) -> AllowedKey | None:
        """Return the allow list's entry for the sender of ``frames``; None if its key is no longer
        on the list.
        """
        try:
            return self.find_key(str(frames[-1].get("User-Id")))
        except zmq.ZMQError:  # no user id: not a CURVE connection
            return None

    def find_key(self, key: str) -> AllowedKey | None:
        allowed = self._list.find(key)
        restricted = allowed is not None and allowed.models is not None
        return None if restricted and self._any_model_only else allowed

    def close(self) -> None:
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for monitor in self._monitors:
            monitor.close(0)
        self._authenticator.stop()

    def _check(self, key: str) -> bool:
        if self.find_key(key) is None:
            self._refresh()  # it may have been added a moment ago
        if self.find_key(key) is not None:
            return True
        self._on_refused("key")
        with self._lock:
            is_new = key not in self._logged and len(self._logged) < _MAX_LOGGED_KEYS
            self._logged |= {key} if is_new else set()
        if is_new:
            known = self._list.find(key) is not None
            why = "is restricted to some models" if known else "is not on the allow list"
            logger.warning("refused a connection: the key %s %s", key, why)
        return False

    def _refresh(self) -> None:
        try:
            with self._lock:
                changed = self._list.refresh()
                if changed:
                    self._logged.clear()
        except AllowListUnreadable as error:
            self._warnings.warning("cannot reload the allow list yet: %s", error)
        except AllowListError as error:
            logger.error("cannot reload the allow list, it stays as it was: %s", error)
        else:
            if changed:
                logger.info("the allow list was reloaded")

    def _watch(self) -> None:
        poller, refresh_at = zmq.Poller(), 0.0
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        while not self._closing.is_set():
            for monitor, _ in poller.poll(int(_POLL_S * 1000)):
                self._on_event(recv_monitor_message(monitor))
            if (now := time.monotonic()) >= refresh_at:
                refresh_at = now + _POLL_S
                self._refresh()

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == zmq.EVENT_ACCEPTED:
            if not self._peers.on_accepted(event["value"], event["endpoint"].decode()):
                self._on_refused("connections")
            return
        self._on_refused("handshake")
        self._warnings.warning(
            "refused a connection: no CURVE, or encrypted for another server key"
        )


class _HexAuthenticator(ThreadAuthenticator):
    def curve_user_id(self, client_public_key: bytes) -> str:
        """Return the user id that messages of this key carry."""
        return client_public_key.hex()


@dataclass(frozen=True)
class _Credentials:
    """The callback interface of pyzmq's authenticator."""

    check: Callable[[str], bool]

    def callback(self, domain: str, key: bytes) -> bool:
        return self.check(z85.decode(key).hex())


def guard(
    socket: zmq.Socket[bytes], address: str, gatekeeper: Gatekeeper | None
) -> PeerWatch | None:
    """Limit who may connect to ``socket``, before it is bound to ``address``: over tcp only keys
    that ``gatekeeper`` allows, or without one, only so many peers that descriptors are left.
    Return what has to be closed before the socket."""
    if not address.startswith("tcp:"):
        return None
    if gatekeeper is None:
        return PeerWatch(socket)
    gatekeeper.protect(socket)
    return None


def watch_peer(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Detect that the machine at the other end of ``endpoint`` has vanished, which closes no
    connection.
    """
    if endpoint.startswith("tcp:"):
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _read(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise CurveError(
            f"cannot read {path}: {reason} (create keys with mlx-lm-server keys)"
        ) from None
    if not is_key(text):
        raise CurveError(f"{path} is not a key of 64 hexadecimal digits")
    return text


def _z85(key: str) -> bytes:
    return bytes(z85.encode(bytes.fromhex(key)))


def _a(role: Role) -> str:
    return "a server" if role == "server" else "an engine"

"""CURVE keys, which let the learner's port be reached from other machines: encrypted, and for the holders alone.

    python -m splitgrpo.keys FOLDER      writes FOLDER/learner.curve and FOLDER/sampler.curve, one for each worker

Each file holds that side's own pair and the public key of the other side. Samplers of one run share a file. No torch.
"""

import argparse
import ipaddress
import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from splitgrpo.config import EXIT_OK, EXIT_USAGE, SettingsError

ROLES = ("learner", "sampler")
FIELDS = {"role", "public", "secret", "peer"}
MAX_FILE_BYTES = 4096
COMMAND = "python -m splitgrpo.keys FOLDER"


@dataclass(frozen=True)
class Curve:
    """What one side needs; keys are Z85 text of 40 bytes.

    role    "learner" or "sampler"
    public  its own public key; `secret` belongs to it and is never shown
    peer    the other side's public key: the learner lets in no other, the sampler talks to no other
    """

    role: str
    public: bytes
    secret: bytes = field(repr=False)
    peer: bytes


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach; False for any name but localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_keys(folder: Path) -> list[Path]:
    """Write a new pair of files that only their owner can read; returns their paths, the learner's first.

    Raises SettingsError when one is there already or the folder cannot be written; then nothing was changed.
    """
    paths = [folder / f"{role}.curve" for role in ROLES]
    for path in paths:
        if path.exists():
            raise SettingsError(
                f"{path} is there already and workers may be using it: remove both files, or give another folder"
            )
    pairs = [zmq.curve_keypair() for _ in ROLES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, path in enumerate(paths):
            (public, secret), (peer, _) = pairs[i], pairs[1 - i]
            value = {"role": ROLES[i], "public": public.decode(), "secret": secret.decode(),
                     "peer": peer.decode()}  # fmt: skip
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(value, file)
    except OSError as error:
        raise SettingsError(f"{folder}: keys cannot be written ({error.strerror})") from error
    return paths


def read_curve(path: str | None, role: str) -> Curve | None:
    """Read the file of --curve_key for `role`; None without one.

    Raises SettingsError when it is not there, is damaged, belongs to the other side, or can be read by others.
    """
    if path is None:
        return None
    what = f"--curve_key {path}"
    try:
        # Not blocking: a FIFO of that name would wait for its writer for ever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise SettingsError(f"{what}: {error.strerror}; {COMMAND} makes such files") from error
    if stat.S_IMODE(mode) & 0o077:
        raise SettingsError(
            f"{what} can be read by other users (mode {stat.S_IMODE(mode):o}), who could then take part in the run: "
            "chmod 600 it, and make new keys if anybody may have read it"
        )
    curve = _parse(text, what)
    if curve.role != role:
        raise SettingsError(
            f"{what} is the {curve.role}'s file: a {role} takes the {role}.curve that was made beside it"
        )
    return curve


def _parse(text: bytes, what: str) -> Curve:
    try:
        value = json.loads(text)
        if len(text) > MAX_FILE_BYTES or value.keys() != FIELDS or value["role"] not in ROLES:
            raise ValueError("fields")
        public, secret, peer = (
            value[name].encode("ascii") for name in ("public", "secret", "peer")
        )
        # curve_public refuses what is no Z85 key; a peer is a public key, for which there is only the form to check.
        if zmq.curve_public(secret) != public or not zmq.curve_public(peer) or peer == public:
            raise ValueError("keys")
    except (ValueError, AttributeError, TypeError, RecursionError, zmq.ZMQError) as error:
        raise SettingsError(
            f"{what} is not a file of keys, or is damaged: make new ones with {COMMAND}"
        ) from error
    return Curve(value["role"], public, secret, peer)


class Doorkeeper:
    """Answers libzmq when it asks whether a CURVE client may come in (ZAP 1.0, rfc.zeromq.org/spec/27).

    Lives on the thread of the socket that it guards and ends with it. zmq.auth has the same on a thread of its own.
    """

    def __init__(self, context: zmq.Context, allowed: bytes) -> None:
        self.allowed = z85.decode(allowed)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> bool:
        """Answer one question that is waiting; returns whether the client was let in."""
        version, request_id, _domain, _address, _identity, mechanism, *keys = (
            self.socket.recv_multipart(zmq.NOBLOCK)
        )
        known = mechanism == b"CURVE" and keys == [self.allowed]
        code, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([version, request_id, code, text, b"", b""])
        return known


def secure(socket: zmq.Socket, curve: Curve) -> Doorkeeper | None:
    """Encrypt a socket that is not bound or connected yet. Returns the learner's doorkeeper, to be polled."""
    socket.curve_publickey, socket.curve_secretkey = curve.public, curve.secret
    if curve.role == "sampler":
        socket.curve_serverkey = curve.peer
        return None
    socket.curve_server = True
    # Bound first: without one libzmq lets in every client that knows the learner's public key.
    return Doorkeeper(socket.context, curve.peer)


def main(argv: list[str] | None = None) -> int:
    """Make a pair of files; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m splitgrpo.keys", description="Make CURVE keys for a run.",
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("folder", type=Path, help="where learner.curve and sampler.curve are put")
    try:
        learner, sampler = make_keys(parser.parse_args(argv).folder)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    sys.stdout.write(
        f"--curve_key {learner}   for the learner\n"
        f"--curve_key {sampler}   for every sampler: copy it there, mode 600\n"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

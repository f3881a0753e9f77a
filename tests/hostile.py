"""Hostile bytes for tests/test_hostile.py: raw connections, unsigned messages, and signed ones that lie."""

import contextlib
import hmac
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import safetensors.numpy

from splitgrpo import SCHEMA_VERSION, wire

KEY = b"k" * 32
MARK = "PAYLOADMARK"  # in payloads, and never in a log
EVIL = ("evil-session", 1)  # session and sampler_id of the peer that has the key
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2
HTTP = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + MARK.encode()


def sign(head: bytes, blob: bytes = b"", head_len: int | None = None) -> bytes:
    """A message with a right signature, whatever is in it."""
    pad = bytes(-(wire.START + len(head)) % 8) if blob else b""
    body = struct.pack("<I", len(head) if head_len is None else head_len) + head + pad + blob
    return wire.MAGIC + hmac.digest(KEY, body, "sha256") + body


def dial(port: int, data: bytes = b"", timeout_s: float = 5.0) -> socket.socket:
    """A raw connection that has sent `data`."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
    with contextlib.suppress(OSError):  # thrown out in the middle: just as well
        raw.sendall(data)
    return raw


def is_closed(raw: socket.socket, timeout_s: float) -> bool:
    """Wait until the other side has ended a connection; its greeting is read over."""
    raw.settimeout(timeout_s)
    try:
        while raw.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


class Canary:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (self.path,)


# ---- messages of a peer without the key -----------------------------------------------------------


def unsigned(rng: random.Random, good: list[bytes], pickled: bytes) -> Iterator[list[bytes]]:
    """Endless frames of strangers: noise, pickles, good messages that were changed on the way."""
    fixed = [
        [],
        [b""],
        [b"", b""],
        [b""] * 50,
        [pickled],
        [wire.MAGIC + pickled],
        [wire.MAGIC],
        [wire.MAGIC + bytes(36)],
        [TLS_HELLO],
        [HTTP],
    ]
    while True:
        payload = rng.choice(good)
        kind = rng.randrange(8)
        if kind == 0:
            yield rng.choice(fixed) or [b""]
        elif kind == 1:
            yield [rng.randbytes(rng.randrange(200)) + MARK.encode()]
        elif kind == 2:
            yield [payload[: rng.randrange(len(payload))]]
        elif kind == 3:
            yield [payload, payload]
        elif kind == 4:
            yield [b"", payload]  # as REQ sends it
        elif kind == 5:
            yield [payload + MARK.encode()]
        elif kind == 6:
            yield [wire.MAGIC + rng.randbytes(32) + payload[36:]]
        else:
            at = rng.randrange(len(payload))
            yield [payload[:at] + bytes([payload[at] ^ 1 << rng.randrange(8)]) + payload[at + 1 :]]


# ---- messages of a peer that has the key -----------------------------------------------------------

NASTY_TEXT = [
    "",
    "\n[learner r0] step 9 forged",
    "\x1b[2J\x1b]0;owned\x07",
    "\r\x00\x7f\u2028\u202e",
    "x" * 4096,
    "y" * 4097,
    "\ud7ff",
    "%s%n%d{}",
    "../../etc/passwd",
]
NASTY_NUMBERS = [
    0,
    1,
    -1,
    1 << 31,
    (1 << 48) - 1,
    1 << 48,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    5e-324,
    True,
]


def deep(levels: int) -> list:
    """A list in a list in a list."""
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


NASTY_SHAPES = [None, [], {}, deep(300), MARK.encode() * 9, ["a"] * 65, {"a": 1}, list(range(3000))]
NASTY = [*NASTY_TEXT, *NASTY_NUMBERS, *NASTY_SHAPES]


class Attacker:
    """Draws signed messages that are wrong in some way, or valid but not asked for.

    `groups` are (header, blob) of valid groups of this run; `seq` is where the learner stands with this peer, so that
    what it sends is looked at and not just passed over.
    """

    def __init__(
        self, rng: random.Random, groups: list[tuple[wire.GroupHeader, bytes]], hello: wire.Hello
    ) -> None:
        self.rng, self.groups, self.seq = rng, groups, 0
        session, number = EVIL
        self.hello = wire.Hello(session=session, sampler_id=number, schema_version=SCHEMA_VERSION,
                                run_id=hello.run_id, settings=hello.settings)  # fmt: skip
        own = {"session": session, "sampler_id": number}
        self.bye = wire.Bye(**own, finished=True, reason="\n[learner r0] gone")
        self.others: list[wire.Header] = [
            wire.Request(**own, next_seq=0, num_groups=2),
            wire.Heartbeat(**own, next_seq=3, discarded=0, progress=5, status=MARK.lower()),
            wire.GroupDropped(**own, seq=0, policy_version=0, lineage=1, reason="filtered"),
            wire.Commit(seq=3),
            wire.Grant(first=0, num_groups=9, lineage=1, policy_version=0),
            wire.Refuse(reason="no", retry=False),
            wire.Welcome(next_seq=0, committed=0, lineage=1, start_version=0, boot_id="b"),
        ]

    def group(self) -> tuple[dict, bytes]:
        """Header fields and blob of a group that is next in turn."""
        header, blob = self.rng.choice(self.groups)
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(header))
        return fields | {"session": EVIL[0], "sampler_id": EVIL[1], "seq": self.seq}, blob

    def draw(self) -> bytes:
        """One message; `seq` goes on when the learner's will."""
        payload = self._draw()
        with contextlib.suppress(wire.MessageError):
            header, _ = wire.unseal(KEY, payload)
            if isinstance(header, wire.GroupHeader | wire.GroupDropped):
                in_turn = (header.session, header.sampler_id, header.seq) == (*EVIL, self.seq)
                self.seq += in_turn
        return payload

    def _draw(self) -> bytes:
        rng, kind = self.rng, self.rng.randrange(12)
        fields, blob = self.group()
        if kind < 3:
            return sign(encode(fields), spoil_arrays(rng, blob))
        if kind < 5:
            return sign(encode(spoil_fields(rng, fields)), blob)
        if kind == 5:
            return sign(mutate(rng, encode(fields)), blob)
        if kind == 6:
            return sign(encode(fields), mutate(rng, blob))
        if kind == 7:
            return sign(encode(fields), spoil_table(rng, blob))
        if kind == 8:
            head = encode(fields)
            wrong = rng.choice(
                [0, 1, len(head) - 1, len(head) + 1, 1 << 20, (1 << 20) + 1, (1 << 32) - 1]
            )
            return sign(head, blob, wrong)
        other = msgspec.msgpack.decode(
            msgspec.msgpack.encode(rng.choice([self.hello, *self.others]))
        )
        if kind == 9:
            return sign(encode(spoil_fields(rng, other)))
        if kind == 10:
            return sign(mutate(rng, encode(other)), rng.randbytes(rng.randrange(40)))
        return sign(encode(other), rng.choice([b"", blob]))


def encode(value: object) -> bytes:
    """Msgpack, without any schema."""
    return msgspec.msgpack.encode(value)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, pieces cut out, doubled, moved, overwritten with extreme numbers; one to three times."""
    raw = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not raw:
            break
        at, kind = rng.randrange(len(raw)), rng.randrange(5)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[at : at + rng.randint(1, 20)]
        elif kind == 2:
            raw[at:at] = raw[at : at + rng.randint(1, 40)]
        elif kind == 3:
            other = rng.randrange(len(raw))
            raw[at : at + 9] = raw[other : other + 9]
        else:
            number = struct.pack("<Q", rng.choice([2**64 - 1, 2**63, 2**31, 2**20, 0]))
            raw[at : at + 8] = number[: rng.randint(1, 8)]
    return bytes(raw)


def spoil_fields(rng: random.Random, fields: dict) -> dict:
    """One field with an odd value, missing or too many; or another run's, settings' or version's group."""
    fields = dict(fields)
    name = rng.choice(sorted(fields))
    kind = rng.randrange(8)
    if kind == 0:
        del fields[name]
    elif kind == 1:
        fields[rng.choice(["surprise", "__reduce__", "kind ", "\n"])] = rng.choice(NASTY)
    elif kind == 2 and "run_id" in fields:
        fields["run_id"] = "another run"
    elif kind == 3 and "settings_hash" in fields:
        fields["settings_hash"] = "0" * 16
    elif kind == 4 and "adapter_digest" in fields:
        fields["adapter_digest"] = "ef" * 32
    elif kind == 5 and "policy_version" in fields:
        fields["policy_version"] = rng.choice([1, 7, 1 << 40])
    else:
        fields[name] = rng.choice(NASTY)
    return fields


def spoil_arrays(rng: random.Random, blob: bytes) -> bytes:
    """A group whose arrays disagree, have other dtypes, or hold values that nobody can train on."""
    arrays = {k: v.copy() for k, v in safetensors.numpy.load(blob).items()}
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    at = rng.randrange(array.size)
    kind = rng.randrange(8)
    if kind == 0:
        arrays[name] = array.astype(
            rng.choice([np.int64, np.float16, np.uint8, np.complex64, np.bool_])
        )
    elif kind == 1:
        arrays[name] = array[: rng.randrange(len(array))]
    elif kind == 2:
        arrays[name] = array[None]
    elif kind == 3:
        del arrays[name]
    elif kind == 4:
        arrays[rng.choice(["extra", "\n", "__metadata__2"])] = np.zeros(3)
    elif kind == 5:
        for stream in ("old_logprobs", "ref_logprobs", "rewards", "reward_parts"):
            if rng.random() < 0.5:
                flat = arrays[stream].reshape(-1)
                flat[rng.randrange(flat.size)] = rng.choice([np.nan, np.inf, -np.inf, 0.5, 3e38])
    elif kind == 6:
        arrays["token_ids"][rng.randrange(arrays["token_ids"].size)] = rng.choice(
            [-1, 50, 2**31 - 1]
        )
    else:
        lengths = arrays["lengths"]
        lengths[at % lengths.size] = rng.choice(
            [-1, 0, 1, 2**31 - 1, -(2**31), int(lengths[0]) + 1]
        )
    return safetensors.numpy.save(arrays)


def spoil_table(rng: random.Random, blob: bytes) -> bytes:
    """A blob whose table of arrays lies about itself or about what follows."""
    (size,) = struct.unpack_from("<Q", blob)
    table, data = blob[8 : 8 + size], blob[8 + size :]
    kind = rng.randrange(6)
    if kind == 0:
        return (
            struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1]))
            + table
            + data
        )
    if kind == 1:
        table = b"[" * 3000
    elif kind == 2:
        table = b'{"a":' * 600
    elif kind == 3:
        table = table.replace(
            b"F32", rng.choice([b"BF16", b"F8_E4M3", b"F4", b"C64", b"I32", b"x" * 9]), 1
        )
    elif kind == 4:
        table = mutate(rng, table)
    else:
        many = [
            b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i
            for i in range(rng.choice([1, 60, 90]))
        ]
        table = b"{" + b",".join(many) + b"}"
    return struct.pack("<Q", len(table)) + table + data

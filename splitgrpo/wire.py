"""Bytes on the socket: signed, typed, bounded, never pickle. Imports no torch.

    payload = MAGIC (4) | HMAC-SHA256 (32) of all that follows | header length (4) | header | blob

The header is one msgspec struct of the union `Message`, unknown fields refused. The blob is empty, or the safetensors
bytes of a group. Nothing is decoded before the HMAC was found right.
"""

import hashlib
import hmac
import struct
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from splitgrpo import SCHEMA_VERSION
from splitgrpo.rollout import Group, Rollout

MAGIC = b"SGR1"
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_TABLE_BYTES = 4096  # of a blob's arrays: reading a million empty ones takes gigabytes
MAX_ROLLOUTS = 4096  # of one group; each becomes an object before group_size is compared

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Reason = Literal["filtered", "reward"]  # why a sampler drops a group itself


class MessageError(ValueError):
    """Bytes that are not a message of ours; the text says which check failed."""


def printable(text: str, limit: int = 200) -> str:
    """Text of a peer as it may stand in one line of a log: cut, control characters and line ends escaped."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all headers."""


class Hello(Header, frozen=True, tag="hello"):
    """Sampler to learner, until welcomed: who I am and the settings that both of us must hold."""

    sampler_id: Id
    session: Text  # drawn at every sampler start, so that a restart is told from a twin
    schema_version: Id
    run_id: Text
    settings: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)]


class Welcome(Header, frozen=True, tag="welcome"):
    """Learner to sampler: send from `next_seq` on; what is below `committed` may be forgotten.

    Groups of an older lineage than `lineage` are usable up to version `start_version`; later weights were rolled back.
    """

    next_seq: Count
    committed: Count
    lineage: Count
    start_version: Count
    boot_id: Text


class Refuse(Header, frozen=True, tag="refuse"):
    """Learner to sampler: no. `retry` is True when waiting may help."""

    reason: Text
    retry: bool


class Request(Header, frozen=True, tag="request"):
    """Sampler to learner, with every heartbeat until granted: I have room for `num_groups` more, from `next_seq` on."""

    sampler_id: Id
    session: Text
    next_seq: Count
    num_groups: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Grant(Header, frozen=True, tag="grant"):
    """Learner to sampler: sample groups from `first` on with at least that adapter version; harmless if repeated."""

    first: Count
    num_groups: Count
    lineage: Count
    policy_version: Count


class Heartbeat(Header, frozen=True, tag="heartbeat"):
    """Both ways, every second. `progress` rises only while the main thread works; zeromq's own would not see it hang.

    `next_seq` is what a sampler has sent, a lost group is asked for again; `discarded` its groups that were rolled back.
    """

    sampler_id: Id
    session: Text
    next_seq: Count
    discarded: Count
    progress: Count
    status: Text


class GroupHeader(Header, frozen=True, tag="group"):
    """Everything of a Group but its arrays, which are in the blob."""

    session: Text
    sampler_id: Id
    seq: Count
    prompt_index: Count
    epoch: Count
    policy_version: Count
    lineage: Count
    adapter_digest: Text
    temperature: float
    run_id: Text
    settings_hash: Text
    schema_version: Id
    part_names: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


class GroupDropped(Header, frozen=True, tag="dropped"):
    """Sampler to learner, in place of a group: it was sampled, but is not sent. `reason` says why."""

    session: Text
    sampler_id: Id
    seq: Count
    policy_version: Count
    lineage: Count
    reason: Reason


class Commit(Header, frozen=True, tag="commit"):
    """Learner to sampler: what became of every group below `seq` is in a checkpoint; forget them."""

    seq: Count


class Bye(Header, frozen=True, tag="bye"):
    """Either way: I leave. `finished` is True when the run is complete."""

    sampler_id: Id
    session: Text
    finished: bool
    reason: Text


Message = (
    Hello | Welcome | Refuse | Request | Grant | Heartbeat | GroupHeader | GroupDropped | Commit | Bye
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def seal(key: bytes, header: Header, blob: bytes = b"") -> bytes:
    """Encode and sign one message. Raises MessageError above the cap: zeromq would lose it after send() said OK."""
    head = _encoder.encode(header)
    body = struct.pack("<I", len(head)) + head + blob
    size = len(MAGIC) + MAC_BYTES + len(body)
    if size > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {size} bytes is above the cap of {MAX_MESSAGE_BYTES}")
    return MAGIC + hmac.digest(key, body, "sha256") + body


def unseal(key: bytes, payload: bytes) -> tuple[Message, bytes]:
    """Check the signature, then decode; returns the header and the blob. Raises MessageError."""
    start = len(MAGIC) + MAC_BYTES
    if len(payload) < start + 4 or payload[: len(MAGIC)] != MAGIC:
        raise MessageError("not a message of this program")
    body = payload[start:]
    if not hmac.compare_digest(payload[len(MAGIC) : start], hmac.digest(key, body, "sha256")):
        raise MessageError("wrong signature: signed with another run's key, or changed on the way")
    (head_len,) = struct.unpack("<I", body[:4])
    if head_len > min(MAX_HEADER_BYTES, len(body) - 4):
        raise MessageError(f"header length: {head_len} does not fit a body of {len(body)} bytes")
    try:
        return _decoder.decode(body[4 : 4 + head_len]), body[4 + head_len :]
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise MessageError(f"bad header: {error}") from error


def settings_hash(settings: dict[str, str]) -> str:
    """Short digest of the settings that both workers must hold in common."""
    text = "\n".join(f"{name}={settings[name]}" for name in sorted(settings))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pack_group(group: Group, session: str, settings_digest: str) -> tuple[GroupHeader, bytes]:
    """Turn a group into header and blob; the arrays of its rollouts are joined, `lengths` tells where to cut."""
    rs = group.rollouts
    names = tuple(rs[0].reward_parts)
    arrays: dict[str, np.ndarray] = {
        "lengths": np.array([len(r.token_ids) for r in rs], dtype=np.int32),
        "token_ids": np.concatenate([r.token_ids for r in rs]),
        "completion_mask": np.concatenate([r.completion_mask for r in rs]),
        "old_logprobs": np.concatenate([r.old_logprobs for r in rs]),
        "rewards": group.rewards,
        "reward_parts": np.array(
            [[r.reward_parts[n] for n in names] for r in rs], dtype=np.float64
        ).reshape(len(rs), len(names)),
        "correct": np.array([r.correct for r in rs], dtype=np.bool_),
        "finished": np.array([r.finished for r in rs], dtype=np.bool_),
    }
    refs = [r.ref_logprobs for r in rs if r.ref_logprobs is not None]
    if refs:
        arrays["ref_logprobs"] = np.concatenate(refs)
    header = GroupHeader(
        session=session,
        sampler_id=group.sampler_id,
        seq=group.seq,
        prompt_index=group.prompt_index,
        epoch=group.epoch,
        policy_version=group.policy_version,
        lineage=group.lineage,
        adapter_digest=group.adapter_digest,
        temperature=group.temperature,
        run_id=group.run_id,
        settings_hash=settings_digest,
        schema_version=SCHEMA_VERSION,
        part_names=names,
    )
    return header, safetensors.numpy.save(arrays)


# Arrays of a group's blob: dtype and rank; "streams" are cut by lengths, the others hold one row a rollout.
STREAMS = {"token_ids": np.int32, "completion_mask": np.bool_, "old_logprobs": np.float32}
PER_ROLLOUT = {"rewards": np.float64, "correct": np.bool_, "finished": np.bool_}


def unpack_group(header: GroupHeader, blob: bytes) -> Group:
    """Rebuild a group; structure is checked here, values by `rollout.check_group`. Raises MessageError."""
    if len(blob) < 8 or struct.unpack_from("<Q", blob)[0] > MAX_TABLE_BYTES:
        raise MessageError(f"bad blob: {len(blob)} bytes, without a table of arrays of a sane size")
    try:
        arrays = safetensors.numpy.load(blob)
    except (SafetensorError, ValueError, KeyError) as error:
        raise MessageError(f"bad blob: {error}") from error
    return build_group(header, arrays)


def build_group(header: GroupHeader, arrays: dict[str, np.ndarray]) -> Group:
    """The same from arrays. Raises MessageError."""
    names = header.part_names
    if len(set(names)) < len(names) or not all(n.isprintable() and n for n in names):
        raise MessageError(f"part_names: {len(names)} names, not all printable and different")
    num, parts = _check_arrays(arrays, len(names))
    cuts = np.cumsum(arrays["lengths"])[:-1]
    split = {n: np.split(arrays[n], cuts) for n in (*STREAMS, "ref_logprobs") if n in arrays}
    rollouts = tuple(
        Rollout(
            token_ids=split["token_ids"][i],
            completion_mask=split["completion_mask"][i],
            old_logprobs=split["old_logprobs"][i],
            ref_logprobs=split["ref_logprobs"][i] if "ref_logprobs" in split else None,
            reward=float(arrays["rewards"][i]),
            correct=bool(arrays["correct"][i]),
            finished=bool(arrays["finished"][i]),
            reward_parts=dict(zip(header.part_names, parts[i].tolist(), strict=True)),
        )
        for i in range(num)
    )
    return Group(
        rollouts=rollouts,
        sampler_id=header.sampler_id,
        seq=header.seq,
        prompt_index=header.prompt_index,
        epoch=header.epoch,
        policy_version=header.policy_version,
        lineage=header.lineage,
        adapter_digest=header.adapter_digest,
        temperature=header.temperature,
        run_id=header.run_id,
    )


def _check_arrays(arrays: dict[str, np.ndarray], num_parts: int) -> tuple[int, np.ndarray]:
    """Names, dtypes and shapes of a blob; returns the number of rollouts and their reward parts."""

    def expect(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        array = arrays[name]
        if array.dtype != dtype or array.shape != shape:
            raise MessageError(
                f"{name}: {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}"
            )
        return array

    required = {"lengths", "reward_parts", *STREAMS, *PER_ROLLOUT}
    if not required <= arrays.keys() <= required | {"ref_logprobs"}:
        raise MessageError(f"blob holds {sorted(arrays)}, expected {sorted(required)}")
    lengths = arrays["lengths"]
    num = lengths.size
    expect("lengths", np.int32, (num,))
    if not 1 <= num <= MAX_ROLLOUTS or lengths.min() < 2:
        raise MessageError(f"lengths: {num} rollouts, allowed 1 to {MAX_ROLLOUTS} of 2 tokens up")
    total = int(lengths.sum(dtype=np.int64))
    streams = STREAMS | ({"ref_logprobs": np.float32} if "ref_logprobs" in arrays else {})
    for name, dtype in streams.items():
        expect(name, dtype, (total,))
    for name, dtype in PER_ROLLOUT.items():
        expect(name, dtype, (num,))
    return num, expect("reward_parts", np.float64, (num, num_parts))

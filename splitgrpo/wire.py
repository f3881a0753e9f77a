"""Bytes on the socket: signed, typed, bounded, never pickle. Imports no torch.

    payload = MAGIC (4) | HMAC-SHA256 (32) of all that follows | header length (4) | header | zeros to a multiple of 8 | blob

The header is one msgspec struct of the union `Message`, unknown fields refused. The blob is empty (no zeros before it then),
or the safetensors bytes of a group, whose arrays are views of the payload. Nothing is decoded before the HMAC was found
right.
"""

import hashlib
import hmac
import struct
from typing import Annotated, Literal

import msgspec
import numpy as np

from splitgrpo import SCHEMA_VERSION
from splitgrpo.blob import BlobError, read_arrays, write_arrays
from splitgrpo.rollout import Group, Rollout

MAGIC = b"SGR1"
MAC_BYTES = 32
START = len(MAGIC) + MAC_BYTES + 4  # of the header
MAX_MESSAGE_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 20
MAX_ROLLOUTS = 4096  # of one group; each becomes an object before group_size is compared

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Blob = bytes | memoryview  # as made, as received
Reason = Literal["filtered", "reward"]  # why a sampler drops a group itself


class MessageError(ValueError):
    """Bytes that are not a message of ours; the text says which check failed."""


def printable(text: str, limit: int = 200) -> str:
    """Text of a peer as it may stand in one line of a log: cut, control characters and line ends escaped."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", gc=False):
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


def seal(key: bytes, header: Header, blob: Blob = b"") -> bytes:
    """Encode and sign one message. Raises MessageError above the cap: zeromq would lose it after send() said OK."""
    head = _encoder.encode(header)
    front = struct.pack("<I", len(head)) + head + (bytes(-(START + len(head)) % 8) if blob else b"")
    size = START - 4 + len(front) + len(blob)
    if size > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {size} bytes is above the cap of {MAX_MESSAGE_BYTES}")
    mac = hmac.new(key, front, "sha256")
    mac.update(blob)
    return b"".join((MAGIC, mac.digest(), front, blob))


def unseal(key: bytes, payload: bytes) -> tuple[Message, memoryview]:
    """Check the signature, then decode; returns the header and a view of the blob. Raises MessageError."""
    if len(payload) < START or payload[: len(MAGIC)] != MAGIC:
        raise MessageError("not a message of this program")
    view = memoryview(payload)  # a slice of bytes would copy all of them
    mac = hmac.digest(key, view[START - 4 :], "sha256")
    if not hmac.compare_digest(view[len(MAGIC) : START - 4], mac):
        raise MessageError("wrong signature: signed with another run's key, or changed on the way")
    head_len = int.from_bytes(view[START - 4 : START], "little")
    end = START + head_len
    if head_len > MAX_HEADER_BYTES or end > len(payload):
        raise MessageError(f"header length: {head_len} in a message of {len(payload)} bytes")
    begin = end if end == len(payload) else end + -end % 8
    if begin > len(payload) or any(view[end:begin]):
        raise MessageError("padding: what stands between header and blob is not zeros")
    try:
        return _decoder.decode(view[START:end]), view[begin:]
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise MessageError(f"bad header: {error}") from error


def settings_hash(settings: dict[str, str]) -> str:
    """Short digest of the settings that both workers must hold in common."""
    text = "\n".join(f"{name}={settings[name]}" for name in sorted(settings))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pack_group(group: Group, session: str, settings_digest: str) -> tuple[GroupHeader, bytes]:
    """Turn a group into header and blob; the arrays of its rollouts are joined, `lengths` tells where to cut.

    Raises MessageError for arrays that no message can hold.
    """
    rs = group.rollouts
    names = tuple(rs[0].reward_parts)
    parts = [[r.reward_parts[n] for n in names] for r in rs]
    # Widest first: what is cut from the blob is aligned then.
    arrays: dict[str, np.ndarray] = {
        "rewards": group.rewards,
        "reward_parts": np.array(parts, dtype=np.float64).reshape(len(rs), len(names)),
        "lengths": np.array([len(r.token_ids) for r in rs], dtype=np.int32),
        "token_ids": np.concatenate([r.token_ids for r in rs]),
        "old_logprobs": np.concatenate([r.old_logprobs for r in rs]),
    }
    refs = [r.ref_logprobs for r in rs if r.ref_logprobs is not None]
    if refs:
        arrays["ref_logprobs"] = np.concatenate(refs)
    arrays["completion_mask"] = np.concatenate([r.completion_mask for r in rs])
    arrays["correct"] = np.array([r.correct for r in rs], dtype=np.bool_)
    arrays["finished"] = np.array([r.finished for r in rs], dtype=np.bool_)
    header = GroupHeader(
        session=session, sampler_id=group.sampler_id, seq=group.seq, prompt_index=group.prompt_index, epoch=group.epoch,
        policy_version=group.policy_version, lineage=group.lineage, adapter_digest=group.adapter_digest,
        temperature=group.temperature, run_id=group.run_id, settings_hash=settings_digest, schema_version=SCHEMA_VERSION,
        part_names=names,
    )  # fmt: skip
    try:
        return header, write_arrays(arrays)
    except BlobError as error:
        raise MessageError(f"bad blob: {error}") from error


# Arrays of a group's blob: "streams" are cut by lengths, the others hold one row a rollout.
FLOAT32, FLOAT64, INT32, BOOL = map(np.dtype, (np.float32, np.float64, np.int32, np.bool_))
STREAMS = {"token_ids": INT32, "completion_mask": BOOL, "old_logprobs": FLOAT32}
PER_ROLLOUT = {"rewards": FLOAT64, "correct": BOOL, "finished": BOOL}
REQUIRED = {"lengths", "reward_parts", *STREAMS, *PER_ROLLOUT}


def unpack_group(header: GroupHeader, blob: Blob) -> Group:
    """Rebuild a group; structure is checked here, values by `rollout.check_group`. Raises MessageError."""
    try:
        arrays = read_arrays(blob)
    except BlobError as error:
        raise MessageError(f"bad blob: {error}") from error
    return build_group(header, arrays)


def build_group(header: GroupHeader, arrays: dict[str, np.ndarray]) -> Group:
    """The same from arrays; those of the group are views of them. Raises MessageError."""
    names = header.part_names
    if len(set(names)) < len(names) or not all(n.isprintable() and n for n in names):
        raise MessageError(f"part_names: {len(names)} names, not all printable and different")
    lengths = _check_arrays(arrays, len(names))
    ids, mask, old = (arrays[name] for name in STREAMS)
    if mask.view(np.uint8).max() > 1:
        raise MessageError(
            "completion_mask: a byte that is neither 0 nor 1, which torch would count as more than one"
        )
    ref = arrays.get("ref_logprobs")
    rewards, correct, finished = (arrays[name].tolist() for name in PER_ROLLOUT)
    parts = arrays["reward_parts"].tolist()
    rollouts, end = [], 0
    for i, length in enumerate(lengths):
        cut = slice(end, end := end + length)
        its_ref = None if ref is None else ref[cut]
        its_parts = dict(zip(names, parts[i], strict=True))
        rollouts.append(
            Rollout(ids[cut], mask[cut], old[cut], its_ref, rewards[i], correct[i], finished[i], its_parts)
        )  # fmt: skip
    group = Group(
        rollouts=tuple(rollouts), sampler_id=header.sampler_id, seq=header.seq, prompt_index=header.prompt_index,
        epoch=header.epoch, policy_version=header.policy_version, lineage=header.lineage,
        adapter_digest=header.adapter_digest, temperature=header.temperature, run_id=header.run_id,
    )  # fmt: skip
    vars(group)["streams"] = {
        name: arrays[name] for name in (*STREAMS, "ref_logprobs") if name in arrays
    }
    return group


def _check_arrays(arrays: dict[str, np.ndarray], num_parts: int) -> list[int]:
    """Names, dtypes and shapes of a blob; returns the lengths of the rollouts."""

    def expect(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        array = arrays[name]
        if array.dtype != dtype or array.shape != shape:
            raise MessageError(f"{name}: {array.dtype} {array.shape}, expected {dtype} {shape}")

    if not REQUIRED <= arrays.keys() <= REQUIRED | {"ref_logprobs"}:
        raise MessageError(f"blob holds {sorted(arrays)}, expected {sorted(REQUIRED)}")
    num = arrays["lengths"].size
    expect("lengths", INT32, (num,))
    lengths = arrays["lengths"][:MAX_ROLLOUTS].tolist()
    if not 1 <= num <= MAX_ROLLOUTS or min(lengths) < 2:
        raise MessageError(f"lengths: {num} rollouts, allowed 1 to {MAX_ROLLOUTS} of 2 tokens up")
    streams = STREAMS | ({"ref_logprobs": FLOAT32} if "ref_logprobs" in arrays else {})
    for name, dtype in streams.items():
        expect(name, dtype, (sum(lengths),))
    for name, dtype in PER_ROLLOUT.items():
        expect(name, dtype, (num,))
    expect("reward_parts", FLOAT64, (num, num_parts))
    return lengths

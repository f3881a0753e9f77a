"""Messages: round trips, and every refusal with its reason. No message may run code or change a group."""

import dataclasses
import pickle
import struct

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from splitgrpo import wire
from splitgrpo.rollout import RolloutError, check_group
from splitgrpo.wire import (
    Bye,
    Commit,
    GroupHeader,
    MessageError,
    pack_group,
    seal,
    unpack_group,
    unseal,
)

KEY = b"k" * 32
LIMITS = {"group_size": 4, "vocab_size": 50, "max_len": 64, "want_ref": True}


def wire_bytes(group) -> bytes:
    return seal(KEY, *pack_group(group, "session", "hash"))


def reread(payload: bytes):
    header, blob = unseal(KEY, payload)
    assert isinstance(header, GroupHeader)
    return unpack_group(header, blob)


@pytest.mark.parametrize("with_ref", [True, False])
def test_a_group_comes_out_of_the_wire_as_it_went_in(make_group, with_ref):
    group = make_group(with_ref=with_ref, seq=9, version=3)
    back = reread(wire_bytes(group))
    for field in dataclasses.fields(group):
        if field.name != "rollouts":
            assert getattr(back, field.name) == getattr(group, field.name)
    for a, b in zip(group.rollouts, back.rollouts, strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
            else:
                assert x == y
    check_group(back, **(LIMITS | {"want_ref": with_ref}))


def test_every_prefix_of_a_good_message_is_refused(make_group):
    payload = wire_bytes(make_group())
    for end in range(len(payload)):
        with pytest.raises(MessageError):
            unseal(KEY, payload[:end])


def test_one_flipped_bit_anywhere_is_refused(make_group):
    payload = wire_bytes(make_group())
    for at in range(0, len(payload), 7):
        torn = bytearray(payload)
        torn[at] ^= 1
        with pytest.raises(MessageError):
            unseal(KEY, bytes(torn))


def test_another_runs_key_is_refused():
    with pytest.raises(MessageError, match="signature"):
        unseal(b"x" * 32, seal(KEY, Commit(seq=1)))


class Canary:
    """Unpickling it would fail the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def signed(body: bytes) -> bytes:
    import hmac

    return wire.MAGIC + hmac.digest(KEY, body, "sha256") + body


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_never_decodes_signed_or_not(noise):
    for payload in (noise, wire.MAGIC + noise):
        with pytest.raises(MessageError):
            unseal(KEY, payload)
    try:
        unseal(KEY, signed(struct.pack("<I", len(noise)) + noise))
    except MessageError:
        pass


def test_a_pickle_is_never_loaded():
    data = pickle.dumps(Canary())
    with pytest.raises(MessageError):
        unseal(KEY, signed(struct.pack("<I", len(data)) + data))
    header, _ = pack_group_header()
    with pytest.raises(MessageError, match="blob"):
        unpack_group(header, data)


def pack_group_header():
    values = {
        "session": "s", "sampler_id": 0, "seq": 0, "prompt_index": 0, "epoch": 0, "policy_version": 0,
        "lineage": 1, "adapter_digest": "", "temperature": 1.0, "run_id": "r", "settings_hash": "h",
        "schema_version": 1, "part_names": (),
    }  # fmt: skip
    return GroupHeader(**values), values


def test_an_unknown_field_is_refused():
    extra = msgspec.msgpack.encode({"kind": "commit", "seq": 1, "surprise": 2})
    with pytest.raises(MessageError, match="surprise"):
        unseal(KEY, signed(struct.pack("<I", len(extra)) + extra))


@pytest.mark.parametrize("value", [-1, 1 << 60, 1.5, "1", None])
def test_numbers_out_of_range_or_of_another_type_are_refused(value):
    body = msgspec.msgpack.encode({"kind": "commit", "seq": value})
    with pytest.raises(MessageError, match="seq"):
        unseal(KEY, signed(struct.pack("<I", len(body)) + body))


def test_a_message_above_the_cap_is_refused_by_its_sender():
    bye = Bye(sampler_id=0, session="s", finished=False, reason="")
    with pytest.raises(MessageError, match="cap"):
        seal(KEY, bye, b"x" * wire.MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("token_ids", lambda a: a.astype(np.int64), "token_ids"),
        ("token_ids", lambda a: a[:-1], "token_ids"),
        ("old_logprobs", lambda a: a.astype(np.float64), "old_logprobs"),
        ("completion_mask", lambda a: a.astype(np.uint8), "completion_mask"),
        ("lengths", lambda a: a * 0, "lengths"),
        ("lengths", lambda a: -a, "lengths"),
        ("lengths", lambda a: np.full_like(a, 2**31 - 1), "token_ids"),
        ("lengths", lambda a: a[None], "lengths"),
        ("rewards", lambda a: a[:-1], "rewards"),
        ("reward_parts", lambda a: a[:, :0], "reward_parts"),
        ("finished", lambda a: None, "blob holds"),
    ],
)
def test_arrays_that_disagree_are_refused_by_name(make_group, name, change, reason):
    header, blob = pack_group(make_group(), "s", "h")
    arrays = safetensors.numpy.load(blob)
    arrays[name] = change(arrays[name])
    kept = {k: v for k, v in arrays.items() if v is not None}
    with pytest.raises(MessageError, match=reason):
        unpack_group(header, safetensors.numpy.save(kept))


def replaced(group, i=0, **fields):
    rollouts = list(group.rollouts)
    rollouts[i] = dataclasses.replace(rollouts[i], **fields)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def edited(array, at, value):
    copy = array.copy()
    copy[at] = value
    return copy


def test_values_that_cannot_be_trained_on_are_refused_by_name(make_group):
    group = make_group()
    first = group.rollouts[0]
    bad = {
        "not finite": replaced(group, old_logprobs=edited(first.old_logprobs, -1, np.nan)),
        "above 0": replaced(group, old_logprobs=edited(first.old_logprobs, -1, 0.5)),
        "not 0.0 on the prompt": replaced(group, ref_logprobs=edited(first.ref_logprobs, 0, -1.0)),
        "vocabulary": replaced(group, token_ids=edited(first.token_ids, -1, 50)),
        "-1": replaced(group, token_ids=edited(first.token_ids, -1, -1)),
        "different prompts": replaced(group, token_ids=edited(first.token_ids, 0, 49)),
        "completion_mask": replaced(group, completion_mask=first.completion_mask & False),
        "one stretch": replaced(group, completion_mask=edited(first.completion_mask, 0, True)),
        "reward": replaced(group, reward=float("inf")),
        "missing": replaced(group, ref_logprobs=None),
        "expected group_size": dataclasses.replace(group, rollouts=group.rollouts[:3]),
    }
    check_group(group, **LIMITS)
    for reason, broken in bad.items():
        with pytest.raises(RolloutError, match=reason):
            check_group(broken, **LIMITS)
    with pytest.raises(RolloutError, match="allowed"):
        check_group(group, **(LIMITS | {"max_len": 5}))

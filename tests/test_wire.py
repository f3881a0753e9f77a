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
from splitgrpo.blob import MAX_TABLE_BYTES, BlobError, read_arrays, write_arrays
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


# ---- groups of unequal lengths -----------------------------------------------------------------------------------------


def stretched(group, lengths, prompt_len=5):
    """The same prompt, with completions of other lengths, drawn anew."""
    rng, prompt, rollouts = np.random.default_rng(3), group.rollouts[0].token_ids[:prompt_len], []
    for r, length in zip(group.rollouts, lengths, strict=True):
        ids = np.concatenate([prompt, rng.integers(3, 50, size=length)]).astype(np.int32)
        mask = np.arange(len(ids)) >= prompt_len
        old, ref = (np.where(mask, -rng.random(len(ids)), 0).astype(np.float32) for _ in range(2))
        fields = {
            "token_ids": ids,
            "completion_mask": mask,
            "old_logprobs": old,
            "ref_logprobs": ref,
        }
        rollouts.append(dataclasses.replace(r, **fields, finished=length > 1))
    return dataclasses.replace(group, rollouts=tuple(rollouts))


@given(lengths=st.lists(st.integers(1, 59), min_size=4, max_size=4), prompt_len=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_groups_of_unequal_lengths_come_out_as_they_went_in(valid_group, lengths, prompt_len):
    group = stretched(valid_group, lengths, prompt_len)
    check_group(group, **LIMITS)
    back = reread(wire_bytes(group))
    check_group(back, **LIMITS)
    for a, b in zip(group.rollouts, back.rollouts, strict=True):
        for field in dataclasses.fields(a):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))
    assert [r.completion_len for r in back.rollouts] == lengths


@pytest.fixture(scope="module")
def valid_group():
    """One for all examples."""
    import conftest

    return conftest.make_group._get_wrapped_function()()()


def test_what_was_read_is_aligned_and_cannot_be_written_into(make_group):
    for session in ("s" * n for n in range(1, 10)):  # headers of all lengths
        payload = seal(KEY, *pack_group(make_group(), session, "hash"))
        for array in reread(payload).streams.values():
            assert array.flags.aligned
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        assert payload == seal(KEY, *pack_group(make_group(), session, "hash"))


def test_what_stands_between_header_and_blob_is_zeros(make_group):
    head = msgspec.msgpack.encode(pack_group(make_group(), "session", "hash")[0])
    head += b"" if len(head) % 8 else head[-1:]
    num = -(wire.START + len(head)) % 8
    assert num
    front = struct.pack("<I", len(head)) + head
    for pad in (b"\x01" * num, bytes(num - 1) + b"\x01", bytes(num - 1)):
        if pad:
            with pytest.raises(MessageError, match="padding"):
                unseal(KEY, signed(front + pad + (b"blob" if len(pad) == num else b"")))


def test_a_truth_value_that_is_neither_is_refused(make_group):
    header, blob = pack_group(make_group(), "s", "h")
    raw = bytearray(blob)
    raw[-9] = 2  # before `correct` and `finished` of four rollouts
    with pytest.raises(MessageError, match="completion_mask: a byte that is neither 0 nor 1"):
        unpack_group(header, bytes(raw))


# ---- arrays as safetensors -----------------------------------------------------------------------------------------------

ARRAYS = {"wide": np.arange(6.0).reshape(2, 3), "none": np.zeros((4, 0)), "ids": np.arange(5, dtype=np.int32),
          "nats": np.linspace(-1, 0, 7, dtype=np.float32), "mask": np.array([True, False, True])}  # fmt: skip


def test_arrays_are_written_as_safetensors_reads_them_and_the_other_way_round():
    for read, write in (
        (safetensors.numpy.load, write_arrays),
        (read_arrays, safetensors.numpy.save),
    ):
        back = read(write(ARRAYS))
        assert back.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert back[name].dtype == array.dtype
            np.testing.assert_array_equal(back[name], array)


def test_an_array_that_cannot_be_written_is_refused_by_name(make_group):
    with pytest.raises(BlobError, match="ids: int64 cannot be written"):
        write_arrays({"ids": np.arange(3)})
    first = make_group().rollouts[0]
    wide = replaced(make_group(), token_ids=first.token_ids.astype(np.int64))
    with pytest.raises(MessageError, match="token_ids: int64"):
        pack_group(wide, "s", "h")


LIES = {
    "a hole": (lambda t: t | {"b": t["b"] | {"data_offsets": [16, 24]}}, "'b'.*expected from 12 on"),
    "an overlap": (lambda t: t | {"b": t["b"] | {"data_offsets": [8, 16]}}, "'b'.*expected from 12 on"),
    "more than there is": (lambda t: t | {"b": {"dtype": "F32", "shape": [3], "data_offsets": [12, 24]}}, "within 20 bytes"),
    "less than there is": (lambda t: {"a": t["a"]}, "accounts for 12"),
    "a size that is none": (lambda t: t | {"a": t["a"] | {"shape": [2]}}, "'a'"),
    "a shape below 0": (lambda t: t | {"a": t["a"] | {"shape": [-3]}}, "table of arrays"),
    "two shapes below 0": (lambda t: t | {"a": t["a"] | {"shape": [-1, -3]}}, "table of arrays"),
    "a side of 0 beside huge ones": (
        lambda t: t | {"a": t["a"] | {"shape": [0] + [2**31 - 1] * 3, "data_offsets": [0, 0]}}, "table of arrays"),
    "a huge shape": (lambda t: t | {"a": t["a"] | {"shape": [2**31 - 1] * 2}}, "'a'"),
    "another dtype": (lambda t: t | {"a": t["a"] | {"dtype": "I64"}}, "'a': dtype 'I64'"),
    "an unknown field": (lambda t: t | {"a": t["a"] | {"surprise": 1}}, "surprise"),
    "metadata": (lambda t: {"__metadata__": {"a": "b"}} | t, "table of arrays"),
    "backwards": (lambda t: t | {"a": t["a"] | {"data_offsets": [12, 0]}}, "'a'"),
    "no table": (lambda t: [1, 2], "table of arrays"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_table_of_arrays_that_lies_is_refused(lie):
    table = {"a": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]},
             "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}  # fmt: skip
    change, reason = LIES[lie]

    def blob(table):
        head = msgspec.json.encode(table)
        return struct.pack("<Q", len(head)) + head + bytes(20)

    assert read_arrays(blob(table)).keys() == {"a", "b"}
    with pytest.raises(BlobError, match=reason):
        read_arrays(blob(change(table)))


@pytest.mark.parametrize("size", [0, 1, MAX_TABLE_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_table_of_a_size_that_cannot_be_is_refused(size):
    for rest in (b"", b"{}", bytes(MAX_TABLE_BYTES + 9)):
        sane = size <= min(MAX_TABLE_BYTES, len(rest))
        with pytest.raises(BlobError, match="table of arrays:" if sane else "of a sane size"):
            read_arrays(struct.pack("<Q", size) + rest)
    with pytest.raises(BlobError, match="table of arrays"):
        read_arrays(bytes(7))


def test_arrays_that_do_not_fit_their_rollouts_are_refused_by_name(make_group):
    group, first = make_group(), make_group().rollouts[0]
    longer, cut = (
        edited(first.completion_mask, slice(3, 5), True),
        group.rollouts[3].completion_mask.copy(),
    )
    cut[-1] = False
    bad = {
        r"old_logprobs: lengths": replaced(group, 1, old_logprobs=group.rollouts[1].old_logprobs[:-1]),
        r"completion_mask: dtype \['bool', 'uint8'\]": replaced(group, completion_mask=first.completion_mask.view(np.uint8)),
        r"token_ids: dtype \['int16', 'int32'\]": replaced(group, token_ids=first.token_ids.astype(np.int16)),
        r"ref_logprobs: dtype": replaced(group, ref_logprobs=first.ref_logprobs[:, None]),
        r"ref_logprobs: missing in 1 of 4": replaced(group, 2, ref_logprobs=None),
        r"different prompts, of \[3, 5, 5, 5\]": replaced(group, completion_mask=longer),
        r"prompt tokens of": replaced(group, completion_mask=first.completion_mask | True),
        r"completion_mask: the completion": replaced(group, 3, completion_mask=cut),
        r"completion_mask: (\d+) prompt tokens of \1": replaced(group, 3, completion_mask=cut & False),
        r"different reward parts": replaced(group, 1, reward_parts={}),
        r"-inf is not finite": replaced(group, reward_parts={"format": -np.inf}),
        r"nan is not finite": replaced(group, reward_parts={"format": float("nan")}),
    }  # fmt: skip
    assert any(len(r.token_ids) > 7 for r in group.rollouts[3:])
    for reason, broken in bad.items():
        with pytest.raises(RolloutError, match=reason):
            check_group(broken, **LIMITS)
    inverted = [dataclasses.replace(r, completion_mask=~r.completion_mask) for r in group.rollouts]
    with pytest.raises(RolloutError, match="completion_mask: the completion is not"):
        check_group(dataclasses.replace(group, rollouts=tuple(inverted)), **LIMITS)
    all_2d = [dataclasses.replace(r, token_ids=r.token_ids[:, None]) for r in group.rollouts]
    with pytest.raises(RolloutError, match="token_ids: 2 dimensions"):
        check_group(dataclasses.replace(group, rollouts=tuple(all_2d)), **LIMITS)

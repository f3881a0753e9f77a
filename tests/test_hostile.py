"""The learner's port under attack: strangers, peers with the key that lie, and a good sampler that notices none of it.

SPLITGRPO_FUZZ=2000000 sends so many signed messages instead of the default, at some 8,000 a second.
"""

import ast
import contextlib
import dataclasses
import gc
import logging
import os
import pickle
import random
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import safetensors.numpy
import zmq
from hostile import (
    EVIL,
    GREETING,
    HTTP,
    KEY,
    MARK,
    NASTY,
    READY,
    TLS_HELLO,
    Attacker,
    Canary,
    dial,
    encode,
    is_closed,
    mutate,
    sign,
    unsigned,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from splitgrpo import transport, wire
from splitgrpo.admission import MAX_SAMPLERS, ServerPlan
from splitgrpo.client import GroupClient, make_hello
from splitgrpo.rollout import RolloutError, check_group
from splitgrpo.server import GroupServer
from splitgrpo.transport import LINES_AT_ONCE, MAX_KINDS, SECONDS_A_LINE
from splitgrpo.wire import MessageError, pack_group, seal, unpack_group, unseal
from splitgrpo.zero import free_port

SETTINGS = {"group_size": "4", "temperature": "1.0"}
LIMITS = {"group_size": 4, "vocab_size": 50, "max_len": 64, "want_ref": True}
NUM_SIGNED = int(os.environ.get("SPLITGRPO_FUZZ", "100000"))
NUM_UNSIGNED = 35_000
BATCH = 500
MAX_GROWTH_BYTES = 30 << 20


class Lines(logging.Handler):
    """Keeps what was logged, and says whether it may stand in a log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.started = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def check(self) -> None:
        most = LINES_AT_ONCE + (time.monotonic() - self.started) / SECONDS_A_LINE + 1
        assert len(self.texts) <= most, self.texts[-5:]
        for text in self.texts:
            assert len(text) < 500
            assert text.isprintable(), repr(text)  # one line, no escape sequences
            assert MARK not in text


class Listener(GroupServer):
    """Counts what came in: every message is either handed on or thrown away with a reason."""

    heard = thrown = 0

    def on_message(self, identity, message, blob, payload) -> None:
        super().on_message(identity, message, blob, payload)
        self.heard += 1

    def count_invalid(self, reason) -> None:
        super().count_invalid(reason)
        self.thrown += 1


class Arena:
    """A learner's port, its log, and a good sampler whose groups must arrive as they were sent."""

    def __init__(self, make_group) -> None:
        self.make_group = make_group
        self.lines = Lines()
        self.log = logging.getLogger(f"arena{id(self)}")
        self.log.propagate = False
        self.log.setLevel(logging.INFO)
        self.log.addHandler(self.lines)
        self.port = free_port()
        plan = ServerPlan(
            run_id="run",
            lineage=1,
            settings=SETTINGS,
            groups_per_step=1000,
            max_staleness=1000,
            max_steps=1_000_000,
            start_version=0,
            cursor={},
            peer_timeout_s=60.0,
            check_group=lambda g: check_group(g, **LIMITS),
        )
        self.server = Listener("127.0.0.1", self.port, KEY, plan, self.log)
        self.server.set_version(0, "ab" * 32)
        self.hello = make_hello(0, "run", SETTINGS)
        self.client = GroupClient(("127.0.0.1", self.port), KEY, self.hello, wait_timeout_s=20.0,
                                  check_stop=lambda: None, log=logging.getLogger("good"))  # fmt: skip
        self.context = zmq.Context()
        self.process = psutil.Process()
        self.good_groups = 0

    def peer(self, kind: int = zmq.DEALER) -> zmq.Socket:
        s = self.context.socket(kind)
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.SNDHWM, 50)
        s.setsockopt(zmq.SNDTIMEO, 20_000)
        s.connect(f"tcp://127.0.0.1:{self.port}")
        return s

    def drain(self, num: int) -> None:
        """Wait until the learner has seen `num` messages."""
        deadline = time.monotonic() + 30
        while self.server.heard + self.server.thrown < num:
            assert time.monotonic() < deadline, (self.server.heard, self.server.thrown, num)
            self.server.raise_if_failed()
            time.sleep(0.002)

    def good_round(self) -> list:
        """One group of the good sampler, there and back; returns what others got in before it."""
        self.client.wait_grant(1)
        group = self.make_group(seq=self.client.next_seq, seed=self.good_groups)
        assert self.client.send(group)
        self.good_groups += 1
        others = []
        while True:
            taken = self.server.take(1, 0, 20.0)
            assert taken is not None, "the good sampler's group did not come"
            if taken[0].group.sampler_id != 0:
                others.append(taken[0])
                continue
            got = taken[0].group
            assert got.seq == group.seq
            for mine, arrived in zip(group.rollouts, got.rollouts, strict=True):
                for field in dataclasses.fields(mine):
                    np.testing.assert_array_equal(getattr(mine, field.name), getattr(arrived, field.name))  # fmt: skip
            return others

    def rss(self) -> int:
        gc.collect()
        return self.process.memory_info().rss

    def check(self) -> None:
        """What must hold after any attack."""
        self.server.raise_if_failed()
        self.good_round()
        self.lines.check()
        assert len(self.server.invalid) <= MAX_KINDS + 4

    def close(self) -> None:
        self.client.close("over")
        self.server.close(finished=False, reason="over")
        self.context.destroy(linger=0)


@pytest.fixture
def arena(make_group):
    made = Arena(make_group)
    made.good_round()
    yield made
    made.close()


# ---- raw connections --------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [30])
def test_noise_and_other_protocols_reach_nobody(arena, rounds):
    rng, fds, rss = random.Random(1), arena.process.num_fds(), arena.rss()
    for _ in range(rounds):
        for data in (rng.randbytes(rng.randrange(1, 5000)), TLS_HELLO, HTTP, GREETING + rng.randbytes(300),
                     GREETING + READY + rng.randbytes(300), b"\xff" * 64, b"\0" * 5000):  # fmt: skip
            dial(arena.port, data).close()
    arena.check()
    assert arena.server.heard < 100  # the good sampler's own
    deadline = time.monotonic() + 10
    while arena.process.num_fds() > fds + 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert arena.process.num_fds() <= fds + 5
    assert arena.rss() - rss < MAX_GROWTH_BYTES


def test_a_storm_of_connections_that_are_reset_leaves_no_descriptor_open(arena):
    fds = arena.process.num_fds()
    for i in range(400):
        raw = dial(arena.port, GREETING[: i % 65])
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
    arena.check()
    deadline = time.monotonic() + 10
    while arena.process.num_fds() > fds + 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert arena.process.num_fds() <= fds + 5


def test_connections_that_never_say_who_they_are_are_closed(make_group, monkeypatch):
    monkeypatch.setattr(transport, "HANDSHAKE_MS", 800)
    arena = Arena(make_group)
    silent = [
        dial(arena.port, GREETING[:n]) for n in (0, 1, 10, 11, 12, 40, 63, 64) for _ in range(5)
    ]
    loris = dial(arena.port)
    ended = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            for byte in GREETING + READY:
                loris.sendall(bytes([byte]))
                if ended.wait(0.05):
                    return

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    try:
        arena.check()  # a good sampler is served meanwhile
        assert all(is_closed(raw, 5.0) for raw in silent)
        assert is_closed(loris, 5.0)
        arena.check()
    finally:
        ended.set()
        dripping.join(5)
        for raw in (*silent, loris):
            raw.close()
        arena.close()


CLAIMS = [wire.MAX_MESSAGE_BYTES, wire.MAX_MESSAGE_BYTES + 1, 1 << 31, 1 << 40, (1 << 64) - 1]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_frame_that_claims_to_be_huge_costs_no_memory(arena, claim):
    rss = arena.rss()
    held = []
    for _ in range(20):
        held.append(
            dial(arena.port, GREETING + READY + b"\x02" + struct.pack(">Q", claim) + b"x" * 100)
        )
    arena.check()
    if claim > wire.MAX_MESSAGE_BYTES:
        assert all(is_closed(raw, 5.0) for raw in held)
    assert arena.rss() - rss < MAX_GROWTH_BYTES
    for raw in held:
        raw.close()


# ---- peers without the key -------------------------------------------------------------------------


def test_messages_above_the_cap_are_refused_by_their_sender_and_never_arrive(arena):
    heard = arena.server.heard + arena.server.thrown
    s = arena.peer()
    s.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
    time.sleep(0.5)
    assert arena.server.thrown == 0
    assert arena.server.heard - heard < 5
    s.close()
    with pytest.raises(MessageError, match="cap"):
        seal(KEY, arena.hello, bytes(wire.MAX_MESSAGE_BYTES))
    arena.check()
    largest = sign(b"x", bytes(wire.MAX_MESSAGE_BYTES - 48))
    assert len(largest) == wire.MAX_MESSAGE_BYTES
    s = arena.peer()
    s.send(largest)
    deadline = time.monotonic() + 20
    while not arena.server.thrown and time.monotonic() < deadline:
        time.sleep(0.05)
    assert arena.server.invalid["bad header"] == 1
    s.close()
    arena.check()


def test_unsigned_messages_are_counted_one_by_one_and_nothing_in_them_runs(arena, tmp_path):
    canary = tmp_path / "canary"
    pickled = pickle.dumps(Canary(str(canary)))
    header, blob = pack_group(arena.make_group(), "session", "hash")
    good = [seal(b"?" * 32, header, blob), seal(KEY, header, blob), seal(KEY, arena.hello)]
    rng = random.Random(7)
    peers = [arena.peer(zmq.DEALER) for _ in range(4)]
    draw = unsigned(rng, good, pickled)
    before = arena.server.heard
    rss = 0
    for num in range(NUM_UNSIGNED):
        peers[num % 4].send_multipart(next(draw))
        if num % 5000 == 4999:
            arena.good_round()
            rss = rss or arena.rss()  # after the first round, when buffers have their size
    arena.drain(before + NUM_UNSIGNED)
    deadline = time.monotonic() + 20
    while arena.server.thrown < NUM_UNSIGNED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(arena.server.invalid.values()) == NUM_UNSIGNED
    assert set(arena.server.invalid) == {
        "wrong signature",
        "wrong number of frames",
        "not a message of this program",
    }
    assert arena.server.peers.keys() == {0}
    arena.check()
    assert arena.rss() - rss < MAX_GROWTH_BYTES
    assert not canary.exists()
    pickle.loads(pickled)  # it would have shown
    assert canary.exists()


def test_every_prefix_of_a_good_message_is_refused_on_the_socket(arena):
    payload = seal(KEY, *pack_group(arena.make_group(), "session", "hash"))
    s = arena.peer()
    for end in range(len(payload)):
        s.send(payload[:end])
    deadline = time.monotonic() + 20
    while arena.server.thrown < len(payload) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert arena.server.thrown == sum(arena.server.invalid.values()) == len(payload)
    arena.check()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.PUSH, zmq.PAIR, zmq.SUB, zmq.ROUTER])
def test_other_kinds_of_sockets_do_no_harm(arena, kind):
    s = arena.peer(kind)
    s.setsockopt(zmq.SNDTIMEO, 200)
    with contextlib.suppress(zmq.ZMQError):  # most of them are not even connected
        s.send(b"hello")
    time.sleep(0.1)
    s.close()
    arena.check()


# ---- peers that have the key -------------------------------------------------------------------------


def expected_of(taken) -> None:
    """Written apart from check_group: nothing may be handed out that cannot be trained on."""
    g = taken.group
    assert (g.run_id, g.adapter_digest, g.policy_version, g.temperature > 0) == ("run", "ab" * 32, 0, True)  # fmt: skip
    assert len(g.rollouts) == 4
    for r in g.rollouts:
        n = len(r.token_ids)
        assert 2 <= n <= 64
        assert all(0 <= t < 50 for t in r.token_ids.tolist())
        mask = r.completion_mask.tolist()
        assert mask == sorted(mask)
        assert 0 < sum(mask) < n
        for values in (r.old_logprobs.tolist(), r.ref_logprobs.tolist()):
            assert len(values) == n
            assert all(-np.inf < v <= 1e-4 for v in values)
        assert all(abs(v) < 1e38 for v in (r.reward, *r.reward_parts.values()))


def test_signed_lies_never_end_the_learner_nor_come_out_as_groups(arena):
    rng = random.Random(11)
    own_hash = wire.settings_hash(SETTINGS)
    groups = [pack_group(arena.make_group(seed=i), EVIL[0], own_hash) for i in range(20)]
    attacker = Attacker(rng, groups, arena.hello)
    s, sent, accepted, rss = arena.peer(), 0, [], 0
    started = time.monotonic()
    while sent < NUM_SIGNED:
        s.send(seal(KEY, attacker.hello))
        attacker.seq = arena.server.next_seq.get(EVIL[1], 0)
        for _ in range(BATCH):
            s.send(attacker.draw())
        s.send(seal(KEY, attacker.bye))
        sent += BATCH + 2
        while s.poll(0):
            s.recv()
        accepted += arena.good_round()
        arena.server.take_fates()
        rss = rss or (arena.rss() if sent > 10_000 else 0)  # when buffers have their size
    rate = sent / (time.monotonic() - started)
    arena.drain(sent)
    accepted += arena.good_round()
    growth = arena.rss() - rss if rss else 0
    dropped = arena.server.dropped
    print(f"{rate:.0f}/s, {len(accepted)} accepted, grown {growth >> 10} kB, {dict(dropped)}")  # noqa: T201
    print(dict(arena.server.invalid), len(arena.lines.texts))  # noqa: T201
    # Lies got as far as each check: else this test would show nothing.
    assert dropped["malformed"] > sent / 50
    assert dropped["foreign"] > sent / 500
    assert arena.server.invalid["bad header"] > sent / 20
    assert len(accepted) > sent / 500  # those that say nothing wrong: the doors are not just shut
    for taken in accepted:
        expected_of(taken)
    assert growth < MAX_GROWTH_BYTES
    arena.check()


def test_what_was_recorded_once_is_no_use_to_anybody(arena, monkeypatch):
    monkeypatch.setattr("splitgrpo.server.SILENT_S", 1.0)
    old, own_hash = make_hello(1, "run", SETTINGS), wire.settings_hash(SETTINGS)
    own = {"session": old.session, "sampler_id": 1}
    groups = [
        seal(KEY, *pack_group(arena.make_group(seq=i, sampler_id=1), old.session, own_hash))
        for i in range(3)
    ]
    beat = {"next_seq": 3, "discarded": 0, "progress": 9, "status": "working"}
    told = [seal(KEY, old), seal(KEY, wire.Request(**own, next_seq=0, num_groups=3)), *groups,
            seal(KEY, wire.Heartbeat(**own, **beat)),
            seal(KEY, wire.Bye(**own, finished=False, reason="ended"))]  # fmt: skip
    capacity = arena.server.credit.room()
    s = arena.peer()
    for payload in told:
        s.send(payload)
    taken = arena.server.take(3, 0, 10.0)
    assert [t.group.seq for t in taken] == [0, 1, 2]
    # Also of the session that is alive: what it did already has no second effect.
    live = {"session": arena.hello.session, "sampler_id": 0}
    done = pack_group(arena.make_group(seq=0, seed=0), arena.hello.session, own_hash)
    told += [
        seal(KEY, *done),
        seal(KEY, wire.Heartbeat(**live, **(beat | {"next_seq": 0, "progress": 0}))),
    ]
    told.append(seal(KEY, dataclasses_replace(arena.hello, session="a twin")))
    rng = random.Random(3)
    for num in range(5000):
        s.send(rng.choice(told))
        if num % 500 == 0:
            while s.poll(0):
                s.recv()
    arena.drain(5000)
    for _ in range(5):
        assert arena.good_round() == []  # nothing came in twice
    deadline = time.monotonic() + 10
    while arena.server.peers.keys() != {0} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert arena.server.peers.keys() == {0}  # and the credit that a replay asked for is there again
    assert arena.server.credit.room() == capacity - 3 - 5
    arena.check()


def dataclasses_replace(header, **fields):
    return type(header)(**(msgspec.structs.asdict(header) | fields))


def test_more_sampler_ids_than_a_run_can_have_are_refused(arena):
    s, refused, welcomed = arena.peer(), 0, 0
    for number in range(1, 2001):
        s.send(seal(KEY, make_hello(number, "run", SETTINGS)))
        if number % 20 == 0:
            arena.drain(number)
    arena.drain(2000)
    while s.poll(300):
        message, _ = unseal(KEY, s.recv())
        refused += (
            isinstance(message, wire.Refuse) and "samplers took part already" in message.reason
        )
        welcomed += isinstance(message, wire.Welcome)
    assert welcomed == MAX_SAMPLERS - 1  # the good one is among them
    assert refused == 2000 - welcomed == arena.server.invalid["hello refused"]
    assert len(arena.server.next_seq) == len(arena.server.peers) == MAX_SAMPLERS
    arena.check()


def test_text_of_a_peer_cannot_forge_lines_of_the_log(arena):
    forged = "\n[learner r0] step 9\r\x1b[2J\u2028\u202e"
    own = {"session": "s", "sampler_id": 1}
    hello = wire.Hello(
        **own, schema_version=arena.hello.schema_version, run_id="run", settings=SETTINGS
    )
    s = arena.peer()
    for header in (
        dataclasses_replace(hello, run_id=forged),
        dataclasses_replace(hello, settings={forged * 100: forged * 100}),
        hello,
        wire.Heartbeat(**own, next_seq=0, discarded=0, progress=1, status=forged),
    ):
        s.send(seal(KEY, header))
    s.send(sign(encode({"kind": "commit", "seq": 1, forged: 2})))
    arena.drain(5)
    assert "step 9" in arena.server.describe()
    assert arena.server.describe().isprintable()
    s.send(seal(KEY, wire.Bye(**own, finished=False, reason=forged)))
    arena.drain(6)
    arena.check()
    assert sum("step 9" in text for text in arena.lines.texts) >= 4


def test_a_refusal_is_short_enough_to_be_read_by_who_it_is_meant_for(arena):
    s = arena.peer()
    long = {f"{i:04000d}": "v" * 4000 for i in range(60)}
    s.send(seal(KEY, dataclasses_replace(arena.hello, sampler_id=1, settings=long)))
    assert s.poll(5000)
    message, _ = unseal(KEY, s.recv())
    assert isinstance(message, wire.Refuse)
    assert "settings differ" in message.reason


def test_refusals_are_counted_under_a_bounded_number_of_names(arena):
    for i in range(3000):
        with arena.server.lock:
            arena.server.count_invalid(f"kind {i} \n: {MARK}")
    assert len(arena.server.invalid) <= MAX_KINDS + 1
    assert sum(arena.server.invalid.values()) == 3000
    assert all(name.isprintable() for name in arena.server.invalid)
    assert len(arena.lines.texts) <= LINES_AT_ONCE + 3


def test_a_small_message_cannot_unfold_into_gigabytes(arena):
    header, blob = pack_group(arena.make_group(), "s", "h")
    arrays = safetensors.numpy.load(blob)
    started, rss = time.monotonic(), arena.rss()
    table = (
        b"{"
        + b",".join(
            b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(400_000)
        )
        + b"}"
    )
    with pytest.raises(MessageError, match="table of arrays"):
        unpack_group(header, struct.pack("<Q", len(table)) + table)
    num = 500_000
    many = {name: np.zeros(2 * num, array.dtype) for name, array in arrays.items()}
    many |= {"lengths": np.full(num, 2, np.int32), "reward_parts": np.zeros((num, 1))}
    many |= {name: np.zeros(num, arrays[name].dtype) for name in ("rewards", "correct", "finished")}
    with pytest.raises(MessageError, match="500000 rollouts, allowed 1 to"):
        unpack_group(header, safetensors.numpy.save(many))
    del table, many
    assert time.monotonic() - started < 5
    assert arena.rss() - rss < MAX_GROWTH_BYTES


def test_parts_of_a_reward_with_one_name_or_an_unprintable_one_are_refused(arena):
    group = arena.make_group()
    header, blob = pack_group(group, "s", "h")
    for names in (("\nforged",), ("",), ("a\x00",)):
        with pytest.raises(MessageError, match="part_names"):
            unpack_group(dataclasses_replace(header, part_names=names), blob)
    arrays = safetensors.numpy.load(blob)
    arrays["reward_parts"] = np.zeros((4, 2))
    with pytest.raises(MessageError, match="part_names"):
        unpack_group(
            dataclasses_replace(header, part_names=("a", "a")), safetensors.numpy.save(arrays)
        )
    for temperature in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(RolloutError, match="temperature"):
            check_group(dataclasses.replace(group, temperature=temperature), **LIMITS)


# ---- structure drawn by hypothesis ---------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=20),
    st.binary(max_size=20), st.sampled_from(NASTY),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=9), v, max_size=4),
    max_leaves=8,
)
KINDS = {cls.__struct_config__.tag: cls for cls in wire.Message.__args__}


@st.composite
def headers(draw):
    """Fields of one kind of message, each right or anything at all."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    right = {"seq": 0, "session": "s", "sampler_id": 1, "num_groups": 1, "reason": "filtered", "finished": True,
             "part_names": ["format"], "temperature": 1.0, "settings": {}, "retry": True}  # fmt: skip
    names = KINDS[kind].__struct_fields__
    fields = {n: draw(st.just(right.get(n, 1)) | values) for n in names if draw(st.integers(0, 20))}
    extra = (
        draw(st.dictionaries(st.text(max_size=9), values, max_size=1))
        if draw(st.booleans())
        else {}
    )
    return {"kind": kind} | fields | extra


dtypes = st.sampled_from(
    [np.int32, np.int64, np.bool_, np.uint8, np.float16, np.float32, np.float64]
)


@settings(max_examples=1500, deadline=None, database=None, derandomize=True)
@given(fields=headers(), seed=st.integers(0, 1 << 30), odd=st.dictionaries(
    st.sampled_from(["lengths", "token_ids", "old_logprobs", "rewards", "reward_parts", "finished", "new"]),
    st.tuples(dtypes, st.lists(st.integers(0, 9), min_size=0, max_size=3)), max_size=2))  # fmt: skip
def test_any_structure_at_all_is_either_refused_or_right(make_blob, fields, seed, odd):
    arrays = safetensors.numpy.load(make_blob)
    for name, (dtype, shape) in odd.items():
        arrays[name] = np.random.default_rng(seed).integers(-3, 60, size=shape).astype(dtype)
    head = encode(fields)
    for payload in (
        sign(head, safetensors.numpy.save(arrays)),
        sign(mutate(random.Random(seed), head), make_blob),
    ):
        try:
            header, blob = unseal(KEY, payload)
        except MessageError:
            continue
        # What was let in is what its type says: it encodes to itself, and its numbers are in range.
        assert (
            msgspec.msgpack.decode(encode(header), type=wire.Message) == header or header != header
        )
        if isinstance(header, wire.GroupHeader):
            try:
                group = unpack_group(header, blob)
                check_group(group, **LIMITS)
            except (MessageError, RolloutError):
                continue
            assert all(0 <= t < 50 for r in group.rollouts for t in r.token_ids.tolist())


@pytest.fixture(scope="module")
def make_blob():
    """A valid blob."""
    import conftest

    group = (
        conftest.make_group.__wrapped__()() if hasattr(conftest.make_group, "__wrapped__") else None
    )
    if group is None:
        group = conftest.make_group._get_wrapped_function()()
    return pack_group(group, "s", "h")[1]


# ---- a sampler that meets a hostile learner -----------------------------------------------------------


def test_a_sampler_survives_what_a_wrong_service_on_the_port_says_and_finds_the_learner_after_it(
    make_group,
):
    port = free_port()
    listener = socket.create_server(("127.0.0.1", port))
    answered = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
                answered.append(connection)

    threading.Thread(target=serve, daemon=True).start()
    client = GroupClient(("127.0.0.1", port), KEY, make_hello(0, "run", SETTINGS), wait_timeout_s=20.0,
                         check_stop=lambda: None, log=logging.getLogger("good"))  # fmt: skip
    context = zmq.Context()
    try:
        deadline = time.monotonic() + 10
        while not client.handshake_error and time.monotonic() < deadline:
            time.sleep(0.02)
        assert answered
        assert client.handshake_error
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in answered:
            connection.close()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"tcp://127.0.0.1:{port}")
        assert router.poll(10_000), "the sampler did not connect again"
        identity, _ = router.recv_multipart()
        rng = random.Random(5)
        welcome = wire.Welcome(next_seq=0, committed=0, lineage=1, start_version=0, boot_id="x")
        for _ in range(2000):
            commit = encode({"kind": "commit", "seq": 3})
            lies = [rng.randbytes(99), mutate(rng, seal(KEY, welcome)), seal(b"?" * 32, welcome),
                    seal(KEY, client.hello), sign(mutate(rng, commit))]  # fmt: skip
            payload = rng.choice(lies)
            if payload != seal(KEY, welcome):  # some mutations change nothing
                router.send_multipart([identity, payload])
        deadline = time.monotonic() + 10
        while sum(client.invalid.values()) < 1500 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sum(client.invalid.values()) >= 1500
        client.raise_if_failed()
        assert client._welcome is None
        router.send_multipart([identity, seal(KEY, welcome)])
        client_welcomed(client)
    finally:
        context.destroy(linger=0)
        client.close("over")


def client_welcomed(client: GroupClient) -> None:
    deadline = time.monotonic() + 10
    while client._welcome is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client._welcome is not None


# ---- nothing in the tree can run what it reads ---------------------------------------------------------

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "multiprocessing",
}
CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized", "broadcast_object_list", "all_gather_object",
         "gather_object", "scatter_object_list", "send_object_list", "recv_object_list", "read_pickle", "to_pickle",
         "eval", "exec"}  # fmt: skip
# Names that are harmless elsewhere, by the module that makes them dangerous.
OF_MODULE = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("torch", "save")}


def dangers(source: str) -> list[str]:
    """What in a file could load a pickle or run text, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            found += [f"{node.lineno}: import {n}" for n in names if MODULES & set(n.split("."))]
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        module = getattr(getattr(function, "value", None), "id", "")
        flags = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        bare = isinstance(function, ast.Name)
        if (name in CALLS and (bare or name not in ("eval", "exec"))) or (
            module,
            name,
        ) in OF_MODULE:
            found.append(f"{node.lineno}: {module}.{name}")
        if (module, name) == ("torch", "load") and flags.get("weights_only") is not True:
            found.append(f"{node.lineno}: torch.load without weights_only=True")
        if flags.get("allow_pickle", False) is not False:
            found.append(f"{node.lineno}: allow_pickle")
    return found


SOURCES = [*sorted((ROOT / "splitgrpo").rglob("*.py")), *sorted(ROOT.glob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_no_file_loads_a_pickle_or_runs_text(path):
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "import multiprocessing.connection", "from multiprocessing import Pipe",
     "import os, shelve", "torch.load(p)", "torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)",
     "yaml.load(t)", "s.send_pyobj(1)", "dist.broadcast_object_list(x)", "torch.distributed.all_gather_object(a, b)",
     "eval(t)", "def f():\n    import marshal"],
)  # fmt: skip
def test_the_search_for_pickles_finds_them(line):
    assert dangers(line)
    assert not dangers("torch.load(p, weights_only=True)\nmodel.eval()\nnp.load(p)\njson.load(f)")

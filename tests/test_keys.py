"""CURVE keys: files that only their owner reads, and a port that answers nobody but the sampler whose key is known."""

import dataclasses
import json
import logging
import os
import socket
import stat
import threading
import time

import pytest
import zmq

from splitgrpo import keys
from splitgrpo.admission import ServerPlan
from splitgrpo.cli import parse_settings
from splitgrpo.client import GroupClient, make_hello
from splitgrpo.config import LearnerSettings, PeerTimeout, SamplerSettings, SettingsError
from splitgrpo.keys import Curve, is_loopback, make_keys, read_curve
from splitgrpo.server import GroupServer
from splitgrpo.wire import seal
from splitgrpo.zero import free_port

KEY = b"k" * 32
LOG = logging.getLogger("test")
SETTINGS = {"group_size": "4"}


def pair(folder) -> tuple[Curve, Curve]:
    """The learner's and the sampler's keys, made and read as users do."""
    learner, sampler = make_keys(folder)
    curves = read_curve(str(learner), "learner"), read_curve(str(sampler), "sampler")
    assert curves[0] is not None
    assert curves[1] is not None
    return curves  # type: ignore[return-value]


# ---- files ---------------------------------------------------------------------------------------


def test_the_command_writes_two_files_for_their_owner_alone_that_belong_together(tmp_path, capsys):
    old = os.umask(0)
    try:
        assert keys.main([str(tmp_path / "new" / "folder")]) == 0
    finally:
        os.umask(old)
    out = capsys.readouterr().out
    learner, sampler = (tmp_path / "new" / "folder" / f"{r}.curve" for r in keys.ROLES)
    for path in (learner, sampler):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert str(path) in out
    ours, theirs = read_curve(str(learner), "learner"), read_curve(str(sampler), "sampler")
    assert (ours.peer, theirs.peer) == (theirs.public, ours.public)
    assert ours.secret != theirs.secret
    assert theirs.secret.decode() not in learner.read_text()
    assert ours.secret.decode() not in repr(ours) + out
    assert read_curve(None, "learner") is None


@pytest.mark.parametrize("there", keys.ROLES)
def test_keys_are_never_overwritten(tmp_path, there, capsys):
    (tmp_path / f"{there}.curve").write_text("precious")
    assert keys.main([str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [p.read_text() for p in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="keys cannot be written"):
        make_keys(tmp_path / "file" / "keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = make_keys(tmp_path)[0]
    path.chmod(mode)
    with pytest.raises(SettingsError, match=r"read by other users.*chmod 600"):
        read_curve(str(path), "learner")


def test_the_other_sides_file_is_refused_on_both_sides(tmp_path):
    learner, sampler = make_keys(tmp_path)
    with pytest.raises(SettingsError, match="is the sampler's file: a learner takes"):
        read_curve(str(sampler), "learner")
    with pytest.raises(SettingsError, match="is the learner's file: a sampler takes"):
        read_curve(str(learner), "sampler")


DAMAGE = {
    "nothing": lambda v: b"",
    "noise": lambda v: os.urandom(300),
    "torn": lambda v: json.dumps(v).encode()[:-20],
    "a list": lambda v: b"[]",
    "a number": lambda v: b"3",
    "deep nesting": lambda v: b"[" * 4000,
    "too long": lambda v: json.dumps(v).encode() + b" " * 5000,
    "a field too many": lambda v: json.dumps(v | {"x": 1}).encode(),
    "a field missing": lambda v: json.dumps({k: v[k] for k in ("role", "secret", "peer")}).encode(),
    "no role": lambda v: json.dumps(v | {"role": "spy"}).encode(),
    "another secret": lambda v: json.dumps(v | {"secret": v["peer"]}).encode(),
    "a short peer": lambda v: json.dumps(v | {"peer": v["peer"][:-1]}).encode(),
    "no Z85": lambda v: json.dumps(v | {"peer": "é" * 40}).encode(),
    "above Z85": lambda v: json.dumps(v | {"peer": "#" * 40}).encode(),
    "a number for a key": lambda v: json.dumps(v | {"peer": 7}).encode(),
    "itself as peer": lambda v: json.dumps(v | {"peer": v["public"]}).encode(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_without_showing_what_is_in_it(tmp_path, kind):
    path = make_keys(tmp_path)[0]
    value = json.loads(path.read_text())
    path.write_bytes(DAMAGE[kind](value))
    with pytest.raises(SettingsError, match="is not a file of keys, or is damaged") as caught:
        read_curve(str(path), "learner")
    assert value["secret"] not in str(caught.value)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    with pytest.raises(SettingsError, match=r"No such file.*splitgrpo\.keys FOLDER"):
        read_curve(str(tmp_path / "none"), "learner")
    tmp_path.chmod(0o700)
    with pytest.raises(SettingsError, match=r"is not a file of keys|Is a directory"):
        read_curve(str(tmp_path), "learner")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SettingsError, match="is not a file of keys"):
        read_curve(str(tmp_path / "fifo"), "learner")


# ---- flags ---------------------------------------------------------------------------------------

BOTH = ((LearnerSettings, "learner"), (SamplerSettings, "sampler"))


@pytest.mark.parametrize(("cls", "role"), BOTH)
@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.168.1.5", "::", "a-machine", "*", "127.0.0.1.evil"]
)
def test_any_host_but_loopback_needs_keys(tmp_path, cls, role, host):
    with pytest.raises(SettingsError, match=r"python -m splitgrpo\.keys FOLDER"):
        parse_settings(cls, ["--host", host])
    make_keys(tmp_path)
    flags = ["--host", host, "--curve_key", str(tmp_path / f"{role}.curve")]
    assert parse_settings(cls, flags).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_needs_none(host):
    assert is_loopback(host)
    for cls, _ in BOTH:
        assert parse_settings(cls, ["--host", host]).curve_key is None


@pytest.mark.parametrize(("cls", "role"), BOTH)
def test_a_key_file_is_checked_before_anything_else_happens(tmp_path, cls, role):
    make_keys(tmp_path)
    other = next(r for r in keys.ROLES if r != role)
    with pytest.raises(SettingsError, match=f"is the {other}'s file"):
        parse_settings(cls, ["--curve_key", str(tmp_path / f"{other}.curve")])


# ---- sockets -------------------------------------------------------------------------------------


class Listener(GroupServer):
    """Notes every message that gets as far as the learner."""

    heard: tuple = ()

    def on_message(self, identity, message, blob, payload) -> None:
        self.heard = (*self.heard, type(message).__name__)
        super().on_message(identity, message, blob, payload)


@pytest.fixture
def net():
    """Makes servers and clients and closes them."""
    opened = []

    class Net:
        def server(self, curve, host="127.0.0.1", port=0):
            plan = ServerPlan(run_id="run", lineage=1, settings=SETTINGS, groups_per_step=2, max_staleness=1,
                              max_steps=9, start_version=0, cursor={}, peer_timeout_s=60.0,
                              check_group=lambda g: None, old_digests={0: "ab" * 32})  # fmt: skip
            self.port = port or free_port()
            server = Listener(host, self.port, KEY, plan, LOG, curve)
            opened.append(lambda: server.close(finished=False, reason="test over"))
            return server

        def client(self, curve, host="127.0.0.1", port=0, wait_timeout_s=8.0):
            hello = make_hello(0, "run", SETTINGS)
            client = GroupClient((host, port or self.port), KEY, hello, wait_timeout_s=wait_timeout_s,
                                 check_stop=lambda: None, log=LOG, curve=curve)  # fmt: skip
            opened.append(lambda: client.close("test over"))
            return client

    yield Net()
    for close in reversed(opened):
        close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("bind", "connect"), [("127.0.0.1", "localhost"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1")]
)
def test_groups_travel_between_holders_of_the_two_files(net, tmp_path, make_group, bind, connect):
    if ":" in bind and not has_ipv6():
        pytest.skip("no IPv6 here")
    learner, sampler = pair(tmp_path)
    server = net.server(learner, bind)
    client = net.client(sampler, connect)
    assert client.wait_grant(2)[0] == 2
    for seq in range(2):
        assert client.send(make_group(seq=seq))
    taken = server.take(2, 0, 5.0)
    assert [t.group.seq for t in taken] == [0, 1]


def strangers(learner: Curve, sampler: Curve) -> dict[str, Curve | None]:
    public, secret = zmq.curve_keypair()
    return {
        "no keys": None,
        "the learner's public key and a pair of its own": Curve("sampler", public, secret, learner.public),
        "the sampler's public key with another secret": Curve("sampler", sampler.public, secret, learner.public),
        "keys of another run": Curve("sampler", public, secret, zmq.curve_keypair()[0]),
    }  # fmt: skip


def answer_to_a_plain_greeting(port: int) -> bytes:
    """What comes back on a connection that speaks ZMTP without any security, up to its end."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(greeting + ready)
        try:
            while chunk := raw.recv(4096):
                answer += chunk
        except ConnectionResetError:
            pass  # thrown out
    return answer


def test_a_stranger_hears_nothing_and_is_not_heard(net, tmp_path):
    learner, sampler = pair(tmp_path)
    server = net.server(learner)
    # They know the key that signs messages: what keeps them out here is CURVE alone.
    good = seal(KEY, make_hello(7, "run", SETTINGS))
    context = zmq.Context()
    sockets = {}
    try:
        for name, curve in strangers(learner, sampler).items():
            for kind in (zmq.DEALER, zmq.REQ):
                s = context.socket(kind)
                s.setsockopt(zmq.LINGER, 0)
                if curve is not None:
                    keys.secure(s, curve)
                s.connect(f"tcp://127.0.0.1:{net.port}")
                s.send(good)
                sockets[name, kind] = s
        # libzmq's own greeting, which names the mechanism, and then the end
        assert len(answer_to_a_plain_greeting(net.port)) <= 64
        time.sleep(1.5)  # a heartbeat of the learner
        assert {name: s.poll(0) for name, s in sockets.items()} == dict.fromkeys(sockets, 0)
        assert server.heard == ()
        assert server.invalid["key not let in"] >= 2
        assert net.client(sampler).wait_grant(1)[0] == 1  # a holder still gets in
    finally:
        for s in sockets.values():
            s.close()
        context.term()


def test_with_the_doorkeeper_gone_the_test_above_would_see_it(net, tmp_path, monkeypatch):
    monkeypatch.setattr(keys.Doorkeeper, "__init__", lambda self, context, allowed: setattr(
        self, "socket", context.socket(zmq.REP)))  # fmt: skip
    learner, sampler = pair(tmp_path)
    server = net.server(learner)
    curve = strangers(learner, sampler)["the learner's public key and a pair of its own"]
    assert net.client(curve).wait_grant(1)[0] == 1
    assert "Hello" in server.heard


def test_the_doorkeeper_ends_with_its_socket(net, tmp_path):
    learner, sampler = pair(tmp_path)
    before = threading.active_count()
    server = net.server(learner)
    assert threading.active_count() == before + 1  # no thread of its own
    port = net.port
    server.close(finished=False, reason="over")
    assert server._doorkeeper.socket.closed
    assert server._context.closed
    assert threading.active_count() == before
    net.server(learner, port=port)
    assert net.client(sampler).wait_grant(1)[0] == 1


@pytest.mark.parametrize("who", ["learner", "sampler", "neither's"])
def test_a_sampler_that_waits_because_keys_are_missing_says_so(
    net, tmp_path, who, caplog, monkeypatch
):
    monkeypatch.setattr("splitgrpo.client.SAY_EVERY_S", 0.5)
    caplog.set_level(logging.INFO)
    learner, sampler = pair(tmp_path)
    other = pair(tmp_path / "other")[1]
    net.server(None if who == "sampler" else learner)
    client = net.client({"learner": None, "sampler": sampler, "neither's": other}[who], wait_timeout_s=1.5)  # fmt: skip
    with pytest.raises(
        PeerTimeout, match=r"no sign of life.*give both workers the --curve_key files"
    ):
        client.wait_grant(1)
    assert any(
        "--curve_key" in r.getMessage() for r in caplog.records if "waiting" in r.getMessage()
    )


def test_a_sampler_whose_handshake_succeeds_later_says_nothing_of_keys_any_more(net, tmp_path):
    learner, sampler = pair(tmp_path)
    server = net.server(None)
    client = net.client(sampler)
    deadline = time.monotonic() + 5
    while not client.handshake_error and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "--curve_key" in client.handshake_error
    server.close(finished=False, reason="restarted with keys")
    net.server(learner, port=net.port)
    assert client.wait_grant(1)[0] == 1
    assert client.handshake_error == ""


class Tap:
    """A relay between two ports that keeps every byte."""

    def __init__(self, to_port: int) -> None:
        self.seen = bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.to_port = to_port
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                a, _ = self.listener.accept()
                b = socket.create_connection(("127.0.0.1", self.to_port))
            except OSError:
                return
            for source, sink in ((a, b), (b, a)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.mark.parametrize("encrypted", [True, False])
def test_nobody_on_the_way_can_read_what_is_sent_with_keys(net, tmp_path, make_group, encrypted):
    learner, sampler = pair(tmp_path) if encrypted else (None, None)
    server = net.server(learner)
    tap = Tap(net.port)
    try:
        client = net.client(sampler, port=tap.port)
        client.wait_grant(1)
        secret = "a secret " * 9
        server.expect(0, secret)
        client.send(dataclasses.replace(make_group(), adapter_digest=secret))
        assert server.take(1, 0, 5.0) is not None
    finally:
        tap.listener.close()
    assert (b"a secret " in tap.seen) is not encrypted
    assert (b"group_size" in tap.seen) is not encrypted

"""Credit, acknowledgement, refusals and reconnects, with real sockets on loopback."""

import logging
import socket
import threading
import time

import msgspec
import pytest
import zmq

from splitgrpo import SCHEMA_VERSION
from splitgrpo.admission import ServerPlan
from splitgrpo.client import GroupClient, RunFinished, make_hello
from splitgrpo.config import PeerTimeout, SettingsError
from splitgrpo.server import GroupServer
from splitgrpo.transport import make_key, read_key
from splitgrpo.wire import Bye, pack_group, seal
from splitgrpo.zero import free_port

KEY = b"k" * 32
LOG = logging.getLogger("test")
DIGEST = "ab" * 32  # of the groups that make_group makes
SETTINGS = {"group_size": "4", "temperature": "1.0"}


class Net:
    """Makes servers and clients on one port and closes them."""

    def __init__(self):
        self.port_number, self.opened = free_port(), []

    def server(self, key=KEY, **fields):
        plan = {"run_id": "run", "lineage": 1, "settings": SETTINGS, "groups_per_step": 2,
                "max_staleness": 1, "max_steps": 100,
                "start_version": 0, "cursor": {}, "peer_timeout_s": 60.0, "check_group": lambda g: None,
                "old_digests": {0: DIGEST}}  # fmt: skip
        server = GroupServer("127.0.0.1", self.port_number, key, ServerPlan(**(plan | fields)), LOG)
        self.opened.append(lambda: server.close(finished=False, reason="test over"))
        return server

    def client(self, key=KEY, settings=SETTINGS, run_id="run", sampler_id=0, wait_timeout_s=8.0):
        client = GroupClient(
            ("127.0.0.1", self.port_number), key, make_hello(sampler_id, run_id, settings),
            wait_timeout_s=wait_timeout_s, check_stop=lambda: None, log=LOG,
        )  # fmt: skip
        self.opened.append(lambda: client.close("test over"))
        return client

    def close(self):
        for close in reversed(self.opened):
            close()


@pytest.fixture
def net():
    made = Net()
    yield made
    made.close()


def wait_until(true, what, timeout_s=8.0):
    """Wait, bounded, until `true()` is."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.01)


def drain(server, client):
    """Wait until the learner has all that a sampler sent."""
    mine = client.hello.sampler_id
    wait_until(lambda: server.next_seq.get(mine) == client.next_seq, "all groups arrived")


def seqs(taken):
    return [t.group.seq for t in taken]


def send(client, make_group, num, version=0, lineage=1):
    from splitgrpo.wire import settings_hash

    assert client._settings_hash == settings_hash(client.hello.settings)
    for _ in range(num):
        group = make_group(
            seq=client.next_seq,
            version=version,
            lineage=lineage,
            sampler_id=client.hello.sampler_id,
        )
        assert client.send(group)


def test_groups_arrive_in_order_and_are_kept_until_a_checkpoint_holds_their_fate(net, make_group):
    server, client = net.server(), net.client()
    assert client.wait_grant(4) == (4, (1, 0))
    send(client, make_group, 4)
    first = server.take(2, 0, 5.0)
    server.commit(server.cursor())
    wait_until(lambda: len(client._kept) == 2, "the two trained groups are forgotten")
    assert seqs(first) + seqs(server.take(2, 0, 5.0)) == [0, 1, 2, 3]
    assert [header.seq for header, _ in client._kept] == [2, 3]
    server.commit(server.cursor())
    wait_until(lambda: not client._kept, "the other two are forgotten")


def test_credit_bounds_what_is_accepted_and_rises_with_the_version(net, make_group):
    server, client = net.server(max_staleness=1, groups_per_step=2), net.client()
    assert client.wait_grant(100) == (4, (1, 0))  # (K + 1 + v) * B = 2 * 2
    send(client, make_group, 4)
    drain(server, client)
    granted = []
    waiter = threading.Thread(target=lambda: granted.append(client.wait_grant(100)))
    waiter.start()
    time.sleep(0.5)
    assert not granted
    server.take(2, 0, 1.0)
    time.sleep(0.3)
    assert not granted  # taking is not publishing
    server.set_version(1, DIGEST)
    waiter.join(5)
    assert granted == [(2, (1, 1))]


def test_no_group_is_granted_that_the_last_step_has_no_use_for(net, make_group):
    server, client = net.server(max_steps=2, max_staleness=4), net.client(wait_timeout_s=2.0)
    assert client.wait_grant(100) == (4, (1, 0))
    send(client, make_group, 4)
    server.set_version(1, DIGEST)
    with pytest.raises(PeerTimeout):
        client.wait_grant(1)


def test_on_policy_grants_no_more_than_one_step(net):
    net.server(max_staleness=0, groups_per_step=3)
    assert net.client().wait_grant(100) == (3, (1, 0))


def test_a_group_above_the_staleness_bound_is_dropped_whole_and_its_place_granted_again(
    net, make_group
):
    server, client = net.server(), net.client()
    client.wait_grant(4)
    send(client, make_group, 4, version=0)
    drain(server, client)
    assert server.take(2, 2, 0.2) is None
    assert server.dropped["stale"] == 4
    assert client.wait_grant(4) == (4, (1, 0))


def test_a_stale_group_gives_its_place_back_while_a_step_is_waited_for(net, make_group):
    """Though the learner's main thread is not woken for groups that do not make up a step."""
    server, client = net.server(), net.client()
    client.wait_grant(4)
    server.set_version(2, DIGEST)
    waiter = threading.Thread(target=lambda: server.take(3, 2, 6.0))
    waiter.start()
    wait_until(lambda: server._awaited == 3, "it waits for three")
    send(client, make_group, 1, version=2)
    drain(server, client)
    assert not server.has_news()
    send(client, make_group, 1, version=0)
    line = server._queue
    wait_until(lambda: (len(line._items), line.num_groups) == (2, 1), "one is stale", timeout_s=3.0)
    assert server.credit.accepted == 1
    send(client, make_group, 2, version=2)
    waiter.join(3.0)
    assert not waiter.is_alive()


def test_what_would_not_go_out_goes_out_before_the_next_tick(net, monkeypatch):
    class Stuffed(GroupClient):
        refused = 0

        def _flush(self):  # as where the peer reads slowly
            if self._outbox and self.refused < 5:
                self.refused += 1
                return
            super()._flush()

    monkeypatch.setattr("splitgrpo.transport.HEARTBEAT_S", 30.0)
    monkeypatch.setattr("test_transport.GroupClient", Stuffed)
    net.server()
    client = net.client(wait_timeout_s=5.0)
    assert client.wait_grant(1)[0] == 1
    assert client.refused == 5


def test_a_sampler_with_other_settings_is_refused_naming_both_values(net):
    net.server()
    client = net.client(settings=SETTINGS | {"temperature": "0.7"})
    with pytest.raises(SettingsError, match=r"--temperature: learner 1\.0, sampler 0\.7"):
        client.wait_grant(1)


def test_a_sampler_of_another_run_is_refused(net):
    net.server()
    with pytest.raises(SettingsError, match="run id: learner run, sampler other"):
        net.client(run_id="other").wait_grant(1)


def test_a_wrong_key_is_never_answered_and_is_counted(net):
    server = net.server()
    with pytest.raises(PeerTimeout, match="no sign of life"):
        net.client(key=b"x" * 32, wait_timeout_s=2.5).wait_grant(1)
    assert sum(server.invalid.values()) >= 2


def test_a_second_sampler_with_the_same_id_is_refused_while_the_first_lives(net, monkeypatch):
    monkeypatch.setattr("splitgrpo.client.REFUSED_FOR_S", 1.5)
    net.server()
    net.client().wait_grant(1)
    with pytest.raises(SettingsError, match="sampler_id 0 is in use"):
        net.client().wait_grant(1)


def test_a_restarted_sampler_goes_on_where_the_dead_one_stopped(net, make_group):
    server = net.server()
    first = net.client()
    first.wait_grant(4)
    send(first, make_group, 3)
    drain(server, first)
    first.stop()  # no goodbye, as after kill -9; one grant is lost with it
    second = net.client()
    assert second.wait_grant(4) == (1, (1, 0))
    assert second.next_seq == 3
    assert server.take(2, 0, 1.0) is not None


@pytest.mark.parametrize("killed", [True, False])
def test_the_credit_of_a_sampler_that_died_or_hangs_goes_to_the_others(net, monkeypatch, killed):
    monkeypatch.setattr("splitgrpo.server.SILENT_S", 2.0 if killed else 60.0)
    net.server(peer_timeout_s=60.0 if killed else 2.0)
    gone = net.client(sampler_id=1)
    assert gone.wait_grant(4) == (4, (1, 0))  # all there is
    if killed:
        gone.stop()  # else its socket thread goes on to beat, and its main thread does nothing
    assert net.client().wait_grant(4) == (4, (1, 0))


def test_a_sampler_that_was_taken_for_dead_comes_back(net, make_group, monkeypatch):
    monkeypatch.setattr("splitgrpo.server.SILENT_S", 0.0)  # forgotten at every tick
    server, client = net.server(), net.client()
    client.wait_grant(2)
    send(client, make_group, 2)
    drain(server, client)
    monkeypatch.setattr("splitgrpo.server.SILENT_S", 15.0)
    assert client.wait_grant(2) == (2, (1, 0))
    assert client.next_seq == server.next_seq[0] == 2


def test_a_sampler_survives_a_learner_that_restarts_on_the_same_port(net, make_group):
    server, client = net.server(), net.client()
    client.wait_grant(4)
    send(client, make_group, 4)
    drain(server, client)
    server.stop()
    send(client, make_group, 1)  # nobody hears it
    again = net.server(
        cursor={0: 2}, lineage=2, start_version=1, old_digests={0: DIGEST, 1: DIGEST}
    )
    assert client.wait_grant(4) == (1, (2, 1))  # there is room for 4, and 3 are on their way
    assert client.next_seq == 5  # groups 2 to 4 were kept
    assert seqs(again.take(2, 1, 5.0)) == [2, 3]
    send(client, make_group, 1, version=1, lineage=2)
    assert seqs(again.take(2, 1, 5.0)) == [4, 5]


def test_a_sampler_of_another_version_of_the_record_is_refused_naming_both(net, monkeypatch):
    monkeypatch.setattr("splitgrpo.client.SCHEMA_VERSION", SCHEMA_VERSION - 1)
    net.server()
    client = net.client()
    wanted = f"record schema: learner {SCHEMA_VERSION}, sampler {SCHEMA_VERSION - 1}"
    with pytest.raises(SettingsError, match=wanted):
        client.wait_grant(1)


def check_foreign(server, client):
    """The one group that was sent is dropped, when the line passes over it."""
    drain(server, client)
    assert server.dropped["foreign"] == 0
    assert server.take(1, server.version, 0.0) is None
    assert server.dropped == {"foreign": 1}
    (fate,) = server.take_fates()
    assert (fate.sampler_id, fate.first, fate.last, fate.reason) == (0, 0, 0, "foreign")


def test_weights_that_were_rolled_back_are_told_from_new_ones(net, make_group):
    server, client = net.server(lineage=2, start_version=0), net.client()
    server.set_version(1, DIGEST)
    client.wait_grant(2)
    client._usable = lambda header: True  # it would not send them itself
    send(client, make_group, 1, version=1, lineage=1)
    check_foreign(server, client)


def test_a_group_whose_adapter_did_not_outlive_a_restart_is_dropped(net, make_group):
    """Its mismatch could not be measured."""
    plan = {"lineage": 2, "start_version": 4, "max_staleness": 3, "old_digests": {2: DIGEST}}
    server, client = net.server(**plan), net.client()
    server.set_version(4, DIGEST)
    client.wait_grant(2)
    send(client, make_group, 1, version=3, lineage=1)
    check_foreign(server, client)
    send(client, make_group, 1, version=2, lineage=1)
    assert server.take(1, 4, 5.0) is not None


def test_a_group_of_another_version_of_the_record_is_dropped(net, make_group):
    server, client = net.server(), net.client()
    client.wait_grant(1)
    header, blob = pack_group(make_group(), client.hello.session, client._settings_hash)
    old = msgspec.structs.replace(header, schema_version=SCHEMA_VERSION - 1)
    assert client._send(old, blob)
    check_foreign(server, client)


def test_a_group_from_a_version_that_was_never_published_is_dropped(net, make_group):
    server, client = net.server(), net.client()
    client.wait_grant(1)
    send(client, make_group, 1, version=5)
    check_foreign(server, client)


def test_a_sampler_that_is_faster_than_the_learner_after_a_publish_loses_nothing(net, make_group):
    """It may read the pointer and send before the learner has said to itself that the version is out."""
    server, client = net.server(), net.client()
    client.wait_grant(1)
    server.expect(1, DIGEST)
    send(client, make_group, 1, version=1)
    assert seqs(server.take(1, 1, 5.0)) == [0]
    server.expect(2, "cd" * 32)
    client.wait_grant(1)
    send(client, make_group, 1, version=2)  # of another adapter than that one
    drain(server, client)
    assert server.take(1, 2, 0.0) is None
    assert server.dropped == {"foreign": 1}


def test_a_group_sampled_with_another_adapter_than_its_version_names_is_dropped(net, make_group):
    server, client = net.server(), net.client()
    server.set_version(1, "cd" * 32)
    client.wait_grant(2)
    send(client, make_group, 1, version=1)
    check_foreign(server, client)


def test_a_finished_run_sends_its_samplers_home(net):
    server, client = net.server(groups_per_step=1, max_staleness=0), net.client()
    client.wait_grant(1)
    server.close(finished=True, reason="finished")
    with pytest.raises(RunFinished):
        client.wait_grant(1)


def test_the_goodbye_of_a_learner_before_this_one_says_nothing(net):
    server, client = net.server(), net.client()
    client.wait_grant(1)
    bye = Bye(sampler_id=0, session="of yesterday", finished=True, reason="finished")
    with server.lock:
        server.post(server.peers[0].identity, bye)
    assert client.wait_grant(1)[0] == 1


def test_weights_of_a_version_that_another_lineage_took_back_are_refused_by_their_digest(
    net, make_group
):
    """Version 3 was published by two learners; the second one's is the run's."""
    plan = {"lineage": 3, "start_version": 5, "max_staleness": 3}
    server, client = net.server(**plan, old_digests={3: "cd" * 32, 4: DIGEST}), net.client()
    client.wait_grant(2)
    send(client, make_group, 1, version=3, lineage=1)
    check_foreign(server, client)


def test_a_version_between_two_published_ones_is_refused(net, make_group):
    server, client = net.server(max_staleness=3), net.client()
    server.set_version(2, DIGEST)
    client.wait_grant(2)
    send(client, make_group, 1, version=1)
    check_foreign(server, client)


def test_a_taken_port_is_named_with_who_holds_it(net):
    net.server()
    with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{net.port_number}.*held by process"):
        net.server()


def test_strangers_on_the_port_do_not_disturb_a_run(net, make_group):
    server, client = net.server(), net.client()
    client.wait_grant(2)
    for noise in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 20,
        b"\x16\x03\x01\x02\x00" * 99,
    ):
        with socket.create_connection(("127.0.0.1", net.port_number), timeout=2) as raw:
            raw.sendall(noise)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 500)
    dealer.connect(f"tcp://127.0.0.1:{net.port_number}")
    for frames in (
        [b"x"],
        [b"a", b"b"],
        [b""],
        [b"SGR1" + b"y" * 99],
        [seal(b"z" * 32, client.hello)],
    ):
        dealer.send_multipart(frames)
    send(client, make_group, 2)
    drain(server, client)
    assert server.take(2, 0, 5.0) is not None
    deadline = time.monotonic() + 5
    while sum(server.invalid.values()) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(server.invalid.values()) >= 5
    dealer.close()
    context.term()


def test_a_learner_whose_main_thread_hangs_is_given_up_although_its_socket_lives(net, make_group):
    net.server(groups_per_step=1, max_staleness=0)  # nobody calls take: its progress never rises
    client = net.client(wait_timeout_s=3.0)
    client.wait_grant(1)
    send(client, make_group, 1)
    with pytest.raises(PeerTimeout, match="no sign of life"):
        client.wait_grant(1)


def test_the_key_is_made_for_its_owner_alone_and_refused_when_others_can_read_it(tmp_path):
    path = tmp_path / "run.key"
    key = make_key(path)
    assert len(key) == 32
    assert read_key(path) == key
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("not hex")
    with pytest.raises(SettingsError, match="not a key"):
        read_key(path)

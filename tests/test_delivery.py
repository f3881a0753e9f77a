"""Every group has one fate: the line of arrivals, what is lost and comes again, and the books that are audited."""

import collections
import contextlib
import json
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transport import DIGEST, KEY, LOG, Net, drain, send, seqs, wait_until

from splitgrpo.adapters import Publisher
from splitgrpo.arrivals import REASONS, Dropped, GroupQueue, Trained
from splitgrpo.checkpoints import needed_versions
from splitgrpo.feed import Feed
from splitgrpo.files import append_line, read_lines, write_lines
from splitgrpo.learner import Learner
from splitgrpo.ledger import AuditError, Ledger, audit, lineages, main
from splitgrpo.pointer import order
from splitgrpo.process import Stopped
from splitgrpo.wire import Grant, GroupDropped, GroupHeader, Request, pack_group, seal


def group(sampler_id, seq, version=0):
    """As much of a group as a line and a ledger look at."""
    return SimpleNamespace(
        sampler_id=sampler_id, seq=seq, policy_version=version, group_id=f"{sampler_id}:{seq}"
    )


# ---- the line -----------------------------------------------------------------------------------------------------


class Model:
    """The line again, written for clarity alone: all that ever arrived, and how many of them have a fate."""

    def __init__(self):
        self.arrived = []  # [sampler, seq, version, reason or None]
        self.decided = 0

    def arrive(self, sampler_id, version, reason):
        seq = sum(item[0] == sampler_id for item in self.arrived)
        self.arrived.append([sampler_id, seq, version, reason])
        return seq

    def give_up(self, unwanted, reason):
        for item in self.arrived[self.decided :]:
            if item[3] is None and unwanted(item[2]):
                item[3] = reason

    def take(self, num):
        waiting = self.arrived[self.decided :]
        num = num if sum(item[3] is None for item in waiting) >= num else 0
        passed, taken = [], []
        for item in waiting:
            if item[3] is None:
                if len(taken) == num:
                    break
                taken.append((item[0], item[1]))
            passed.append(item)
        self.decided += len(passed)
        return taken, [(item[0], item[1], item[3]) for item in passed if item[3] is not None]

    def cursor(self):
        return {i: sum(d[0] == i for d in self.arrived[: self.decided]) for i in range(3)}


def spread(fates):
    return [(f.sampler_id, seq, f.reason) for f in fates for seq in range(f.first, f.last + 1)]


ACTIONS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 2), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 2), st.sampled_from(REASONS[:5])),
    st.tuples(st.just("expire"), st.integers(0, 6), st.none()),
    st.tuples(st.just("take"), st.integers(0, 4), st.none()),
)


@given(st.lists(ACTIONS, max_size=60))
@settings(max_examples=400, deadline=None)
def test_whatever_arrives_and_is_taken_each_group_has_one_fate_and_the_cursor_divides_them(actions):
    line, model = GroupQueue({}), Model()
    fates, expected = collections.Counter(), collections.Counter()

    def compare(taken, wanted):
        got, dropped = wanted
        assert [(t.group.sampler_id, t.group.seq) for t in taken] == got  # in order of arrival
        told = spread(line.take_fates())
        assert sorted(told) == sorted(dropped)
        for i in range(3):  # of one sampler in order as well
            assert [t for t in told if t[0] == i] == [d for d in dropped if d[0] == i]
        fates.update([(g.sampler_id, g.seq) for g in (t.group for t in taken)])
        fates.update([(i, seq) for i, seq, _ in told])
        expected.update(reason for *_, reason in dropped)
        assert line.dropped == expected
        assert {i: line.cursor.get(i, 0) for i in range(3)} == model.cursor()

    for action, number, value in [*actions, ("finish", 0, None)]:
        if action == "put":
            line.put(group(number, model.arrive(number, value, None), value), b"")
        elif action == "drop":
            line.drop(number, model.arrive(number, 0, value), value)
        elif action == "expire":
            before = sum(item[3] is None for item in model.arrived[model.decided :])
            model.give_up(lambda version: version < number, "stale")  # noqa: B023 - called at once
            after = sum(item[3] is None for item in model.arrived[model.decided :])
            assert line.expire(number) == before - after
        elif action == "take":
            wanted = model.take(number)
            taken = line.take(number)
            assert (taken is None) == (len(wanted[0]) < number)
            compare(taken or [], wanted)
        else:
            model.give_up(lambda version: True, "unused")
            line.finish()
            compare([], model.take(0))
    assert fates == {(i, seq): 1 for i, seq, *_ in model.arrived}


@pytest.mark.parametrize(("samplers", "num"), [(1, 1_000_000), (8, 100_000)])
def test_endless_filtering_keeps_the_line_and_its_books_short(samplers, num):
    line = GroupQueue({})
    line.put(group(0, 0), b"")
    for i in range(num):
        line.drop(i % samplers, i // samplers + (i % samplers == 0), "filtered")
    assert len(line._items) == 1 + samplers
    assert seqs(line.take(1)) == [0]
    fates = line.take_fates()
    assert len(fates) == samplers
    assert sum(f.count for f in fates) == line.dropped["filtered"] == num
    assert sum(line.cursor.values()) == num + 1


# ---- on the line between two processes ------------------------------------------------------------------------------


@pytest.fixture
def net():
    made = Net()
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch):
    """What takes a second takes a twentieth."""
    monkeypatch.setattr("splitgrpo.transport.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("splitgrpo.server.ASK_AGAIN_S", 0.02)


def lose(side, lost):
    """Let a worker's messages that `lost` says True of vanish after it believes them sent; returns their list."""
    post, gone = side.post, []

    def post_some(identity, header, blob=b""):
        if lost(header):
            gone.append(header)
        else:
            post(identity, header, blob)

    side.post = post_some
    return gone


def only_first(kind):
    seen = []

    def first(header):
        if isinstance(header, kind) and not seen:
            seen.append(header)
            return True
        return False

    return first


def test_what_a_sampler_does_not_send_is_counted_by_its_reason_when_a_step_passes_over_it(
    net, make_group
):
    server, client = net.server(), net.client()
    client.wait_grant(4)
    assert client.drop(0, (1, 0), "reward")
    send(client, make_group, 1)
    assert client.drop(2, (1, 0), "filtered")
    assert client.drop(3, (1, 0), "filtered")
    assert client.wait_grant(4)[0] == 3  # three places are free again
    send(client, make_group, 1)
    drain(server, client)
    assert not server.dropped
    assert seqs(server.take(2, 0, 5.0)) == [1, 4]
    assert server.dropped == {"reward": 1, "filtered": 2}
    assert server.take_fates() == [Dropped(0, 0, 0, "reward"), Dropped(0, 2, 3, "filtered")]
    assert server.cursor() == {0: 5}


@pytest.mark.parametrize("kind", [GroupHeader, GroupDropped])
def test_a_group_lost_on_the_way_comes_again_though_none_follows_it(net, make_group, quick, kind):
    server, client = net.server(), net.client()
    client.wait_grant(2)
    gone = lose(client, only_first(kind))
    send(client, make_group, 1)
    client.drop(1, (1, 0), "reward")
    drain(server, client)
    assert len(gone) == 1
    assert client.resent >= 1
    assert seqs(server.take(1, 0, 5.0)) == [0]
    assert server.cursor() == {0: 2}


@pytest.mark.parametrize(("side", "kind"), [("client", Request), ("server", Grant)])
def test_credit_that_is_lost_on_the_way_is_asked_for_again(net, make_group, quick, side, kind):
    server, client = net.server(), net.client(wait_timeout_s=5.0)
    gone = lose({"server": server, "client": client}[side], only_first(kind))
    assert client.wait_grant(4) == (4, (1, 0))
    assert len(gone) == 1
    send(client, make_group, 4)
    drain(server, client)
    server.take(4, 0, 5.0)
    server.set_version(1, DIGEST)
    assert client.wait_grant(4) == (2, (1, 1))


def test_credit_that_was_asked_for_twice_is_not_lost(net, make_group, quick):
    server, client = net.server(), net.client(wait_timeout_s=5.0)
    client.wait_grant(4)
    for version in range(1, 6):
        send(client, make_group, 2, version=version - 1)
        drain(server, client)
        assert len(server.take(2, version - 1, 5.0)) == 2
        server.set_version(version, DIGEST)
        with client.lock:
            client._wanted = 4  # as when the learner's welcome crosses its grant
            client._request()
            client._request()
        num = client.wait_grant(4)[0]
        wait_until(lambda: server.peers[0].outstanding == num, "no more than it was told")  # noqa: B023


@contextlib.contextmanager
def at_work(clients, work):
    """Each sampler on a thread: it asks for two groups and does `work(client, num, version)`, again and again."""
    ended, errors = threading.Event(), []

    def check_stop():
        if ended.is_set():
            raise Stopped

    def go(client):
        client._check_stop = check_stop
        try:
            while True:
                num, (_, version) = client.wait_grant(2)
                work(client, num, version)
        except Stopped:
            pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=go, args=(c,), daemon=True) for c in clients]
    for thread in threads:
        thread.start()
    yield errors
    ended.set()
    for thread in threads:
        thread.join(5)
    assert not errors


@pytest.mark.parametrize("seed", range(3))
def test_on_a_line_that_loses_every_sixth_message_each_group_arrives_once(
    net, make_group, quick, seed
):
    rng, num_steps = random.Random(seed), 30
    server = net.server(max_steps=num_steps)
    clients = [net.client(sampler_id=i, wait_timeout_s=15.0) for i in range(2)]
    gone = [lose(side, lambda header: rng.random() < 1 / 6) for side in (server, *clients)]

    def work(client, num, version):
        for _ in range(num):
            if client.next_seq % 5 == 3:
                client.drop(client.next_seq, (1, version), "reward")
            else:
                send(client, make_group, 1, version=version)

    trained, fates = [], []
    with at_work(clients, work) as errors:
        for step in range(num_steps):
            taken = server.take(2, step, 10.0)
            assert taken is not None, (step, server.describe(), errors)
            trained += [(t.group.sampler_id, t.group.seq) for t in taken]
            fates += spread(server.take_fates())
            server.set_version(step + 1, DIGEST)
            server.commit(server.cursor())
    assert sum(map(len, gone)) > 20
    known = sorted(trained + [(i, seq) for i, seq, _ in fates])
    assert known == [(i, seq) for i, end in sorted(server.cursor().items()) for seq in range(end)]
    assert all(seq % 5 == 3 for _, seq, reason in fates if reason != "stale")
    assert sum(reason == "stale" for *_, reason in fates) < 30  # those that came again too late
    assert not any(seq % 5 == 3 for _, seq in trained)
    assert server.lost == 0


def test_a_sampler_keeps_no_more_than_what_no_checkpoint_holds(net, make_group):
    server, client = net.server(), net.client()
    most = 0
    for step in range(40):
        num, (_, version) = client.wait_grant(4)
        send(client, make_group, num, version=version)
        most = max(most, len(client._kept))
        server.take(2, step, 5.0)
        server.set_version(step + 1, DIGEST)
        if step % 4 == 3:
            server.commit(server.cursor())
    assert most <= 4 * 2 + 4 * 2  # four steps to a checkpoint, and what is in line or under way
    assert client.next_seq >= 80


# ---- a learner that comes back ------------------------------------------------------------------------------------


def test_the_versions_that_kept_groups_are_of_stay_on_the_disk_as_long_as_their_checkpoint(
    tmp_path,
):
    """Or a learner that goes on from it, many steps back, would get groups again that it cannot measure."""
    for name in (
        "checkpoints/step_000000",
        "checkpoints/step_000010",
        "checkpoints/aside_step_000005",
    ):
        (tmp_path / name).mkdir(parents=True)
    for version in range(20):
        (tmp_path / "adapters" / f"v{version:06d}.L1").mkdir(parents=True)
    needed = needed_versions(tmp_path, max_staleness=2)
    publisher = Publisher(
        tmp_path, "run", 1, "model", "digest", "float32", None, keep=3, needed=needed
    )
    publisher.remove_old("v000019.L1")
    left = sorted(order(path.name)[1] for path in (tmp_path / "adapters").iterdir())
    assert left == [0, 8, 9, 10, 17, 18, 19]


def payloads(taken):
    return {(t.group.sampler_id, t.group.seq): t.payload for t in taken}


def test_a_learner_that_comes_back_gets_the_same_bytes_again_and_what_it_rolled_back_is_made_anew(
    net, make_group
):
    server, client = net.server(max_staleness=3), net.client()
    seen = {}
    client.wait_grant(8)
    for version in range(3):  # two groups by each of versions 0, 1, 2
        send(client, make_group, 2, version=version)
        drain(server, client)
        seen |= payloads(server.take(2, version, 5.0))
        server.set_version(version + 1, DIGEST)
    assert client.drop(6, (1, 2), "reward")
    drain(server, client)
    server.stop()  # no goodbye; its last checkpoint is of step 1
    kept = {0: DIGEST, 1: DIGEST}
    again = net.server(max_staleness=3, cursor={0: 2}, lineage=2, start_version=1, old_digests=kept)
    client.wait_grant(8)
    assert client.next_seq == 4
    assert [header.seq for header, _ in client._kept] == [2, 3]
    assert client.discarded == 3  # 4, 5 and 6 came from version 2, of weights that are gone
    wait_until(lambda: again.lost == 3, "the learner counts them")
    assert not client.send(make_group(seq=6, version=2))  # one of the round under way
    assert not client.send(make_group(seq=4, version=2))  # its place, but the old weights
    send(client, make_group, 4, version=1, lineage=2)
    taken = again.take(2, 1, 5.0) + again.take(2, 1, 5.0) + again.take(2, 1, 5.0)
    assert seqs(taken) == [2, 3, 4, 5, 6, 7]  # nothing twice, nothing left out
    told = payloads(taken)
    assert all(told[0, seq] == seen[0, seq] for seq in (2, 3))
    assert told[0, 4] != seen[0, 4]
    assert not again.dropped


def come_late(net, make_group):
    """A learner restarts, and one sampler takes all its credit before another's four kept groups come."""
    server, late = net.server(), net.client(sampler_id=1)
    late.wait_grant(4)
    send(late, make_group, 4)
    drain(server, late)
    server.stop()
    held = [True]
    lose(late, lambda header: held[0])
    again, early = net.server(lineage=2), net.client(sampler_id=0)
    assert early.wait_grant(4) == (4, (2, 0))  # all there is
    held[0] = False
    wait_until(lambda: 1 in again.peers and again.peers[1].waiting, "its groups find no room")
    return again, early, late


def test_groups_without_credit_are_not_dropped_but_come_when_there_is_room(net, make_group, quick):
    again, early, late = come_late(net, make_group)
    send(early, make_group, 4, lineage=2)
    order = []
    for step in range(4):
        taken = again.take(2, 0, 5.0)  # as if no version passed, so that none is too old
        order += [(t.group.sampler_id, t.group.seq) for t in taken]
        again.set_version(step + 1, DIGEST)
    assert order == [(0, i) for i in range(4)] + [(1, i) for i in range(4)]
    assert late.next_seq == 4
    assert not again.dropped


def test_groups_that_wait_for_room_are_not_passed_over_for_samplers_that_ask_again_and_again(
    net, make_group, quick
):
    again, hungry, _ = come_late(net, make_group)
    send(hungry, make_group, 4, lineage=2)

    def work(client, num, version):
        send(client, make_group, num, version=version, lineage=2)

    order = []
    with at_work([hungry], work):
        for step in range(6):
            wait_until(lambda: again.peers[0].wanted, "it asks before there is room")
            order += [t.group.sampler_id for t in again.take(2, 0, 5.0)]
            again.set_version(step + 1, DIGEST)
    assert order.count(1) == 4, order


def test_scarce_credit_is_shared_fairly_among_eight_samplers_that_always_ask(net, make_group):
    server = net.server(max_staleness=0, max_steps=10_000)
    clients = [net.client(sampler_id=i, wait_timeout_s=20.0) for i in range(8)]
    made = [make_group(sampler_id=i) for i in range(8)]
    rounds: collections.Counter[int] = collections.Counter()

    def work(client, num, version):
        mine = client.hello.sampler_id
        rounds[mine] += 1
        for _ in range(num):
            client.send(replace(made[mine], seq=client.next_seq, policy_version=version))

    with at_work(clients, work):
        wait_until(lambda: sum(p.wanted > 0 for p in server.peers.values()) >= 7, "all have asked")
        for step in range(800):
            assert server.take(2, step, 10.0) is not None
            server.set_version(step + 1, DIGEST)
    shares = [rounds[i] for i in range(8)]
    assert sum(shares) >= 800
    assert max(shares) - min(shares) <= 2, shares  # each within one round of the others' mean


# ---- the books ----------------------------------------------------------------------------------------------------


def keep_books(run_dir, steps=6):
    """A run of `steps` steps of two groups of sampler 0 and one of sampler 1, killed at step 4, resumed from 3."""
    run_dir.mkdir(exist_ok=True)
    dropped: collections.Counter[str] = collections.Counter()

    def take(ledger, step):
        trained = [group(0, 3 * step - 3), group(0, 3 * step - 2), group(1, step - 1)]
        fates = [Dropped(0, 3 * step - 4, 3 * step - 4, "filtered")] if step > 1 else []
        dropped.update(f.reason for f in fates)
        ledger.note(step, [Trained(g, b"") for g in trained], fates, lost=step)
        ledger.write()
        row = {
            "step": step,
            "loss": 0.5,
            "dropped_filtered": dropped["filtered"],
            "dropped_stale": 0,
        }
        append_line(run_dir / "metrics.jsonl", row)

    first = Ledger(run_dir, 1, None)
    for step in range(1, 5):
        take(first, step)
    with first.path.open("a") as file:
        file.write('{"lineage": 1, "step": 5, "trai')  # killed here
    rows = read_lines(run_dir / "metrics.jsonl")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:3]))
    second = Ledger(run_dir, 2, 3)
    dropped.clear()
    dropped.update(second.dropped)
    for step in range(4, steps + 1):
        take(second, step)
    return second


def change_line(path, number, change):
    rows = read_lines(path)
    rows[number] = change(rows[number])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))


def test_the_books_of_a_run_that_was_killed_and_went_on_agree(tmp_path, capsys, monkeypatch):
    ledger = keep_books(tmp_path)
    assert ledger.undone == 3
    assert ledger.dropped == {"filtered": 2}  # of steps 1 to 3
    assert ledger.lost == 4
    lines = read_lines(ledger.path)
    assert lines[4] == {"lineage": 2, "resumed_at": 3, "undone": 3}
    assert [row.get("step") for row in lines] == [1, 2, 3, 4, None, 4, 5, 6]
    expected = {
        "steps": 6,
        "samplers": 2,
        "trained": 18,
        "dropped_filtered": 5,
        "lost": 6,
        "restarts": 1,
        "undone": 3,
    }
    assert audit(tmp_path) == expected
    with ledger.path.open("a") as file:
        file.write('{"lineage": 2, "step": 7, "tr')
    assert audit(tmp_path) == expected  # a kill cut that line short
    monkeypatch.setattr("sys.argv", ["ledger", str(tmp_path)])
    assert main() == 0
    assert capsys.readouterr().out.startswith("steps=6 samplers=2 trained=18 dropped_filtered=5")
    change_line(ledger.path, 0, lambda row: row | {"trained": []})
    assert main() == 70
    assert "2 groups of sampler 0 are in no line, first 0" in capsys.readouterr().err


LEDGER, METRICS = "ledger.jsonl", "metrics.jsonl"


@pytest.mark.parametrize(
    ("file", "number", "change", "reason"),
    [
        (LEDGER, -1, lambda row: row | {"trained": [*row["trained"], "0:4"]}, "0:4 is booked twice: trained in step 2"),
        (LEDGER, -1, lambda row: row | {"dropped": [[0, 13, 15, "stale"]]}, "booked twice"),
        (LEDGER, 1, lambda row: row | {"trained": row["trained"][1:]}, "1 groups of sampler 0 are in no line, first 3"),
        (LEDGER, 1, lambda row: row | {"dropped": []}, "1 groups of sampler 0 are in no line, first 2"),
        (LEDGER, -2, lambda row: row | {"step": 7}, "steps are not 1, 2, 3"),
        (LEDGER, 2, lambda row: row | {"step": 2}, "steps are not 1, 2, 3"),
        (LEDGER, 1, lambda row: row | {"dropped": [[0, 2, 2, "stale"]]}, "step 2: .* counts .*filtered.*the ledger .*stale"),
        (LEDGER, 4, lambda row: row | {"undone": 2}, "a restart at step 3 counts 2 groups undone, the lines before say 3"),
        (LEDGER, 3, lambda row: None, "counts 3 groups undone, the lines before say 0"),
        (METRICS, 3, lambda row: row | {"dropped_filtered": 4}, "step 4: .* counts .*4.* the ledger .*3"),
        (METRICS, 3, lambda row: row | {"dropped_stale": 1}, "step 4: .*stale"),
        (METRICS, 5, lambda row: row | {"step": 7}, "has rows of steps"),
    ],
)  # fmt: skip
def test_each_disagreement_in_the_books_is_found_and_named(tmp_path, file, number, change, reason):
    keep_books(tmp_path)
    audit(tmp_path)
    change_line(tmp_path / file, number, change)
    with pytest.raises(AuditError, match=reason):
        audit(tmp_path)


def test_a_group_that_was_trained_but_never_received_is_found_where_there_is_a_journal(tmp_path):
    keep_books(tmp_path)
    trained = {
        row["step"]: row["trained"]
        for row in read_lines(tmp_path / "ledger.jsonl")
        if "trained" in row
    }
    (tmp_path / "journal").mkdir()
    index = tmp_path / "journal" / "index.jsonl"
    for step in (1, 2, 3, 6):  # of the others it says nothing
        append_line(index, {"file": f"step_{step - 1:06d}.safetensors", "groups": trained[step]})
    audit(tmp_path)
    rows = read_lines(index)
    rows[2]["groups"], late = rows[2]["groups"][1:], rows[2]["groups"][0]
    rows[3]["groups"] += [late]
    write_lines(index, rows)
    with pytest.raises(
        AuditError, match=f"group {late} was trained in step 3, the journal has not"
    ):
        audit(tmp_path)


def test_a_step_without_its_line_and_metrics_with_a_gap_or_of_a_finished_run_cut_short_are_found(
    tmp_path,
):
    keep_books(tmp_path)
    change_line(tmp_path / METRICS, -1, lambda row: None)
    audit(tmp_path)  # killed between the two files, or in a resume before both were cut
    (tmp_path / "done.json").write_text("{}")
    with pytest.raises(AuditError, match="has rows of steps"):
        audit(tmp_path)
    (tmp_path / "done.json").unlink()
    change_line(tmp_path / METRICS, -2, lambda row: None)
    with pytest.raises(AuditError, match="has rows of steps"):
        audit(tmp_path)
    with pytest.raises(AuditError, match="is it a run folder"):
        audit(tmp_path / "nowhere")
    other = tmp_path / "other"
    keep_books(other)
    change_line(other / LEDGER, 5, lambda row: None)
    with pytest.raises(AuditError, match="in no line"):
        audit(other)
    torn = (other / LEDGER).read_bytes().splitlines(keepends=True)
    (other / LEDGER).write_bytes(b"".join([torn[0][:9] + b"\n", *torn[1:]]))
    with pytest.raises(ValueError, match=r"ledger\.jsonl, line 1"):
        audit(other)


def test_the_lineage_that_has_a_versions_weights_is_that_which_no_later_one_went_back_behind():
    rows = [{"step": 1}, {"lineage": 2, "resumed_at": 10}, {"lineage": 3, "resumed_at": 18}]
    assert lineages([], 4) == [1]
    assert [lineages(rows, v) for v in (9, 10, 11, 17, 18, 19)] == [
        [1],
        [2, 1],
        [2],
        [2],
        [3, 2],
        [3],
    ]
    rows.append({"lineage": 5, "resumed_at": 5})  # the checkpoints of 10 and 18 were damaged
    assert [lineages(rows, v) for v in (4, 5, 10, 18)] == [[1], [5, 1], [5], [5]]


def test_the_books_of_a_replay_may_lack_what_was_refused_at_the_door(tmp_path):
    ledger = Ledger(tmp_path, 1, None, replay_of="runs/mine")
    for step, seq in ((1, 0), (2, 3)):
        ledger.note(step, [Trained(group(0, seq), b"")], [], lost=0)
        ledger.write()
        append_line(tmp_path / METRICS, {"step": step})
    assert audit(tmp_path)["trained"] == 2


@pytest.mark.parametrize("line", ["[1, 2]", '{"step": 4}', "3"])
def test_a_line_that_is_no_entry_is_named(tmp_path, line):
    keep_books(tmp_path)
    with (tmp_path / LEDGER).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"ledger\.jsonl"):
        audit(tmp_path)
    with pytest.raises(ValueError, match=r"ledger\.jsonl"):
        Ledger(tmp_path, 3, 2)


def test_a_resume_from_the_last_line_undoes_nothing_and_from_step_0_undoes_all(tmp_path):
    keep_books(tmp_path)
    assert Ledger(tmp_path, 3, 6).undone == 0
    assert audit(tmp_path)["restarts"] == 2
    last = Ledger(tmp_path, 4, 0)
    assert (last.undone, dict(last.dropped)) == (18, {})
    (tmp_path / METRICS).write_text("")
    assert audit(tmp_path) == {
        "steps": 0,
        "samplers": 0,
        "trained": 0,
        "lost": 6,
        "restarts": 3,
        "undone": 21,
    }


def test_the_last_checkpoint_holds_what_was_dropped_at_the_end_so_that_a_longer_run_can_go_on():
    """Saved before, a run that is resumed with more steps would book what was dropped at its end a second time."""
    done = []
    learner = SimpleNamespace(
        step=10, max_steps=10, lineage=1, settings=SimpleNamespace(save_steps=10), publisher=None, run_dir="run",
        log=SimpleNamespace(info=lambda *_: None), server=SimpleNamespace(finish=lambda: done.append("dropped")),
        save=lambda: done.append("saved"), _book=lambda trained: None, publish=lambda done: None,
        close=lambda **_: None,
    )  # fmt: skip
    Learner.save_if_due(learner)
    Learner.finish(learner)
    assert done == ["dropped", "saved"]
    learner.max_steps = 20
    Learner.save_if_due(learner)
    assert done[2:] == ["saved"]


def test_every_rank_gets_the_groups_of_rank_0(make_group, monkeypatch):
    """Alone it has them as they were checked; another rank decodes the very bytes that came."""
    groups = [make_group(seq=i, seed=i) for i in range(3)]
    taken = [Trained(g, seal(KEY, *pack_group(g, "session", "hash"))) for g in groups]
    server = SimpleNamespace(take=lambda num, version, timeout_s: taken)
    sent = []

    def broadcast(buffer, src, group):
        sent.append(buffer.clone()) if rank.server is not None else buffer.copy_(sent[0])

    def make(server, num_ranks):
        ranks = SimpleNamespace(num_ranks=num_ranks, control=None, bump=lambda: None)
        made = Feed(ranks, server, KEY, wait_timeout_s=1.0, should_stop=lambda: False, log=LOG)
        if num_ranks > 1:
            made.agree = lambda values: agreed.append(values) or agreed[0]
        return made

    agreed: list[list[int]] = []
    monkeypatch.setattr("splitgrpo.feed.dist.broadcast", broadcast)
    assert make(server, 1).next_groups(3, 0) == groups
    assert not sent
    for own in (server, None):
        rank = make(own, 2)
        got = rank.next_groups(3, 0)
        assert (got == groups) == (own is not None)
        assert [g.group_id for g in got] == ["0:0", "0:1", "0:2"]
        for a, b in zip(got, groups, strict=True):
            np.testing.assert_array_equal(a.streams["token_ids"], b.streams["token_ids"])
    assert len(sent) == 1

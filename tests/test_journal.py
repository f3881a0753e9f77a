"""The journal gives back what was received, refuses what is damaged, and stays within its size."""

import json
import logging
import shutil

import numpy as np
import pytest

from splitgrpo.admission import ServerPlan
from splitgrpo.cli import parse_settings, recorded_settings
from splitgrpo.config import DataError, LearnerSettings, SettingsError
from splitgrpo.files import append_line
from splitgrpo.journal import (
    Journal,
    Replay,
    count_steps,
    file_name,
    forget_after,
    read_index,
    read_step,
)
from splitgrpo.wire import build_group, pack_group

LOG = logging.getLogger("test")


def journal(folder, *flags):
    settings = parse_settings(LearnerSettings, ["--journal", "--model_path", "a/b", *flags])
    return Journal(folder, settings, {"some": "config"}, 2, LOG)


def test_groups_come_back_as_received_and_in_order(tmp_path, make_group):
    groups = [make_group(seq=i, seed=i, with_ref=i > 1) for i in range(3)]
    one = journal(tmp_path)
    one.write(0, [pack_group(g, "session", "digest") for g in groups[:2]])
    one.write(1, [])
    one.write(2, [pack_group(groups[2], "session", "digest")])
    index = read_index(tmp_path / "journal")
    assert list(index) == [0, 1, 2]
    steps = [read_step(tmp_path / "journal", step, index[step]) for step in index]
    assert [fresh for fresh, _ in steps] == [False] * 3
    found = [pair for _, pairs in steps for pair in pairs]
    assert len(found) == 3
    for (header, arrays), group in zip(found, groups, strict=True):
        again = build_group(header, arrays)
        assert (again.group_id, again.policy_version) == (group.group_id, group.policy_version)
        for a, b in zip(again.rollouts, group.rollouts, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.old_logprobs, b.old_logprobs)
            assert (a.ref_logprobs is None) == (b.ref_logprobs is None)
            assert (a.reward, a.reward_parts, a.finished) == (b.reward, b.reward_parts, b.finished)


def test_a_replay_counts_what_was_dropped_before_the_run_was_resumed_as_the_run_did(
    tmp_path, make_group
):
    one = journal(tmp_path)
    versions = [0, 0, 0, 0, 0, 2, 2, 3, 3]  # of groups 0 to 8; group 4 waits until it is too old
    packed = [
        pack_group(make_group(seq=i, version=v), "session", "digest")
        for i, v in enumerate(versions)
    ]
    for step, part in enumerate((packed[:5], [], packed[5:7])):
        one.write(step, part)
    one.fresh = True  # as when a run goes on from step 3
    one.write(3, packed[7:])
    plan = ServerPlan(
        run_id="run", lineage=1, settings={}, groups_per_step=2, max_staleness=1, max_steps=9, start_version=0,
        cursor={}, peer_timeout_s=1.0, check_group=lambda g: None,
    )  # fmt: skip
    again, rows = Replay(str(tmp_path), b"k" * 32, plan, 1.0), []
    for step in range(4):
        taken = [t.group.seq for t in again.take(2, step, 0.0)]
        rows.append((taken, [f.first for f in again.take_fates()], again.dropped["stale"]))
    assert rows == [([0, 1], [], 0), ([2, 3], [], 0), ([5, 6], [4], 1), ([7, 8], [], 1)]
    assert again.cursor() == {0: 9}


def test_above_its_size_the_oldest_steps_go_and_a_replay_says_so(tmp_path, make_group, caplog):
    one = journal(tmp_path, "--journal_gb", "5e-6")
    for step in range(6):
        one.write(step, [pack_group(make_group(seq=step), "session", "digest")])
    left = sorted(p.name for p in (tmp_path / "journal").glob("step_*"))
    assert 0 < len(left) < 6
    assert left[-1] == "step_000005.safetensors"
    assert sum(p.stat().st_size for p in (tmp_path / "journal").glob("step_*")) <= 5000
    assert caplog.text.count("above --journal_gb") == 1
    with pytest.raises(SettingsError, match="does not begin with step_000000"):
        read_index(tmp_path / "journal")


def test_a_disk_that_fails_ends_the_journal_and_not_the_run(tmp_path, make_group, caplog):
    one = journal(tmp_path)
    shutil.rmtree(tmp_path / "journal")
    for step in range(3):
        one.write(step, [pack_group(make_group(seq=step), "session", "digest")])
    assert caplog.text.count("the journal ends before step 1") == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_step_is_named(tmp_path, make_group, damage):
    journal(tmp_path).write(0, [pack_group(make_group(), "session", "digest")])
    folder = tmp_path / "journal"
    path, index = folder / "step_000000.safetensors", read_index(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    {"truncate": lambda: path.write_bytes(data[:-9]), "flip": lambda: path.write_bytes(data),
     "remove": path.unlink}[damage]()  # fmt: skip
    with pytest.raises(DataError, match="step_000000"):
        read_step(folder, 0, index[0])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"file": 1}'])
def test_a_damaged_index_is_an_error(tmp_path, text):
    (tmp_path / "index.jsonl").write_text(text)
    with pytest.raises(SettingsError, match="--replay"):
        read_index(tmp_path)


def test_what_was_recorded_after_a_step_that_a_run_goes_back_to_goes_whoever_records_next(tmp_path):
    folder = tmp_path / "journal"
    folder.mkdir()
    for step in range(5):
        append_line(folder / "index.jsonl", {"file": file_name(step), "sha256": "ab", "bytes": 0})
        (folder / file_name(step)).touch()
    forget_after(tmp_path, 3)
    assert sorted(read_index(folder)) == [0, 1, 2]
    assert len(list(folder.glob("step_*"))) == 3
    forget_after(tmp_path / "without", 3)


def test_the_last_line_of_an_index_that_a_power_cut_tore_costs_its_step_alone(tmp_path):
    line = {"file": "step_000000.safetensors", "sha256": "ab"}
    (tmp_path / "index.jsonl").write_text(json.dumps(line) + '\n{"file": "step_0000')
    (tmp_path / line["file"]).touch()
    assert read_index(tmp_path) == {0: "ab"}


def test_a_replay_takes_the_recorded_settings_but_for_where_the_run_wrote(tmp_path):
    journal(tmp_path, "--loss", "dapo", "--save_path", "x", "--port", "1234", "--resume")
    again = parse_settings(LearnerSettings, ["--replay", str(tmp_path), "--learning_rate", "0.5"])
    assert (again.loss, again.learning_rate, again.journal) == ("dapo", 0.5, False)
    assert not again.resume
    assert (again.save_path, again.port) == ("./checkpoints", 5555)
    assert json.loads((tmp_path / "journal" / "ds_config.json").read_text()) == {"some": "config"}
    assert recorded_settings(str(tmp_path))["ds_config"].endswith("journal/ds_config.json")


def test_steps_of_another_size_than_recorded_are_refused(tmp_path, make_group):
    journal(tmp_path).write(0, [pack_group(make_group(), "session", "digest")])
    assert count_steps(str(tmp_path), 2, 0, LOG) == 1
    with pytest.raises(SettingsError, match="recorded with 2 groups a step, now a step takes 4"):
        count_steps(str(tmp_path), 4, 0, LOG)

"""Metrics on disk, on the console and as a picture."""

import json
import logging
import os
import sys

import pytest

from splitgrpo.files import write_lines
from splitgrpo.monitor import MetricsReader, MetricsWriter, ProgressBar, plot_curves, step_line

ROW = {"step": 3, "max_steps": 60, "reward": 1.5, "reward/format": 1.0, "reward/answer": 0.5, "accuracy": 0.5, "kl": 0.01,
       "clip_frac": 0.02, "grad_norm": 0.3, "lr": 1e-6, "staleness_mean": 1.0, "tokens_per_s": 190.0, "step_s": 20.0,
       "wait_s": 2.0}  # fmt: skip


def test_rows_come_back_as_written_and_what_is_not_finite_becomes_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer, reader = MetricsWriter(path), MetricsReader(path)
    assert reader.new_rows() == []
    writer.write(ROW)
    assert reader.new_rows() == [ROW]
    writer.write({"step": 4, "loss": float("nan"), "ratio_max": float("inf")})
    assert reader.new_rows() == [{"step": 4, "loss": None, "ratio_max": None}]
    assert reader.new_rows() == []


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader, text = MetricsReader(path), json.dumps(ROW)
    path.write_text(text[:20])
    assert reader.new_rows() == []
    path.write_text(text + "\n")
    assert reader.new_rows() == [ROW]


def nine_rows_read(folder):
    path = folder / "metrics.jsonl"
    reader, writer = MetricsReader(path), MetricsWriter(path)
    for step in range(9):
        writer.write({"step": step})
    assert len(reader.new_rows()) == 9
    return path, reader, writer


def test_a_file_that_was_replaced_by_a_shorter_or_longer_one_is_read_from_its_start(tmp_path):
    path, reader, writer = nine_rows_read(tmp_path)
    write_lines(path, [{"step": step} for step in range(3)])
    assert [row["step"] for row in reader.new_rows()] == [0, 1, 2]
    writer.write({"step": 3})
    assert [row["step"] for row in reader.new_rows()] == [3]
    path.unlink()
    assert reader.new_rows() == []
    write_lines(path, [{"step": step} for step in range(20)])
    assert len(reader.new_rows()) == 20


def test_a_file_that_somebody_cut_ends_nobody(tmp_path):
    path, reader, writer = nine_rows_read(tmp_path)
    os.truncate(path, 5)
    assert reader.new_rows() == []
    writer.write({"step": 9})
    writer.write({"step": 10})
    assert [row["step"] for row in reader.new_rows()][-1] == 10


@pytest.mark.skipif(sys.platform != "linux", reason="skipped: needs /dev/full")
def test_a_full_disk_is_said_once_and_its_rows_follow(tmp_path, caplog):
    from pathlib import Path

    writer = MetricsWriter(Path("/dev/full"))
    for _ in range(3):
        writer.write(ROW)
    assert caplog.text.count("cannot be written now") == 1
    writer.path = tmp_path / "metrics.jsonl"  # there is room again
    writer.write(ROW)
    assert MetricsReader(writer.path).new_rows() == [ROW] * 4


def test_the_line_of_a_step_shows_the_parts_of_the_reward():
    line = step_line(ROW)
    for text in (
        "step    3/60",
        "reward  1.50 (format 1.00 answer 0.50)",
        "acc  50%",
        "stale 1.0",
        "190 tok/s",
    ):
        assert text in line
    assert "kl -" in step_line({"step": 1})


@pytest.mark.parametrize("rows", [[], [ROW], [ROW, {"step": 4, "kl": None}, ROW | {"step": 5}]])
def test_curves_are_drawn_from_any_number_of_rows(tmp_path, rows):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for row in rows:
        writer.write(row)
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_terminal_a_plain_line_comes_also_when_nothing_moves(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ProgressBar, "PLAIN_EVERY_S", 0.0)
    with ProgressBar(60) as bar:
        bar.tick()
        bar.update(ROW)
        bar.tick()
    assert "no step yet" in caplog.text
    assert "step 3/60, reward 1.50 acc 50% kl 0.010 stale 1.0" in caplog.text
    assert "ETA" in caplog.text

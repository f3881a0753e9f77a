"""benchmarks/run.py: rows of one shape, whatever is missing becomes a note. Nothing here looks at a figure's size."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import ceiling  # noqa: E402
import common  # noqa: E402
import loop  # noqa: E402
import run  # noqa: E402
import sampler  # noqa: E402


def check_shape(rows):
    for r in rows:
        assert set(r) == set(common.FIELDS), r["name"]
        assert isinstance(r["name"], str)
        assert isinstance(r["unit"], str)
        assert isinstance(r["note"], str)
        assert r["ours"] is None or isinstance(r["ours"], float)
        assert set(r["ratio"]) <= set(r["peers"]) <= set(r["runs"])
        assert (r["ours"] is None) == (not r["runs"].get("ours"))


def test_a_quick_run_writes_a_table_and_rows_of_the_agreed_shape(tmp_path):
    out = tmp_path / "results" / "latest.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/run.py", "--quick", "--only", "memory", "--runs", "1",
         "--out", out, "--data", tmp_path],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    check_shape(rows)
    names = [r["name"] for r in rows]
    assert names[0] == "machine"
    assert "torch" in rows[0]["note"]
    (memory,) = rows[1:]
    assert memory["name"].startswith("memory: ")
    assert memory["ours"] > 0
    assert memory["peers"]["padded peft"] > 0
    assert all(f"| {name} |" in done.stdout for name in names)


def test_only_a_whole_run_replaces_the_published_results(tmp_path, monkeypatch, capsys):
    results, part = tmp_path / "latest.json", tmp_path / "part.json"
    monkeypatch.setattr(run, "RESULTS", results)
    monkeypatch.setattr(run, "PART", part)
    monkeypatch.setattr(run, "rows_of", lambda topic, args: [common.row(topic, "", {})])
    for flags in (["--only", "memory"], ["--quick"]):
        assert run.main(flags) == 0
        assert part.exists()
        assert not results.exists()
    assert "say nothing of speed" in capsys.readouterr().out

    def interrupted(topic, args):
        if topic == "loop":
            raise KeyboardInterrupt
        return [common.row(topic, "", {})]

    with monkeypatch.context() as patch:
        patch.setattr(run, "rows_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.main([])
    assert not results.exists()
    assert run.main([]) == 0
    assert [r["name"] for r in json.loads(results.read_text())] == ["machine", *run.TOPICS]


def test_the_ceiling_is_measured_for_one_thread_and_for_all_and_counts_parameters_once(
    tmp_path, monkeypatch
):
    small = {"size": 48, "num_weights": 2, "copy_mib": 1, "seconds": 0.001}
    monkeypatch.setattr(
        common,
        "measure",
        lambda python, script, job, **_: ceiling.probe(job | small | {"threads": 1}),
    )
    ceiling.rates.cache_clear()
    rows = ceiling.rows(argparse.Namespace(quick=True))
    check_shape(rows)
    threads = {1, common.all_threads()}
    assert len(rows) == len(threads) * (len(ceiling.PROBES) + 1)
    assert all(r["ours"] > 0 for r in rows)
    model = common.demo_model(tmp_path)
    params = ceiling.num_parameters(model)
    assert 90_000 < params < 120_000  # the output layer is the embedding
    limit = ceiling.sampling_ceiling(model, "float32", 1, True)
    assert limit == 1e9 * ceiling.rates(1, True)["float32 skinny"] / (2 * params)
    best = 1e9 * ceiling.rates(1, True)["float32 square"]
    assert ceiling.learning_ceiling(model, "float32", 1, True, 1.5) == best / (6 * params)
    ceiling.rates.cache_clear()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "sampler,speed"], "unknown topic 'speed'; known are ceiling, sampler"),
        (["--only", ","], "names no topic"),
        (["--runs", "0"], "'0' is no whole number of at least 1"),
        (["--runs", "two"], "'two' is no whole number of at least 1"),
        (["--data", "/nowhere/gsm8k"], "/nowhere/gsm8k: no such file or folder"),
        (["--mod", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_measured(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_side_that_is_missing_is_noted_once_and_the_others_are_measured_in_turn():
    order = []

    def side(name, value):
        def measured():
            order.append(name)
            return {"tokens_per_s": value + len(order), "peak_rss_mib": 7.0}

        return measured

    def absent():
        order.append("absent")
        raise common.Missing("not installed: bash benchmarks/peers.sh vllm")

    sides = {"ours": side("ours", 100), "peer": side("peer", 10), "vllm": absent}
    results, notes = common.interleave(sides, 3)
    assert order == ["ours", "peer", "absent", "ours", "peer", "ours", "peer"]
    assert notes == ["vllm: not installed: bash benchmarks/peers.sh vllm"]
    row = common.row("x", "tokens/s", common.values_of(results, "tokens_per_s"), ceiling=208.0)
    assert row["runs"] == {"ours": [101, 104, 106], "peer": [12, 15, 17]}
    assert row["ours"] == 104
    assert row["peers"] == {"peer": 15}
    assert row["ratio"] == {"peer": 104 / 15}
    assert row["ceiling_share"] == 0.5
    check_shape([row | {"ours": 104.0}])


def test_a_peer_without_its_stamp_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "PEERS", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.delenv("SPLITGRPO_VLLM_PYTHON", raising=False)
    for peer in ("trl", "vllm"):
        (tmp_path / peer / "bin").mkdir(parents=True)
        (tmp_path / peer / "bin/python").touch()
        with pytest.raises(common.Missing, match=rf"peers.sh {peer}"):
            common.python_of(peer)
        (tmp_path / peer / "installed").touch()
        assert common.python_of(peer) == str(tmp_path / peer / "bin/python")


def test_a_measurement_that_fails_or_takes_too_long_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "HERE", tmp_path)
    (tmp_path / "raises.py").write_text("raise SystemExit('no such luck')")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    (tmp_path / "works.py").write_text("print('noise'); print('{\"tokens_per_s\": 3.0}')")
    with pytest.raises(common.Missing, match=r"ended with code 1: no such luck"):
        common.measure(sys.executable, "raises.py", {"threads": 1})
    with pytest.raises(common.Missing, match=r"took longer than 1 s"):
        common.measure(sys.executable, "hangs.py", {"threads": 1}, limit_s=1.0)
    with pytest.raises(common.Missing, match=r"cannot be started"):
        common.measure(str(tmp_path / "python"), "works.py", {"threads": 1})
    assert common.measure(sys.executable, "works.py", {"threads": 1})["tokens_per_s"] == 3.0


def test_a_missing_model_and_a_topic_that_fails_become_rows_with_a_note(tmp_path, monkeypatch):
    args = argparse.Namespace(
        model=str(tmp_path / "none"), data=None, quick=False, runs=1, work=tmp_path, only=()
    )
    monkeypatch.setattr(sampler, "WORKLOADS", sampler.WORKLOADS[:2])
    for r in [*run.rows_of("sampler", args), *run.rows_of("loop", args)]:
        assert r["ours"] is None
        assert r["note"].startswith(f"--model {tmp_path}/none: no model there")
    monkeypatch.setattr(loop, "rows", lambda args: 1 / 0)
    failed = run.rows_of("loop", args)
    check_shape(failed)
    assert failed[0]["note"] == "failed: ZeroDivisionError: division by zero"


def test_the_loop_leaves_out_its_first_steps_and_names_the_idle_side():
    steps = [
        {"step_s": s, "wait_s": w, "completion_tokens": 320}
        for s, w in ((90, 80), (50, 5), (10, 2), (10, 2))
    ]
    waits = (0, 0, 4, 4, 9)
    log = "\n".join(
        f"sampled 32 completions, 320 tokens in 5.0 s (64 tokens/s) with version 1, waited {w:.2f} s" for w in waits
    )  # fmt: skip
    found = loop.summary(steps, [m.groups() for m in loop.ROUND.finditer(log)], 32)
    assert found["completions_per_s"] == 3.2
    assert found["tokens_per_s"] == 32
    assert found["mean_len"] == 10
    assert (found["learner_idle"], found["sampler_idle"], found["ideal_share"]) == (0.2, 0.4, 0.8)
    with pytest.raises(common.Missing, match="has 2 steps"):
        loop.summary(steps[:2], [], 32)

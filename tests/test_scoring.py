"""User code in its own process: whatever a reward_function does, the sampler loses one group and knows why."""

import functools
import importlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import psutil
import pytest
from faulty_rewards import RESULTS, faulty, nap, told

from splitgrpo import reward_process
from splitgrpo.cli import parse_settings
from splitgrpo.config import SamplerSettings, SettingsError
from splitgrpo.process import Stopped
from splitgrpo.scoring import Scorer
from utils import check_answer, reward_function

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("test")


@pytest.fixture
def make_scorer():
    """Scorers that are closed when the test is over."""
    made = []

    def make(function=faulty, timeout_s=20.0, on_wait=lambda: None) -> Scorer:
        made.append(Scorer(function, check_answer, LOG, timeout_s=timeout_s, on_wait=on_wait))
        return made[-1]

    yield make
    for one in made:
        one.close()


def gone(pid: int, within_s: float = 3.0) -> bool:
    """Whether a process ends within this time; a zombie has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_group_gets_what_the_function_returned_and_every_part_of_the_others(make_scorer):
    scores = make_scorer().score_group(["a", "part b"], "5")
    assert [s.reward for s in scores] == [1.0, 1.0]
    assert [s.parts for s in scores] == [
        {"format": 0.25, "part b": 0.0},
        {"format": 0.0, "part b": 2.0},
    ]


def test_the_function_of_utils_gives_in_its_process_what_it_gives_here(make_scorer):
    texts = [f"<think>a</think><answer>{n}</answer>" for n in (18, 19)] + [
        "",
        "<answer>18</answer>",
    ]
    scores = make_scorer(reward_function).score_group(texts, "18")
    assert [{"reward": s.reward} | s.parts for s in scores] == [
        reward_function(t, "18") for t in texts
    ]


def test_correctness_never_comes_from_the_reward(make_scorer):
    right, wrong = make_scorer().score_group(["<answer>5</answer>", "<answer>6</answer>"], "5")
    assert (right.reward, right.correct, wrong.reward, wrong.correct) == (1.0, True, 1.0, False)


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_that_is_no_mapping_of_finite_numbers_with_a_reward_drops_its_group(
    result, shared
):
    assert shared.score_group(["fine", result, "fine"], "5") is None
    assert set(shared._seen) == {"returned no reward"}
    assert [s.reward for s in shared.score_group(["fine", "fine"], "5")] == [1.0, 1.0]


@pytest.fixture(scope="module")
def shared():
    """One scorer whose process outlives every wrong result."""
    one = Scorer(faulty, check_answer, LOG, timeout_s=20.0, on_wait=lambda: None)
    pid = one._process.pid
    yield one
    assert one._process.pid == pid
    one.close()


def test_parts_that_are_too_many_only_together_drop_their_group(make_scorer, caplog):
    scorer = make_scorer()
    assert scorer.score_group([f"part {'a' * i}b" for i in range(64)], "5") is not None
    assert scorer.score_group([f"part {'a' * i}b" for i in range(65)], "5") is None
    assert "65 parts, allowed are 64" in caplog.text


DEADLY = {
    "os._exit": "exit code 3",
    "abort": "signal 6",
    "segfault": "signal 11",
    "kill": "signal 9",
    "close": "exit code 1",
}


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("raise", "ZeroDivisionError: division by zero"), ("unprintable", "raised Unprintable"), ("surrogate", "\\ud800xxx"),
        ("recursion", "raised RecursionError"), ("sys.exit", "raised SystemExit"), ("input", "EOFError"), *DEADLY.items(),
    ],
)  # fmt: skip
def test_a_call_that_raises_or_ends_its_process_drops_its_group_and_says_where(
    act, said, make_scorer, caplog
):
    scorer = make_scorer()
    pid = scorer._process.pid
    assert scorer.score_group(["fine", act, "fine"], "5") is None
    assert scorer.failures == 1
    assert said in caplog.text
    if act not in ("os._exit", "kill", "close"):
        assert "faulty_rewards.py" in caplog.text
    assert len(caplog.text) < 12_000
    assert [s.reward for s in scorer.score_group(["fine", "fine"], "5")] == [1.0, 1.0]
    assert (scorer._process.pid != pid) == (act in DEADLY)


def test_user_code_that_pours_into_the_pipe_of_its_results_is_ended(make_scorer, caplog):
    started = time.monotonic()
    scorer = make_scorer(timeout_s=5.0)
    assert scorer.score_group(["fine", "pour"], "5") is None
    assert "wrote into the pipe of its results" in caplog.text
    assert time.monotonic() - started < 15
    assert scorer.score_group(["fine"], "5") is not None


@pytest.mark.parametrize(
    ("act", "where"),
    [("hang", "faulty"), ("hang in C", "hang_in_c"), ("stop", "did not say where")],
)
def test_a_call_without_end_is_ended_at_the_time_out_and_a_new_process_goes_on(
    act, where, make_scorer, caplog
):
    scorer = make_scorer(timeout_s=1.0)
    scorer.score_group(["fine"], "5")
    pid, started = scorer._process.pid, time.monotonic()
    assert scorer.score_group(["fine", act], "5") is None
    assert 1.0 <= time.monotonic() - started < 6.0
    assert gone(pid)
    assert "took longer than 1 s" in caplog.text
    assert where in caplog.text
    assert "reward_child.py" not in caplog.text
    assert scorer.score_group(["fine"], "5") is not None
    assert scorer._process.pid != pid


def test_the_time_out_is_for_one_call_and_the_start_does_not_count(make_scorer, user_module):
    scorer = make_scorer(nap, timeout_s=1.0)
    assert scorer.score_group(["0.3"] * 5, "5") is not None
    path, function = user_module("def reward(response, answer): return {'reward': 2}")
    path.write_text("import time\ntime.sleep(2)\n" + path.read_text())
    (score,) = make_scorer(function, timeout_s=1.0).score_group(["a"], "5")
    assert score.reward == 2.0


def test_what_a_hung_call_started_ends_with_it(make_scorer, tmp_path):
    scorer = make_scorer(timeout_s=1.0)
    assert scorer.score_group([f"sleeper {tmp_path}/pid"], "5") is None
    assert gone(int((tmp_path / "pid").read_text()))


def test_prints_of_a_megabyte_go_to_stderr_and_harm_nothing(make_scorer, capfd):
    assert make_scorer().score_group(["print", "print"], "5") is not None
    out, err = capfd.readouterr()
    assert out == ""
    assert (err.count("x"), err.count("y")) == (2_000_000, 2_000_000)


@pytest.mark.parametrize(
    "text",
    ["", "a\0b", "\r\n\n\x85\u2028", "\ud800 and \udfff", "\ud83d\ude00", "😀", "\xff" * 1_000_000, "\x1b[2J", '{"a": 1}\n'],
    ids=range(9),
)  # fmt: skip
def test_any_text_arrives_as_it_is(text, telling):
    def crc(text):
        return zlib.crc32(text.encode("utf-8", "surrogatepass"))

    scores = telling.score_group([text, "x"], "1" + text)
    assert [s.parts["response"] for s in scores] == [crc(text), crc("x")]
    assert [s.parts["answer"] for s in scores] == [crc("1" + text)] * 2


@pytest.fixture(scope="module")
def telling():
    one = Scorer(told, lambda response, answer: True, LOG, timeout_s=20.0, on_wait=lambda: None)
    yield one
    one.close()


def test_the_first_fault_of_a_kind_is_told_in_full_and_then_every_tenth_power(make_scorer, caplog):
    scorer = make_scorer()
    for _ in range(12):
        assert scorer.score_group(["raise"], "5") is None
        assert scorer.score_group(["fine"], "5") is not None
    assert scorer.score_group(["none"], "5") is None
    first, tenth, other = [r.getMessage() for r in caplog.records]
    assert "faulty_rewards.py" in first
    assert tenth == "reward_function raised ZeroDivisionError on 10 groups so far"
    assert "it returned None; it must return a dict that holds 'reward'" in other
    assert scorer.failures == 13


def test_a_function_that_fails_on_ten_groups_in_a_row_ends_the_run(make_scorer):
    scorer = make_scorer()
    for act in ["raise"] * 9 + ["fine"] + ["raise", "none", "nan"] * 3:
        scorer.score_group(["fine", act], "5")
    with pytest.raises(
        SettingsError,
        match=r"(?s)failed on 10 groups in a row.*ZeroDivisionError: division by zero.*'raise'",
    ):
        scorer.score_group(["raise"], "5")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import not_a_module_at_all", "No module named 'not_a_module_at_all'"), ("def reward(:", "SyntaxError"),
        ("import os; os._exit(5)", "exit code 5"), ("raise SystemExit(6)", "raised SystemExit"),
        ("", "has no attribute 'reward'"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_imported_ends_the_run_with_the_traceback(
    source, said, make_scorer, user_module
):
    path, function = user_module("def reward(response, answer): pass")
    path.write_text(source)
    with pytest.raises(
        SettingsError, match=r"(?s)reward cannot be imported from rewards_of_a_user.*" + said
    ):
        make_scorer(function).score_group(["a"], "5")


def test_a_module_without_end_is_not_waited_for_for_ever(make_scorer, user_module, monkeypatch):
    path, function = user_module("def reward(response, answer): pass")
    path.write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(reward_process, "START_S", 1.0)
    with pytest.raises(SettingsError, match=r"(?s)took longer than 1 s.*rewards_of_a_user\.py"):
        make_scorer(function).score_group(["a"], "5")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write and import a module; returns its path and its function `reward`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str):
        path = tmp_path / "rewards_of_a_user.py"
        path.write_text(source)
        return path, importlib.import_module(path.stem).reward

    yield write
    sys.modules.pop("rewards_of_a_user", None)


def test_a_lambda_that_has_a_name_in_its_module_works(make_scorer, user_module):
    _, function = user_module("reward = lambda response, answer: {'reward': 7}")
    assert make_scorer(function).score_group(["a"], "5")[0].reward == 7.0


@pytest.mark.parametrize(
    "function", [lambda r, a: {"reward": 1.0}, functools.partial(faulty), faulty.__call__]
)
def test_a_function_that_another_process_cannot_import_is_refused_at_once(function, make_scorer):
    with pytest.raises(SettingsError, match="Make it a function at the top level of a file"):
        make_scorer(function)


# ---- the life of the process --------------------------------------------------------------------


def test_the_sampler_is_heard_of_while_it_waits_and_can_be_stopped_in_it(make_scorer):
    seen = []

    def on_wait():
        seen.append(time.monotonic())
        if stop:
            raise Stopped("SIGTERM")

    stop = False
    scorer = make_scorer(nap, on_wait=on_wait)
    scorer.score_group(["0"], "5")
    seen.clear()
    scorer.score_group(["1"], "5")
    gaps = [b - a for a, b in itertools.pairwise(seen)]
    assert len(seen) >= 5
    assert sorted(gaps)[len(gaps) // 2] < 0.2
    stop = True
    pid, started = scorer._process.pid, time.monotonic()
    with pytest.raises(Stopped):
        scorer.score_group(["30"], "5")
    assert time.monotonic() - started < 3.0
    scorer.close()
    assert gone(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_from_the_terminal_ends_no_call(number, make_scorer):
    scorer = make_scorer(nap)
    scorer.score_group(["0"], "5")
    pid = scorer._process.pid
    threading.Timer(0.2, os.kill, [pid, number]).start()
    assert scorer.score_group(["0.6", "0"], "5") is not None
    assert scorer._process.pid == pid


def test_a_process_that_ends_between_two_groups_is_replaced_and_none_is_lost(make_scorer, caplog):
    caplog.set_level(logging.INFO)
    scorer = make_scorer()
    assert scorer.score_group(["die later"], "5") is not None
    pid = scorer._process.pid
    assert gone(pid)
    assert scorer.score_group(["fine"], "5") is not None
    assert "gets a new process, its last one ended its process with exit code 4" in caplog.text
    assert scorer.failures == 0


def test_a_process_that_ends_is_missed_even_if_a_copy_of_it_holds_its_pipes(make_scorer, caplog):
    scorer = make_scorer()
    scorer.score_group(["fine"], "5")
    started = time.monotonic()
    assert scorer.score_group(["leave a copy"], "5") is None
    assert time.monotonic() - started < 3.0
    assert "exit code 3" in caplog.text


def test_user_code_that_forks_and_returns_twice_answers_once(make_scorer):
    scores = make_scorer().score_group(["fork", "part a", "fork", "part b", "fine"], "5")
    assert [s.parts["part a"] for s in scores] == [0, 2, 0, 0, 0]
    assert [s.parts["part b"] for s in scores] == [0, 0, 0, 2, 0]


def test_the_normal_end_runs_the_exit_handlers_of_user_code_and_takes_no_time(
    make_scorer, tmp_path
):
    scorer = make_scorer()
    scorer.score_group([f"at exit {tmp_path}/done"], "5")
    pid, started = scorer._process.pid, time.monotonic()
    scorer.close()
    assert (tmp_path / "done").exists()
    assert time.monotonic() - started < 2.0
    assert gone(pid, 0.5)


def test_no_file_stays_open_behind_processes_that_were_replaced(make_scorer):
    scorer = make_scorer()
    scorer.score_group(["fine"], "5")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        assert scorer.score_group(["os._exit"], "5") is None
        assert scorer.score_group(["fine"], "5") is not None
    assert len(os.listdir("/proc/self/fd")) == before


SCRIPT = """
import logging, re, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from faulty_rewards import hang_in_c
from splitgrpo.scoring import Scorer

def reward(response, answer):
    if response == "sleep":
        time.sleep(60)
    if response == "regex":
        hang_in_c()
    return {{"reward": 3.0}}

if __name__ == "__main__":
    scorer = Scorer(reward, lambda r, a: True, logging.getLogger(), timeout_s=50, on_wait=lambda: None)
    print(scorer.score_group(["a"], "5")[0].reward, scorer._process.pid, flush=True)
    scorer.score_group([sys.argv[1]], "5")
"""


@pytest.fixture
def start_script(tmp_path):
    """Start a sampler of sorts; returns its process, the reward that it got and the number of its child."""
    started = []

    def start(source: str, *arguments: str) -> tuple[subprocess.Popen, float, int]:
        path, elsewhere = tmp_path / "script.py", tmp_path / "elsewhere"
        path.write_text(source.format(root=str(ROOT), tests=str(ROOT / "tests")))
        elsewhere.mkdir()  # a folder to be in, whose modules are none of ours
        (elsewhere / "msgspec.py").write_text("raise ImportError")
        process = subprocess.Popen(
            [sys.executable, path, *arguments], cwd=elsewhere, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        reward, pid = process.stdout.readline().split()
        return process, float(reward), int(pid)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("hang", ["sleep", "regex"])
def test_a_sampler_killed_while_user_code_hangs_leaves_no_process(hang, start_script):
    process, reward, pid = start_script(SCRIPT, hang)
    assert reward == 3.0  # a function of the script itself
    time.sleep(0.3)
    assert psutil.Process(pid).is_running()
    process.kill()
    assert gone(pid)


def test_a_script_that_scores_when_it_is_imported_starts_no_chain_of_processes(tmp_path):
    path = tmp_path / "script.py"
    source = SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")).replace(
        "if __name__", "if True or __name__"
    )
    path.write_text(source)
    done = subprocess.run([sys.executable, path, "a"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'put it under `if __name__ == "__main__":`' in done.stderr


def test_user_code_ends_with_the_sampler_where_the_kernel_sends_no_signal(make_scorer):
    scorer = make_scorer(nap)
    scorer.score_group(["0"], "5")
    process = scorer._process
    process._send(reward_process.frame(reward_process.Call(b"30", b"5")))
    time.sleep(0.3)
    process._close_pipes()
    assert gone(process.pid)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e9"])
def test_a_time_out_that_is_none_is_refused(value):
    with pytest.raises(SettingsError, match="--reward_timeout_s"):
        parse_settings(SamplerSettings, ["--reward_timeout_s", value])
    assert parse_settings(SamplerSettings, []).reward_timeout_s == 30.0

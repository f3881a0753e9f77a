"""Bad input: the exit code, and a message that says what was wrong, why, and what to do. Nothing slow has started."""

import importlib.util
import inspect
import json
import logging
import signal
import socket
import sys

import pytest
import torch
from conftest import tiny_model

import sampling_worker
import training_worker
from splitgrpo import demo, evaluate
from splitgrpo.cli import check_settings, parse_settings, refuse_early, warn_of
from splitgrpo.config import (
    KL_COEF_DEFAULT,
    LearnerSettings,
    SamplerSettings,
    SettingsError,
    effective_kl_coef,
    loss_options,
)
from splitgrpo.models import load_base, load_tokenizer, pick_device
from splitgrpo.opening import begin
from splitgrpo.warmstart import save_model
from splitgrpo.zero import check_batch, free_port, read_ds_config
from utils import LOSSES


@pytest.fixture
def model_path(tmp_path):
    tokenizer = demo.build_tokenizer()
    save_model(demo.build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def run(monkeypatch, capsys, model_path, tmp_path):
    """Run a worker's main in this process; returns exit code and what it wrote."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def call(worker, *flags, model=model_path):
        common = [
            "--model_path",
            model,
            "--data",
            "arithmetic",
            "--port",
            str(free_port()),
            "--wait_timeout_s",
            "1",
        ]
        place = "--save_path" if worker is training_worker else "--lora_path"
        argv = [worker.__file__, *common, place, str(tmp_path / "run"), *flags]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            code = worker.main()
        except SystemExit as error:  # argparse
            code = error.code
        return code, capsys.readouterr().err

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


BOTH = (training_worker, sampling_worker)


@pytest.mark.parametrize("worker", BOTH)
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--group_sizes", "4"], "unrecognized arguments: --group_sizes"),
        (["--group_siz", "4"], "unrecognized arguments: --group_siz"),
        (["--group_size", "1"], "--group_size 1: a group needs at least 2"),
        (["--group_size", "0"], "--group_size 0: a group needs at least 2"),
        (["--temperature", "0"], "--temperature 0.0: must be 0.001 to 10"),
        (["--temperature", "1e-38"], "--temperature 1e-38: must be 0.001 to 10"),
        (["--top_p", "1.5"], "--top_p 1.5"),
        (["--kl_coef", "-1"], "--kl_coef -1.0"),
        (["--learning_rate", "nan"], "--learning_rate nan"),
        (["--port", "70000"], "--port 70000"),
        (["--loss", "ppo"], "invalid choice: 'ppo'"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: without --curve_key only loopback"),
        (["--max_steps", "0"], "--max_steps 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--num_threads", "-5"], "--num_threads -5"),
    ],
)
def test_flags_that_cannot_work_end_with_2(run, worker, flags, reason):
    code, text = run(worker, *flags)
    assert code == 2, text
    assert reason in text


def test_a_learner_without_deepspeed_is_told_which_environment_it_needs(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(sys, "argv", ["training_worker.py"])
    refuse_early(LearnerSettings, "training_worker.py")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name)
    )
    refuse_early(SamplerSettings, "sampling_worker.py")
    with pytest.raises(SystemExit) as ended:
        refuse_early(LearnerSettings, "training_worker.py")
    assert ended.value.code == 2
    assert "deepspeed is not installed in this environment" in capsys.readouterr().err


def test_a_round_of_the_sampler_is_whole_groups(run):
    code, text = run(sampling_worker, "--batch_size", "10", "--group_size", "4")
    assert code == 2
    assert "--batch_size 10 is not a multiple of --group_size 4" in text
    assert "--batch_size 8" in text


@pytest.mark.parametrize("worker", BOTH)
def test_a_model_that_is_not_there_is_named_with_where_it_was_looked_for(run, worker, tmp_path):
    code, text = run(worker, model=str(tmp_path / "nothing"))
    assert code == 2
    assert "no such folder" in text
    assert "nothing/config.json" in text
    (tmp_path / "hollow").mkdir()
    code, text = run(worker, model=str(tmp_path / "hollow"))
    assert code == 2
    assert "holds no config.json" in text
    code, text = run(worker, model="owner/model-that-is-nowhere")
    assert code == 2
    assert "owner/model-that-is-nowhere: cannot be loaded; looked for a folder" in text


def test_data_that_is_not_there_ends_with_65(run, tmp_path):
    code, text = run(sampling_worker, "--data", str(tmp_path / "none.jsonl"))
    assert code == 65
    assert "no such file" in text


def test_a_taken_port_is_named_with_its_holder_and_what_to_do(run):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        code, text = run(training_worker, "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert "it is held by process" in text
    assert "another --port to both workers" in text


def test_a_save_path_that_cannot_be_written_is_refused_before_the_model_is_loaded(run, tmp_path):
    (tmp_path / "file").touch()
    code, text = run(training_worker, "--save_path", str(tmp_path / "file" / "run"))
    assert code == 2
    assert "cannot be written (Not a directory)" in text
    assert "parameters train" not in text


def test_an_earlier_run_is_not_overwritten(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest.json").write_text("{}")
    code, text = run(training_worker)
    assert code == 2
    assert "holds an earlier run" in text


def test_a_sampler_alone_says_what_it_looked_for_and_gives_up_with_75(run, tmp_path):
    code, text = run(sampling_worker)
    assert code == 75
    assert "latest.json is not there, nor is the folder" in text
    assert "--wait_timeout_s" in text
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter_config.json").write_text("{}")
    code, text = run(sampling_worker)
    assert code == 75
    assert "that folder is an adapter, --lora_path must be the learner's --save_path" in text


def test_a_device_that_torch_does_not_know_is_named():
    with pytest.raises(SettingsError, match="--device 'foo'"):
        pick_device("foo", logging.getLogger("test"))


def test_a_model_without_its_tokenizer_or_with_torn_weights_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="--model_path"):
        load_tokenizer(str(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SettingsError, match="cannot be loaded"):
        load_base(str(tmp_path), torch.float32)


@pytest.mark.parametrize("flag", ["--limit", "--max_new_tokens", "--batch_size"])
@pytest.mark.parametrize("value", ["0", "-5"])
def test_an_evaluation_of_nothing_is_refused(flag, value, capsys):
    with pytest.raises(SystemExit):
        evaluate.build_parser().parse_args(["--model_path", "m", "--data", "d", flag, value])
    assert "must be at least 1" in capsys.readouterr().err


# ---- ds_config.json -------------------------------------------------------------------------------


@pytest.fixture
def ds(tmp_path):
    """Write a changed copy of the project's ds_config.json."""
    from splitgrpo.launch import ROOT

    def write(**changes) -> str:
        config = json.loads((ROOT / "ds_config.json").read_text()) | changes
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return str(path)

    return write


def test_the_projects_own_ds_config_is_zero_2_bf16_clipped_adamw_at_1e_6(ds):
    settings = read_ds_config(ds(), None)
    assert settings.config["zero_optimization"]["stage"] == 2
    assert settings.config["gradient_clipping"] == 1.0
    assert (settings.dtype_name, settings.learning_rate) == ("bfloat16", 1e-6)
    assert settings.completions_per_step(2) == 32


def test_the_flag_overrides_the_learning_rate_of_the_file(ds):
    settings = read_ds_config(ds(), 3e-4)
    assert settings.learning_rate == settings.config["optimizer"]["params"]["lr"] == 3e-4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gradient_clipping": None}, "must set gradient_clipping"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "train_micro_batch_size_per_gpu is 'auto'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr is 'auto'"),
        ({"gradient_accumulation_steps": None}, "gradient_accumulation_steps must be a whole number"),
        ({"optimizer": None}, "must hold an optimizer"),
        ({"optimizer": 3}, "optimizer must be an object, found 3"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "optimizer.params.lr must be a number"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.params.lr must be a number"),
        ({"bf16": {"enabled": "false"}}, "enabled must be true or false"),
        ({"bf16": True}, "bf16 must be an object"),
        ({"gradient_clipping": -1}, "gradient_clipping must be a number of at least 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping must be a number of at least 0"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage must be 0 to 3, found 4"),
        ({"zero_optimization": {"stage": 0}}, "bf16 needs zero_optimization.stage 1 to 3"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow is false"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, "fp16 loses LoRA gradients"),
    ],
)  # fmt: skip
def test_a_ds_config_that_would_mislead_is_refused_naming_the_key(ds, changes, reason):
    with pytest.raises(SettingsError, match=reason):
        read_ds_config(ds(**changes), None)


def test_a_ds_config_that_is_not_there_or_no_json_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"none\.json: No such file"):
        read_ds_config(str(tmp_path / "none.json"), None)
    (tmp_path / "l.json").write_text("[]")
    with pytest.raises(SettingsError, match=r"l\.json: expected an object, found list"):
        read_ds_config(str(tmp_path / "l.json"), None)
    (tmp_path / "u.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(SettingsError, match=r"u\.json is not JSON"):
        read_ds_config(str(tmp_path / "u.json"), None)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(SettingsError, match="is not JSON"):
        read_ds_config(str(tmp_path / "x.json"), None)


def test_a_step_is_whole_groups_and_agrees_with_train_batch_size(ds):
    settings = read_ds_config(ds(), None)
    check_batch(settings, 2, 4, "x")
    with pytest.raises(
        SettingsError, match=r"4 x 4 x 1 = 16 completions.*not a multiple of --group_size 5"
    ):
        check_batch(settings, 1, 5, "x")
    stated = read_ds_config(ds(train_batch_size=64), None)
    with pytest.raises(SettingsError, match=r"train_batch_size is 64, but .* 4 x 4 x 2 = 32"):
        check_batch(stated, 2, 4, "x")


# ---- settings ------------------------------------------------------------------------------------


def test_the_users_documented_defaults():
    s, t = parse_settings(SamplerSettings, []), parse_settings(LearnerSettings, [])
    assert (s.model_path, s.lora_path, s.batch_size) == (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "./checkpoints",
        8,
    )
    assert (s.max_new_tokens, s.device, s.port) == (256, "cuda:0", 5555)
    assert (t.model_path, t.save_path, t.ds_config) == (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "./checkpoints",
        "ds_config.json",
    )
    assert (t.port, t.save_steps, t.group_size, t.max_staleness) == (5555, 10, 4, 1)


def test_a_loss_gets_the_flags_that_were_given_and_keeps_its_own_defaults_otherwise():
    def values(*argv):
        s = parse_settings(LearnerSettings, list(argv))
        return loss_options(s), effective_kl_coef(s)

    assert values() == ({}, 0.04)
    assert values("--loss", "gspo") == ({}, 0.0)
    assert values("--clip_eps", "0.1") == ({"clip_eps": 0.1, "clip_eps_high": 0.1}, 0.04)
    given = {"clip_eps_high": 1e-3, "kl_coef": 0.01}
    assert values("--loss", "gspo", "--clip_eps_high", "1e-3", "--kl_coef", "0.01") == (given, 0.01)


def test_the_kl_default_that_the_sampler_goes_by_is_the_losses_own():
    for name, loss_fn in LOSSES.items():
        assert inspect.signature(loss_fn).parameters["kl_coef"].default == KL_COEF_DEFAULT[name]


def test_publishing_more_seldom_than_staleness_allows_is_refused_instead_of_waiting_for_ever():
    with pytest.raises(SettingsError, match="--sync_steps 3"):
        parse_settings(LearnerSettings, ["--sync_steps", "3", "--max_staleness", "1"])


def test_a_model_whose_logits_are_capped_is_refused(tmp_path):
    from splitgrpo.logprobs import check_model

    config = tiny_model().config
    check_model(config)
    config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping=30"):
        check_model(config)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--loss", "gspo", "--clip_eps", "0.2"], "never reached and nothing is clipped"),
        (["--loss", "gspo", "--aggregation", "token"], "long completions would weigh more"),
        (["--loss", "dr_grpo", "--advantage", "group"], "very easy and very hard prompts"),
        (["--loss", "dr_grpo", "--aggregation", "sequence"], "long wrong completions"),
        (["--loss", "reinforce"], "no ratio corrects"),
        (["--max_staleness", "5"], "try --mismatch_correction truncate"),
    ],
)
def test_a_combination_that_the_papers_warn_against_is_said_with_the_reason(flags, reason):
    (warning,) = warn_of(parse_settings(LearnerSettings, flags))
    assert reason in warning


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_is_warned_of_with_its_own_defaults(loss):
    settings = parse_settings(LearnerSettings, ["--loss", loss, "--max_staleness", "0"])
    assert warn_of(settings) == []


@pytest.mark.parametrize(
    ("loss", "flag"),
    [
        ("sapo", "clip_eps"),
        ("sapo", "dual_clip"),
        ("reinforce", "clip_eps_high"),
        ("cispo", "dual_clip"),
    ],
)
def test_a_flag_that_a_loss_has_no_use_for_is_refused(loss, flag):
    with pytest.raises(SettingsError, match=f"--{flag} has no effect with --loss {loss}"):
        parse_settings(LearnerSettings, ["--loss", loss, f"--{flag}", "2"])


@pytest.mark.parametrize(
    ("flag", "value"),
    [("dual_clip", "1"), ("mismatch_cap", "0.5"), ("journal_gb", "0"), ("entropy_coef", "-1"), ("entropy_coef", "nan"),
     ("soft_overlong_tokens", "257"), ("soft_overlong_tokens", "-1"), ("mismatch_warn", "0")],
)  # fmt: skip
def test_options_of_the_losses_that_cannot_work_are_refused(flag, value):
    with pytest.raises(SettingsError, match=f"--{flag} "):
        parse_settings(LearnerSettings, [f"--{flag}", value])


def test_a_run_without_a_journal_cannot_be_replayed(tmp_path):
    with pytest.raises(SettingsError, match="only a run started with --journal"):
        parse_settings(LearnerSettings, ["--replay", str(tmp_path)])


def test_what_a_run_is_to_be_is_asked_for_once():
    with pytest.raises(SettingsError, match="give one of them"):
        parse_settings(LearnerSettings, ["--resume", "--overwrite"])


def test_a_replay_into_its_own_folder_is_refused_before_anything_is_removed(tmp_path):
    with pytest.raises(SettingsError, match="give it another folder"):
        check_settings(
            LearnerSettings(
                replay=str(tmp_path), save_path=f"{tmp_path}/../{tmp_path.name}", overwrite=True
            )
        )


def test_a_port_that_is_taken_is_found_before_a_run_is_removed(tmp_path):
    (tmp_path / "latest.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = LearnerSettings(
            save_path=str(tmp_path), overwrite=True, port=taken.getsockname()[1]
        )
        with pytest.raises(SettingsError, match="cannot listen on"):
            begin(settings, logging.getLogger("test"))
    assert (tmp_path / "latest.json").exists()

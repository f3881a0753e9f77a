"""Faults that leave a run going and its results wrong, each shown not to happen; docs/pitfalls.md lists them all."""

import dataclasses
import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import END, TinyTokenizer, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from splitgrpo import checkpoints, feed
from splitgrpo.batching import collate, plan_packed, plan_rows
from splitgrpo.config import LearnerSettings, PeerTimeout, SettingsError
from splitgrpo.engines.base import Completion, Sampling
from splitgrpo.engines.hf import HFEngine
from splitgrpo.files import sha256_file
from splitgrpo.learner import Learner
from splitgrpo.models import add_lora
from splitgrpo.policy import PolicyModule
from splitgrpo.rollout import Group, Rollout
from splitgrpo.sampler import Sampler, make_rollout
from splitgrpo.scoring import Score
from splitgrpo.step import BadSteps, rollout_metrics
from splitgrpo.wire import pack_group, seal, unpack_group, unseal
from utils import group_advantages, grpo_loss

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("test")
PROMPT = np.array([2, 5, 9, 30], dtype=np.int32)


def metrics_of(*groups: Group) -> dict[str, float]:
    """What is logged of the groups of one step, with their advantages."""
    rewards = torch.tensor([r.reward for g in groups for r in g.rollouts])
    return rollout_metrics(groups, 0, group_advantages(rewards, len(groups[0].rollouts)))


# ---- rewards and advantages -----------------------------------------------------------------------


def test_only_what_was_generated_is_scored_and_the_prompt_is_not():
    engine = HFEngine(tiny_model(), TinyTokenizer())
    drawn = [Completion(np.array([17, 18, END], dtype=np.int32), np.zeros(3, np.float32), True)]
    sampler = SimpleNamespace(engine=engine)
    assert Sampler.responses(sampler, drawn, "") == ["17 18"]
    assert Sampler.responses(sampler, drawn, "<think>\n") == ["<think>\n17 18"]


def test_a_group_of_equal_rewards_has_no_advantage_and_counts_as_one_without_spread(make_group):
    rewards = [1.25] * 8
    assert group_advantages(torch.tensor(rewards), 8).tolist() == [0.0] * 8
    dead, alive = make_group(8, rewards=rewards), make_group(8, rewards=[1.25] * 7 + [0.0])
    assert metrics_of(dead, alive)["zero_std_frac"] == 0.5


def test_a_groups_baseline_comes_from_no_other_prompt():
    got = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    assert got.tolist() == pytest.approx([0.7070, -0.7070, 0.0, 0.0], abs=1e-4)
    alone = group_advantages(torch.tensor([1.0, 0.0]), 2)
    assert torch.equal(got[:2], alone)


# ---- the same policy on both sides ----------------------------------------------------------------


def drawn_batch(model, tokenizer=None, sampling=None):
    """Rows drawn by an engine: ids, attention, mask, and the log-probs kept while drawing, as (B, L)."""
    engine = HFEngine(model, tokenizer or TinyTokenizer())
    sampling = sampling or Sampling(1.0, 0, 1.0, max_new_tokens=10)
    (group,) = engine.generate([PROMPT], 8, sampling, seed=0, on_token=lambda: None)
    rollouts = [make_rollout(PROMPT, c, None, Score(0.0, {}, False)) for c in group]
    batch = collate(rollouts, torch.zeros(8), range(8), pad_id=0)
    ids, attention, mask = batch.input_ids, batch.attention_mask, batch.completion_mask
    return ids, attention, mask, batch.old_logprobs


def dropout_adapter(model, dropout: float):
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear")
    peft = get_peft_model(model, config)
    for name, p in peft.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.2)
    return peft


def test_a_learner_in_train_mode_gives_the_samplers_log_probs_even_with_dropout_in_the_adapter():
    model = dropout_adapter(tiny_model(), 0.5)
    *inputs, old = drawn_batch(model)
    policy = PolicyModule(model, 1.0, 0, 1.0).train()
    ratio = (policy(*inputs) - old).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)


def test_a_new_adapter_has_no_dropout():
    layers = [m for n, m in add_lora(tiny_model(), 4, 8, seed=0).named_modules() if "dropout" in n]
    assert layers
    assert not any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in layers)


def test_two_ways_to_score_bfloat16_weights_clip_nothing_without_an_update():
    model = tiny_model().bfloat16()
    *inputs, old = drawn_batch(model)
    new = PolicyModule(model, 1.0, 0, 1.0)(*inputs)
    assert new.dtype == torch.float32
    for advantage in (1.0, -1.0):
        _, metrics = grpo_loss(new, old, None, torch.full((8,), advantage), inputs[2], kl_coef=0.0)
        assert metrics["clipped_low_sum"] + metrics["clipped_high_sum"] == 0
        assert metrics["ratio_sum"] / metrics["num_tokens"] == pytest.approx(1.0, abs=0.02)


@torch.no_grad()
def test_the_log_prob_at_a_position_is_that_of_the_token_standing_there():
    model = tiny_model()
    ids = torch.tensor([[2, 5, 9, 30, 41, 7, 12]])
    mask = torch.arange(7)[None] >= 3
    got = PolicyModule(model, 1.0, 0, 1.0)(ids, torch.ones_like(ids), mask)
    for t in range(7):
        expected = 0.0
        if t >= 3:
            logits = model(input_ids=ids[:, :t]).logits[0, -1].double()
            expected = logits.log_softmax(0)[ids[0, t]].item()
        assert got[0, t].item() == pytest.approx(expected, abs=1e-5)


# ---- tokens and masks -----------------------------------------------------------------------------


def rollout(prompt: list[int], completion: list[int], logprob: float = -1.0) -> Rollout:
    drawn = np.full(len(completion), logprob, dtype=np.float32)
    made = Completion(np.array(completion, dtype=np.int32), drawn, True)
    return make_rollout(np.array(prompt, np.int32), made, None, Score(0.0, {}, False))


def test_the_end_token_is_trained_although_padding_has_the_same_id():
    rows = [rollout([2, 3], [5, 6, END]), rollout([2, 3], [5, 6, 7, 8, END])]
    batch = collate(rows, torch.ones(2), [0, 1], pad_id=END)
    assert batch.input_ids[0].tolist() == [2, 3, 5, 6, END, END, END]
    assert batch.completion_mask[0, 2:].tolist() == [True, True, True, False, False]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 1, 0, 0]


def test_the_real_lengths_of_completions_are_logged(make_group):
    group = make_group(2)
    rows = (rollout([2, 3], [5, END]), rollout([2, 3], [5, 6, 7, 8, 9, END]))
    metrics = metrics_of(dataclasses.replace(group, rollouts=rows))
    assert metrics["completion_len_mean"] == 4.0
    assert metrics["completion_tokens"] == 8


def shared_embedding() -> torch.nn.Module:
    """A model that reads tokens 7 and 8 alike but predicts them apart: exchanging them changes a label alone."""
    model = tiny_model()
    embedding = model.get_input_embeddings().weight.data
    embedding[8] = embedding[7]
    return model.requires_grad_(True)


def loss_and_gradient(model, prompt: list[int], completion: list[int]):
    row = rollout(prompt, completion)
    batch = collate([row], torch.ones(1), [0], pad_id=0)
    policy = PolicyModule(model, 1.0, 0, 1.0)
    lp = policy(batch.input_ids, batch.attention_mask, batch.completion_mask)
    loss, _ = grpo_loss(
        lp, batch.old_logprobs, None, batch.advantages, batch.completion_mask, kl_coef=0.0
    )
    (grad,) = torch.autograd.grad(loss, [model.get_output_embeddings().weight])
    return loss, grad


def test_the_last_prompt_token_is_no_target_and_the_first_completion_token_is():
    model = shared_embedding()
    loss, grad = loss_and_gradient(model, [2, 5, 7], [7, 9, END])
    other_loss, other_grad = loss_and_gradient(model, [2, 5, 8], [7, 9, END])
    assert torch.equal(loss, other_loss)
    assert torch.equal(grad, other_grad)
    other_loss, _ = loss_and_gradient(model, [2, 5, 7], [8, 9, END])
    assert not torch.equal(loss, other_loss)


class Line:
    """Takes the place of the connection to a learner and keeps what is sent."""

    def __init__(self) -> None:
        self.sent = []

    def send(self, group) -> bool:
        self.sent.append(group)
        return True


def send_one(engine, completions) -> Line:
    """Send one group as a sampler does that wants no reference."""
    line = Line()
    pointer = SimpleNamespace(version=3, lineage=1, sha256="ab" * 32, run_id="run")
    sampler = SimpleNamespace(
        settings=SimpleNamespace(sampler_id=0, temperature=0.5),
        adapter=SimpleNamespace(pointer=pointer), sampling=Sampling(0.5, 0, 1.0, 10),
        want_ref=False, engine=engine, client=line,
    )  # fmt: skip
    scores = [Score(1.0, {}, True)] * len(completions)
    assert Sampler.send(sampler, (0, 7, 0), PROMPT, completions, scores)
    return line


def test_the_ids_on_the_wire_are_those_drawn_although_their_text_would_split_otherwise():
    vocab = {"<unk>": 0, "</s>": END, "a": 2, "b": 3, "ab": 4}
    core = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    engine = HFEngine(tiny_model(), tokenizer)
    drawn = [2, 3, END]
    assert tokenizer(engine.decode(np.array(drawn)).replace(" ", ""))["input_ids"] == [4]
    logprobs = np.array([-0.5, -1.5, -2.5], dtype=np.float32)
    line = send_one(engine, [Completion(np.array(drawn, np.int32), logprobs, True)] * 2)
    key = b"k" * 32
    header, blob = unseal(key, seal(key, *pack_group(line.sent[0], "session", "hash")))
    received = unpack_group(header, blob)
    assert received.temperature == 0.5
    for r in received.rollouts:
        assert r.token_ids.tolist() == [*PROMPT, *drawn]
        assert r.old_logprobs.tolist() == [0.0] * len(PROMPT) + [-0.5, -1.5, -2.5]
        assert r.completion_mask.tolist() == [False] * len(PROMPT) + [True] * 3
        assert len(r.token_ids) == len(r.old_logprobs) == len(r.completion_mask)


def test_without_a_kl_no_reference_pass_is_run():
    def ref_logprobs(*_):
        pytest.fail("the reference was computed")

    drawn = [Completion(np.array([4, END], np.int32), np.zeros(2, np.float32), True)] * 2
    (group,) = send_one(SimpleNamespace(ref_logprobs=ref_logprobs), drawn).sent
    assert all(r.ref_logprobs is None for r in group.rollouts)
    assert collate(group.rollouts, torch.zeros(2), [0, 1], 0).ref_logprobs is None


# ---- training -------------------------------------------------------------------------------------


def test_a_model_in_which_nothing_would_train_is_refused(monkeypatch):
    def frozen(model, config):
        return get_peft_model(model, config).requires_grad_(False)

    monkeypatch.setattr("splitgrpo.models.get_peft_model", frozen)
    with pytest.raises(SettingsError, match="no linear layer to train"):
        add_lora(tiny_model(), 4, 8, seed=0)


@pytest.mark.parametrize("plan", [plan_rows, plan_packed])
@pytest.mark.parametrize(("rows", "ranks", "micro"), [(8, 2, 4), (7, 2, 2), (1, 2, 4), (5, 3, 1)])
def test_every_rank_takes_the_same_number_of_micro_batches_and_every_row_once(
    plan, rows, ranks, micro
):
    rollouts = [rollout([2 + i // 3], [5] * (i + 1)) for i in range(rows)]
    split = plan(rollouts, ranks, micro)
    assert all(len(of_ranks) == ranks for of_ranks in split)
    assert sorted(i for of_ranks in split for some in of_ranks for i in some) == list(range(rows))
    for some in (some for of_ranks in split for some in of_ranks):
        prompts = {int(rollouts[i].token_ids[0]) for i in some}  # one token each
        tokens = len(prompts) + sum(rollouts[i].completion_len for i in some)
        assert tokens <= micro * (rows + 1)  # of the longest row
    if plan is plan_packed and rows >= ranks:
        assert min(len(some) for of_ranks in split[:1] for some in of_ranks) > 0


def test_a_rank_without_a_row_still_has_a_forward_and_a_backward_pass():
    model = tiny_model().requires_grad_(True)
    rows = [rollout([2, 3], [5, 6, END])]
    batch = collate(rows, torch.ones(1), [], pad_id=0)
    assert not batch.completion_mask.any()
    policy = PolicyModule(model, 1.0, 0, 1.0)
    lp = policy(batch.input_ids, batch.attention_mask, batch.completion_mask)
    loss, _ = grpo_loss(
        lp, batch.old_logprobs, None, batch.advantages, batch.completion_mask, denominator=4.0
    )
    loss.backward()
    assert loss.item() == 0.0
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    assert not any(g.any() for g in grads)


def test_steps_that_were_skipped_are_counted_said_and_end_the_run_when_they_do_not_stop():
    good = {"applied": 1.0, "loss": 0.1, "grad_norm": 1.0}
    bad = {"applied": 0.0, "loss": float("nan"), "grad_norm": float("nan")}
    steps = BadSteps(limit=3)
    assert steps.note(good, 1) is None
    for step in (2, 3):
        assert f"step {step}" in steps.note(bad, step)
    assert steps.note(good, 4) is None
    assert steps.note(bad, 5)
    assert steps.note(bad, 6)
    with pytest.raises(RuntimeError, match="3 times in a row"):
        steps.note(bad, 7)
    assert steps.total == 5


class SilentServer:
    """Rank 0's receiver in a run whose sampler never sends."""

    def take(self, num_groups: int, version: int, timeout_s: float) -> None:
        time.sleep(0.01)

    def idle_s(self) -> float:
        return float("inf")

    def describe(self) -> str:
        return "no sampler has connected yet"


def test_no_rank_waits_for_rollouts_inside_a_collective(monkeypatch):
    ranks = SimpleNamespace(num_ranks=1, control=None, bump=lambda: None)
    waiting = feed.Feed(
        ranks, SilentServer(), b"", wait_timeout_s=0.3, should_stop=lambda: False, log=LOG
    )
    met = []
    agree = waiting.agree
    monkeypatch.setattr(waiting, "agree", lambda values: met.append(values) or agree(values))
    with pytest.raises(
        PeerTimeout, match=r"for 0 s \(no sampler has connected yet\).*sampler\.log"
    ):
        waiting.next_groups(4, 0)
    assert len(met) > 5  # the ranks meet again and again, each time for an instant
    assert all(op == feed.NOTHING for op, *_ in met[:-1])
    assert met[-1][0] == feed.GIVE_UP


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write a checkpoint as one of two ranks; what comes out of DeepSpeed is given."""
    made = {"q.lora_A.weight": torch.ones(4, 8), "q.lora_B.weight": torch.ones(8, 4)}
    moments = {f"{k}|{n}": v + 1 for k, v in made.items() for n in ("exp_avg", "exp_avg_sq")}
    monkeypatch.setattr(checkpoints, "lora_state", lambda _: made)
    monkeypatch.setattr(checkpoints, "optimizer_state", lambda _: moments)
    monkeypatch.setattr(checkpoints, "rng_states", lambda _: {"rng|rank0": torch.zeros(4)})
    monkeypatch.setattr(checkpoints, "adam_step", lambda _: 3)
    monkeypatch.setattr("splitgrpo.enginestate.adam_step", lambda _: 3)
    monkeypatch.setattr("splitgrpo.zero.schedule_step", lambda _: None)
    (tmp_path / "checkpoints").mkdir()
    told = []

    def write(*, is_main: bool) -> Path:
        server, writer = SimpleNamespace(commit=told.append), SimpleNamespace(flush=lambda: None)
        learner = SimpleNamespace(
            step=3, start=SimpleNamespace(lineage=1, run_id="run"), base_digest="base", _saved_step=-1, started=0.0,
            ranks=SimpleNamespace(num_ranks=2, bump=lambda _: None), bad_steps=BadSteps(limit=3),
            engine=SimpleNamespace(module=SimpleNamespace(model=None)), settings=LearnerSettings(),
            run_dir=tmp_path, log=LOG, metrics=writer if is_main else None, _cursor={0: 12}, _hold_needed=lambda: None,
            patiently=lambda what, write: write(),
            server=server if is_main else None, ledger=object() if is_main else None,
        )  # fmt: skip
        Learner.save(learner)
        assert told == ([{0: 12}] if is_main else [])  # what samplers may forget
        return tmp_path / "checkpoints" / "step_000003"

    return write


def test_of_several_ranks_one_writes_a_checkpoint_and_its_digests_are_kept(save):
    assert not save(is_main=False).exists()
    path = save(is_main=True)
    index = json.loads((path / "state.json").read_text())
    sums = [f"{sha256_file(path / n)}  {n}" for n in ("state.safetensors", "state.json")]
    assert (path / "sha256sums").read_text().splitlines() == sums
    assert index["cursor"] == {"0": 12}


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_and_no_base_weight(save):
    tensors = load_file(save(is_main=True) / "state.safetensors")
    assert {k.split("|")[-1] for k in tensors} == {
        "q.lora_A.weight", "q.lora_B.weight", "exp_avg", "exp_avg_sq", "rank0",
    }  # fmt: skip
    assert sum("lora_" in k for k in tensors) == 6


# ---- the list -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num"), [("pitfalls.md", 75), ("reliability.md", 75)])
def test_every_pitfall_and_fault_names_a_test_that_exists(name, num):
    text = (ROOT / "docs" / name).read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| (?!what goes|fault \||---)", line)]
    assert len(rows) >= num
    for row in rows:
        *_, cell, _ = row.split("|")
        named = re.findall(r"(test_\w+\.py)::(test_\w+)", cell)
        assert named, row
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"{file} has no {test}"

"""Every fast path gives what the plain one gives: the same tokens, log-probs, losses and gradients."""

import logging
import types
from itertools import chain

import numpy as np
import pytest
import torch
from conftest import END, VOCAB, TinyTokenizer, tiny_model
from peft import LoraConfig, get_peft_model
from test_engine import PROMPTS, SETTINGS, generate
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from splitgrpo import packed, vocab
from splitgrpo.adapters import adapter_parameters
from splitgrpo.batching import collate, plan_packed
from splitgrpo.decoder import Decoder, why_unsupported
from splitgrpo.engines.base import Sampling
from splitgrpo.engines.draw import draw, draw_in_parts, uniforms
from splitgrpo.engines.fast import FastEngine, open_engine
from splitgrpo.engines.hf import HFEngine
from splitgrpo.logprobs import token_entropy, token_logprobs, use_float32_output
from splitgrpo.models import add_lora
from splitgrpo.policy import PolicyModule
from splitgrpo.sampler import make_rollout
from splitgrpo.scoring import Score

log = logging.getLogger("test")
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "initializer_range": 0.15, "bos_token_id": 2, "eos_token_id": END}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
KINDS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
}


def build(kind="qwen2", targets="all-linear", dtype=torch.float32, device="cpu", **lora):
    """A random model with a LoRA adapter whose B is not 0; the same at every call."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            p.data += torch.randn_like(p) * 0.1
    use_float32_output(model)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, **lora)
    peft = get_peft_model(model.to(dtype), config)
    for name, p in peft.named_parameters():
        p.data = p.data.to(dtype)
        if "lora_B" in name:
            p.data.normal_(std=0.2)
    return peft.to(device)


def both_engines(**how):
    return [
        kind(build(**how).requires_grad_(False), TinyTokenizer()) for kind in (HFEngine, FastEngine)
    ]


def assert_same_groups(one, other, atol=2e-5):
    for a, b in zip(chain(*one), chain(*other), strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)
        assert a.finished == b.finished


# ---- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_engine_draws_the_tokens_of_the_plain_one_while_rows_end_and_leave(kind):
    plain, fast = both_engines(kind=kind)
    for temperature, top_k, top_p in [*SETTINGS, (0.0, 0, 1.0), (2.5, 0, 1.0)]:
        sampling = Sampling(temperature, top_k, top_p, max_new_tokens=25)
        for prompts, num in ((PROMPTS, 4), (PROMPTS[:1], 8), (PROMPTS[1:], 1)):
            one, other = (generate(e, prompts, num, sampling, seed=5) for e in (plain, fast))
            assert_same_groups(one, other)
            if temperature:
                refs = [e.ref_logprobs(prompts[0], one[0], sampling) for e in (plain, fast)]
                for a, b in zip(*refs, strict=True):
                    np.testing.assert_allclose(a, b, atol=2e-5)


PATTERNS = {"alpha": {"alpha_pattern": {"k_proj": 9, "down_proj": 2}}, "rank": {"rank_pattern": {"up_proj": 5}},
            "rslora": {"use_rslora": True}}  # fmt: skip


@pytest.mark.parametrize("prompts", [[[4, 5, 6]] * 2, [[4]] * 3, [[4, 5, 6], [7], [7], [4, 5, 6]]])
def test_equal_prompts_in_one_round_are_sampled_each_for_itself(prompts):
    """A set of one problem, or the end of one epoch and the beginning of the next."""
    prompts = [np.array(p, np.int32) for p in prompts]
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=12)
    one, other = (generate(e, prompts, 2, sampling, seed=1) for e in both_engines())
    assert_same_groups(one, other)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_layers_of_unequal_rank_and_scaling_are_fused_too(pattern):
    plain, fast = both_engines(**pattern)
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=15)
    assert_same_groups(*(generate(e, PROMPTS, 3, sampling, seed=2) for e in (plain, fast)))


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["v_proj", "o_proj", "down_proj"]])
def test_layers_without_an_adapter_are_fused_with_those_that_have_one(targets):
    plain, fast = both_engines(targets=targets)
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=15)
    assert_same_groups(*(generate(e, PROMPTS, 3, sampling, seed=2) for e in (plain, fast)))


def test_a_base_model_without_any_adapter_is_sampled_too():
    plain, fast = (kind(tiny_model(), TinyTokenizer()) for kind in (HFEngine, FastEngine))
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=15)
    assert_same_groups(*(generate(e, PROMPTS, 3, sampling, seed=2) for e in (plain, fast)))


def test_an_adapter_that_is_installed_is_at_once_the_one_that_is_sampled_and_the_base_is_untouched():
    plain, fast = both_engines()
    base = {n: p.clone() for n, p in plain.model.named_parameters() if "lora" not in n}
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=15)
    before = generate(fast, PROMPTS, 3, sampling, seed=2)
    have = adapter_parameters(plain.model)
    adapter = types.SimpleNamespace(
        tensors={key: torch.randn(p.shape) * 0.3 for key, p in have.items()},
        config=plain.model.peft_config["default"], pointer=types.SimpleNamespace(folder="v000001.L1"),
    )  # fmt: skip
    for engine in (plain, fast):
        engine.install(adapter)
    after = generate(fast, PROMPTS, 3, sampling, seed=2)
    assert_same_groups(generate(plain, PROMPTS, 3, sampling, seed=2), after)
    assert any(len(a.token_ids) != len(b.token_ids) or (a.token_ids != b.token_ids).any()
               for a, b in zip(chain(*before), chain(*after), strict=True))  # fmt: skip
    found = {n: p for n, p in fast.model.named_parameters() if "lora" not in n}
    assert all(torch.equal(found[n], p) for n, p in base.items())


@pytest.mark.parametrize("which", [0, 1])
def test_a_completion_does_not_depend_on_who_else_is_in_the_batch(which):
    engine = both_engines()[which]
    sampling = Sampling(1.0, 0, 1.0, max_new_tokens=20)
    together = generate(engine, PROMPTS, 4, sampling, seed=3)
    assert_same_groups(together[:1], generate(engine, PROMPTS[:1], 4, sampling, seed=3))


@pytest.mark.parametrize("size", [5, 256, 700])
def test_drawing_in_parts_takes_the_token_that_the_whole_distribution_gives(size):
    torch.manual_seed(size)
    logits = torch.randn(3000, size) * 3
    logits[:, ::3] = float("-inf")
    points = uniforms(3000, 1, 0)[:, 0]
    points[:2] = torch.tensor([0.0, 1.0 - 2**-53])
    sampling = Sampling(0.8, 0, 1.0, 1)
    ids, logprobs = draw(logits, sampling, points)
    fast_ids, fast_logprobs = draw_in_parts(logits.clone(), sampling, points)
    assert (ids != fast_ids).sum() <= 2  # a point within rounding of the border between two tokens
    same = ids == fast_ids
    torch.testing.assert_close(fast_logprobs[same], logprobs[same], atol=1e-5, rtol=0)
    assert fast_logprobs.isfinite().all()
    assert (fast_ids % 3 != 0).all()


# ---- the learner ----------------------------------------------------------------------------------


def rollouts_of(lengths):
    """Rollouts of (prompt number, completion length); prompts of unequal length."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, size=n).astype(np.int32) for n in (5, 1, 9)]
    return [
        make_rollout(prompts[p], Drawn(rng.integers(3, VOCAB, size=n)), None, Score(0.0, {}, False))
        for p, n in lengths
    ]


class Drawn:
    """A completion of given tokens."""

    def __init__(self, ids):
        self.token_ids, self.finished = ids.astype(np.int32), True
        self.logprobs = np.full(len(ids), -1.0, dtype=np.float32)


ROWS = {
    "groups of unequal lengths": [(0, 4), (0, 7), (0, 1), (1, 3), (1, 3), (2, 6)],
    "one length": [(0, 5)] * 4 + [(2, 5)] * 4,
    "single tokens": [(1, 1), (1, 1), (0, 1)],
    "one row": [(0, 6)],
    "a group in two places": [(0, 3), (2, 2), (0, 5)],
}


def forward(policy, rollouts, *, packed, **how):
    """What a policy module gives for all rollouts as one micro-batch, and that batch."""
    num = len(rollouts)
    batch = collate(rollouts, torch.ones(num), range(num), 0, packed=packed)
    batch = batch.to(policy.model.device)
    ids, attention, mask = batch.input_ids, batch.attention_mask, batch.completion_mask
    return policy(ids, attention, mask, packing=batch.packing, **how), batch


def padded_and_packed(rows, **how):
    """For each road: (2, B, L) log-probs and entropy, and the gradient by name; `how` is for `build`."""
    rollouts = rollouts_of(rows)
    weight = torch.randn(len(rows), max(len(r.token_ids) for r in rollouts))
    found = []
    for fast in (False, True):
        policy = PolicyModule(build(**how), 0.7, 0, 1.0).train()
        assert policy.pack(log)
        out, _ = forward(policy, rollouts, packed=fast, with_entropy=True)
        (out[0] * weight.to(out.device)).sum().backward()
        found.append(
            (out.detach(), {n: p.grad for n, p in policy.named_parameters() if "lora" in n})
        )
    return found


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scores", [0, 1 << 25])
def test_packed_rows_give_the_log_probs_entropy_and_gradient_of_padded_ones(
    kind, rows, scores, monkeypatch
):
    monkeypatch.setattr(packed, "MAX_SCORES", scores)  # 0: torch's own attention, as on a GPU
    (plain, plain_grad), (fast, fast_grad) = padded_and_packed(rows, kind=kind)
    torch.testing.assert_close(fast, plain, atol=3e-5, rtol=0)
    assert all(g is not None and g.norm() > 0 for g in fast_grad.values())
    for name, grad in plain_grad.items():
        assert (fast_grad[name] - grad).norm() <= 2e-5 * grad.norm(), name


@pytest.mark.parametrize(("top_k", "top_p", "entropy_grad"), [(5, 1.0, False), (0, 0.7, False), (0, 1.0, True)])  # fmt: skip
def test_packed_rows_keep_filters_and_the_gradient_of_the_entropy(top_k, top_p, entropy_grad):
    rollouts = rollouts_of(ROWS["groups of unequal lengths"])
    found = []
    for fast in (False, True):
        policy = PolicyModule(build(), 0.9, top_k, top_p, entropy_grad=entropy_grad)
        policy.pack(log)
        out, _ = forward(policy, rollouts, packed=fast, with_entropy=True)
        (out[0].sum() + 0.3 * out[1].sum()).backward()
        grads = [p.grad for n, p in policy.named_parameters() if "lora" in n]
        found.append((out.detach(), torch.cat([g.flatten() for g in grads])))
    torch.testing.assert_close(found[1][0], found[0][0], atol=3e-5, rtol=0)
    assert (found[1][1] - found[0][1]).norm() <= 2e-5 * found[0][1].norm()


@torch.no_grad()
def mismatch_in_bfloat16(engine_kind, **how):
    """Mean difference (nats) of an engine's log-probs from its learner's, both on a model of `build`."""
    engine = engine_kind(build(dtype=torch.bfloat16, **how).requires_grad_(False), TinyTokenizer())
    groups = generate(engine, PROMPTS, 8, Sampling(1.0, 0, 1.0, max_new_tokens=20))
    rollouts = [
        make_rollout(prompt, c, None, Score(0.0, {}, False))
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for c in group
    ]
    policy = PolicyModule(build(dtype=torch.bfloat16, **how), 1.0, 0, 1.0)
    policy.pack(log)
    new, batch = forward(policy, rollouts, packed=engine_kind is FastEngine)
    return float((new - batch.old_logprobs)[batch.completion_mask].abs().mean())


def test_in_bfloat16_the_fast_sampler_and_the_fast_learner_round_alike():
    """Through transformers' own passes the same tokens differ by some thousandths of a nat."""
    gaps = {kind: mismatch_in_bfloat16(kind) for kind in (HFEngine, FastEngine)}
    assert gaps[FastEngine] < 1e-3 < gaps[HFEngine], gaps


@torch.no_grad()
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7)])
def test_in_bfloat16_the_reference_is_what_the_learner_computes_for_an_adapter_that_does_nothing(
    top_k, top_p
):
    """Else the KL of a policy that has not moved is rounding noise, and its gradient trains on that."""
    engine = FastEngine(build(dtype=torch.bfloat16).requires_grad_(False), TinyTokenizer())
    sampling = Sampling(0.9, top_k, top_p, max_new_tokens=20)
    (group,) = generate(engine, PROMPTS[:1], 8, sampling)
    refs = engine.ref_logprobs(PROMPTS[0], group, sampling)
    rollouts = [make_rollout(PROMPTS[0], c, None, Score(0.0, {}, False)) for c in group]
    model = build(dtype=torch.bfloat16)
    policy = PolicyModule(model, 0.9, top_k, top_p)
    assert policy.pack(log)
    with model.disable_adapter():
        new, batch = forward(policy, rollouts, packed=True)
    gap = new[batch.completion_mask] - torch.from_numpy(np.concatenate(refs))
    assert gap.abs().max() < 1e-4


def test_a_group_is_kept_together_so_that_its_prompt_is_computed_once():
    rollouts = rollouts_of([(p, 4) for _ in range(4) for p in (0, 1, 2)])
    for micro in plan_packed(rollouts, 1, 4):
        for rows in micro:
            prompts = [rollouts[i].token_ids[0] for i in rows]
            assert all(prompts.count(p) == 4 for p in prompts)
    batch = collate(rollouts, torch.ones(12), [0, 3, 6, 9], 0, packed=True)
    assert len(batch.packing.source) == 5 + 4 * 3  # a row's last token predicts nothing


@pytest.mark.timeout(30)
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_very_many_completions_of_one_prompt_are_planned_at_once_and_within_the_budget(
    micro_batch_size,
):
    rollouts = rollouts_of([(0, 1 + i % 40) for i in range(1200)])
    plan = plan_packed(rollouts, 1, micro_batch_size)
    assert sorted(i for micro in plan for rows in micro for i in rows) == list(range(1200))
    prompt = len(rollouts[0].token_ids) - rollouts[0].completion_len
    budget = micro_batch_size * max(len(r.token_ids) for r in rollouts)
    for micro in plan:
        for rows in micro:
            assert prompt + sum(rollouts[i].completion_len for i in rows) <= budget


# ---- the vocabulary in parts ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [1, 3000, 1 << 22])
def test_log_probs_by_parts_of_the_vocabulary_are_those_of_whole_rows(held, dtype, monkeypatch):
    monkeypatch.setitem(vocab.MAX_LOGITS, "cpu", held)
    check_log_probs_by_parts(dtype, "cpu")


def check_log_probs_by_parts(dtype, device):
    torch.manual_seed(0)
    hidden = (torch.randn(37, 16) * 2).to(device, dtype).requires_grad_()
    weight, bias = torch.randn(1037, 16).to(device, dtype), torch.randn(1037).to(device, dtype)
    ids, pull = torch.randint(1037, (37,)).to(device), torch.randn(37).to(device)
    out = vocab.VocabLogprobs.apply(hidden, weight, bias, ids, 0.7)
    (out[0] * pull).sum().backward()
    got, hidden.grad = hidden.grad, None
    logits = hidden.float() @ weight.float().t() + bias.float()
    expected = token_logprobs(logits, ids, 0.7, 0, 1.0)
    (expected * pull).sum().backward()
    torch.testing.assert_close(out[0], expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(out[1], token_entropy(logits, 0.7, 0, 1.0), atol=2e-5, rtol=0)
    near = 2e-6 if dtype == torch.float32 else 1e-2
    assert (got - hidden.grad).norm() <= near * hidden.grad.norm()


def test_products_of_bfloat16_numbers_are_not_rounded_and_the_switch_is_put_back():
    before = torch.backends.mkldnn.matmul.fp32_precision
    hidden, weight = (torch.randn(n, 64).to(torch.bfloat16) for n in (9, 33))
    got = vocab.wide_product(hidden, weight)
    np.testing.assert_allclose(got, hidden.double() @ weight.double().T, atol=1e-5)
    assert got.dtype == torch.float32
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sure_tokens_keep_their_digits_and_no_log_prob_is_above_0_at_a_low_temperature(dtype):
    """p from 0.5 to 0.9999: W[token] less a mean that is nearly W[token] would have no digits left."""
    torch.manual_seed(0)
    weight, ids = torch.randn(900, 64).to(dtype), torch.arange(40) * 7
    hidden = (
        (weight[ids].float() * torch.linspace(0.1, 0.3, 40)[:, None]).to(dtype).requires_grad_()
    )
    for temperature in (0.1, 1.0):
        out = vocab.VocabLogprobs.apply(hidden, weight, None, ids, temperature)
        hidden.grad = None
        out[0].sum().backward()
        exact = hidden.detach().double().requires_grad_()
        expected = token_logprobs64(exact @ weight.double().t() / temperature, ids)
        expected.sum().backward()
        assert out[0].max() <= 0
        torch.testing.assert_close(out[0].double(), expected, atol=3e-5, rtol=0)
        size = exact.grad.norm(dim=1)
        keep = size > 1e-6  # below, p is 1 to float32's last digit
        gap = (hidden.grad.double() - exact.grad).norm(dim=1)[keep] / size[keep]
        assert keep.any() or temperature < 1
        assert not keep.any() or gap.max() < (1e-2 if dtype == torch.bfloat16 else 1e-3), gap


def token_logprobs64(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


# ---- models that the fast road does not know ------------------------------------------------------


def strange(**change):
    shape = SHAPE | change
    return LlamaForCausalLM(LlamaConfig(**shape))


UNKNOWN = {
    "a window": (lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)), "window"),
    "layers with a window": (lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4,
                                                                 max_window_layers=1)), "window"),
    "another activation": (lambda: strange(hidden_act="gelu"), "hidden_act"),
    "another rotary embedding": (lambda: strange(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
                                 "rope_type"),
    "dora": (lambda: adapted(use_dora=True), "LoRA variant"),
    "an adapter of another name": (lambda: adapted("x"), "adapted by"),
    "an adapted output layer": (lambda: adapted(target_modules=["q_proj", "lm_head"]), "output layer"),
    "an adapted embedding": (lambda: adapted(target_modules=["q_proj", "embed_tokens"]), "embedding"),
    "a quantised layer": (lambda: quantised(), "is a Odd"),
}  # fmt: skip


def adapted(name="default", **change):
    config = LoraConfig(**{"r": 2, "target_modules": "all-linear"} | change)
    return get_peft_model(tiny_model(), config, name)


def quantised():
    class Odd(torch.nn.Linear):
        pass

    model = tiny_model()
    model.model.layers[1].mlp.up_proj.__class__ = Odd
    return model


@pytest.mark.parametrize(("make", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_model_of_another_kind_takes_the_plain_road_and_the_log_says_why(make, reason, caplog):
    model = make().eval().requires_grad_(False)
    assert reason in why_unsupported(model)
    with pytest.raises(ValueError, match=reason):
        Decoder(model)
    with caplog.at_level(logging.WARNING):
        engine = open_engine(model, TinyTokenizer(), log, plain=False)
        assert not PolicyModule(model, 1.0, 0, 1.0).pack(log)
    assert type(engine) is HFEngine
    assert caplog.text.count(reason) == 2


def test_plain_is_the_plain_engine_and_without_it_a_known_model_takes_the_fast_one(caplog):
    model = add_lora(tiny_model(), 4, 8, 0).requires_grad_(False)
    assert type(open_engine(model, TinyTokenizer(), log, plain=True)) is HFEngine
    assert type(open_engine(model, TinyTokenizer(), log, plain=False)) is FastEngine
    assert not caplog.text

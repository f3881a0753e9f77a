"""The decode loop against a plain recomputation, and the learner's log-probs against the sampler's."""

import numpy as np
import pytest
import torch
from conftest import END, VOCAB, TinyTokenizer, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from splitgrpo.engines.base import Sampling
from splitgrpo.engines.draw import draw, uniforms
from splitgrpo.engines.hf import HFEngine, end_token_ids
from splitgrpo.logprobs import filter_logits, token_entropy, token_logprobs, use_float32_output
from splitgrpo.mismatch import MismatchAlarm, rows_to_measure
from splitgrpo.models import add_lora, load_base
from splitgrpo.policy import PolicyModule

PROMPTS = [np.array(p, dtype=np.int32) for p in ([2, 5, 9], [2, 7, 8, 30, 41, 6, 11], [4, 4])]
SETTINGS = [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.7), (0.8, 10, 0.6)]


def engine_with_lora(seed: int = 0, kind=HFEngine) -> HFEngine:
    model = add_lora(tiny_model(seed), rank=4, alpha=8, seed=1)
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.2)
    return kind(model.requires_grad_(False), TinyTokenizer())


def generate(engine, prompts, num, sampling, seed=0):
    return engine.generate(prompts, num, sampling, seed=seed, on_token=lambda: None)


def rows_of(prompts, groups, more_padding=0):
    """Right-padded ids, attention, mask and the sampler's log-probs of all completions."""
    rows = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    longest = more_padding + max(len(p) + len(c.token_ids) for p, c in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    attention, mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    old = torch.zeros(len(rows), longest)
    for i, (p, c) in enumerate(rows):
        n = len(p) + len(c.token_ids)
        ids[i, :n] = torch.from_numpy(np.concatenate([p, c.token_ids]))
        attention[i, :n], mask[i, len(p) : n] = 1, True
        old[i, len(p) : n] = torch.from_numpy(c.logprobs)
    return ids, attention, mask, old


def reference_logprobs(model, prompt, token_ids, temperature, top_k, top_p) -> np.ndarray:
    """One token at a time, no cache, no padding, NumPy float64 after the logits."""
    out = []
    ids = list(prompt)
    for token in token_ids:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double().numpy() / temperature
        order = np.argsort(-logits, kind="stable")
        kept = np.ones(len(logits), dtype=bool)
        if top_k:
            kept[order[top_k:]] = False
        if top_p < 1:
            p = np.where(kept, np.exp(logits - logits.max()), 0.0)
            p /= p.sum()
            mass = 0.0
            for i in order:
                if mass >= top_p:
                    kept[i] = False
                mass += p[i]
        z = np.where(kept, np.exp(logits - logits.max()), 0.0)
        out.append(np.log(z[token] / z.sum()))
        ids.append(int(token))
    return np.array(out)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
@torch.no_grad()
def test_logprobs_kept_while_drawing_are_those_of_the_sampling_distribution(
    temperature, top_k, top_p
):
    engine = engine_with_lora()
    sampling = Sampling(temperature, top_k, top_p, max_new_tokens=12)
    for prompt, group in zip(PROMPTS, generate(engine, PROMPTS, 3, sampling), strict=True):
        for c in group:
            expected = reference_logprobs(
                engine.model, prompt, c.token_ids, temperature, top_k, top_p
            )
            np.testing.assert_allclose(c.logprobs, expected, atol=2e-5)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
@torch.no_grad()
def test_learner_and_sampler_agree_on_every_token_whatever_the_padding(temperature, top_k, top_p):
    engine = engine_with_lora()
    sampling = Sampling(temperature, top_k, top_p, max_new_tokens=9)
    ids, attention, mask, old = rows_of(PROMPTS, generate(engine, PROMPTS, 2, sampling), 3)
    new = PolicyModule(engine.model, temperature, top_k, top_p)(ids, attention, mask)
    assert (new - old).abs().max() < 1e-4
    assert not new[~mask].any()


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16(tmp_path, tied):
    config = tiny_model().config
    config.tie_word_embeddings = tied
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_base(str(tmp_path), torch.bfloat16)
    hidden = torch.randn(7, 32).to(torch.bfloat16)
    weight = model.get_output_embeddings().weight
    assert weight.dtype == torch.bfloat16
    assert (weight is model.get_input_embeddings().weight) == tied
    got = model.get_output_embeddings()(hidden)
    np.testing.assert_allclose(got, hidden.double() @ weight.double().T, atol=1e-6)
    ids = torch.tensor([[4, 9, 3]])
    assert model(input_ids=ids).logits.dtype == torch.float32


@torch.no_grad()
def test_ref_logprobs_are_those_of_the_base_model_and_the_adapter_is_on_again_afterwards():
    engine, base = engine_with_lora(), tiny_model(0)
    sampling = Sampling(0.7, 0, 1.0, max_new_tokens=8)
    before = generate(engine, PROMPTS[:1], 3, sampling)[0]
    refs = engine.ref_logprobs(PROMPTS[0], before, sampling)
    for c, ref in zip(before, refs, strict=True):
        expected = reference_logprobs(base, PROMPTS[0], c.token_ids, 0.7, 0, 1.0)
        np.testing.assert_allclose(ref, expected, atol=2e-5)
    again = generate(engine, PROMPTS[:1], 3, sampling)[0]
    for a, b in zip(before, again, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_a_completion_ends_with_its_end_token_and_keeps_it():
    engine = engine_with_lora()
    group = generate(engine, PROMPTS[1:2], 64, Sampling(1.5, 0, 1.0, max_new_tokens=20))[0]
    assert any(c.finished for c in group)
    assert any(not c.finished for c in group)
    for c in group:
        ends = np.flatnonzero(c.token_ids == END)
        assert len(c.token_ids) == len(c.logprobs) <= 20
        assert list(ends) == ([len(c.token_ids) - 1] if c.finished else [])
        assert c.finished or len(c.token_ids) == 20


def test_every_end_id_of_tokenizer_and_generation_config_ends_a_row():
    model = tiny_model()
    model.generation_config.eos_token_id = [END, 17, 23]
    assert end_token_ids(model, TinyTokenizer()) == [END, 17, 23]
    engine = HFEngine(model, TinyTokenizer())
    group = generate(engine, PROMPTS[:1], 64, Sampling(2.0, 0, 1.0, max_new_tokens=30))[0]
    last = {int(c.token_ids[-1]) for c in group if c.finished}
    assert len(last) > 1
    assert last <= {END, 17, 23}
    for c in group:
        assert not np.isin(c.token_ids[:-1], [END, 17, 23]).any()


def test_greedy_text_does_not_depend_on_the_other_rows():
    engine = engine_with_lora()
    sampling = Sampling(0.0, 0, 1.0, max_new_tokens=15)
    together = generate(engine, PROMPTS, 1, sampling)
    for prompt, (c,) in zip(PROMPTS, together, strict=True):
        ((alone,),) = generate(engine, [prompt], 1, sampling)
        np.testing.assert_array_equal(alone.token_ids, c.token_ids)


def test_a_models_own_sampling_defaults_are_off():
    model = tiny_model()
    model.generation_config.update(top_k=1, top_p=0.001, repetition_penalty=5.0, temperature=0.01)
    group = generate(HFEngine(model, TinyTokenizer()), PROMPTS[:1], 8, Sampling(1.0, 0, 1.0, 10))[0]
    assert len({tuple(c.token_ids) for c in group}) == 8


def test_tokens_are_drawn_as_often_as_their_probability_says():
    logits = torch.tensor([[2.0, 0.0, -1.0, float("-inf")]]).repeat(40_000, 1)
    ids, logprobs = draw(logits, Sampling(0.5, 0, 1.0, 1), uniforms(40_000, 1, 0)[:, 0])
    p = torch.softmax(torch.tensor([4.0, 0.0, -2.0]), 0)
    counts = torch.bincount(ids, minlength=4) / len(ids)
    assert (counts[:3] - p).abs().max() < 0.01
    assert counts[3] == 0
    torch.testing.assert_close(logprobs, p.log()[ids])


def test_a_draw_at_the_very_end_of_the_distribution_never_picks_a_filtered_token(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.ones(*shape))
    logits = torch.tensor([[1.0, 3.0, float("-inf"), float("-inf")]])
    ids, logprobs = draw(logits, Sampling(1.0, 0, 1.0, 1), torch.ones(1))
    assert ids.item() == 1
    assert torch.isfinite(logprobs).all()


def test_log_probs_at_half_temperature_are_the_hand_computed_ones():
    got = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5, 0, 1.0)
    assert got.item() == pytest.approx(-0.01815, abs=1e-5)
    got = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 1.0, 0, 1.0)
    assert got.item() == pytest.approx(-0.12693, abs=1e-5)


def test_the_most_likely_token_always_stays():
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    assert filter_logits(logits, 0, 1e-6).isfinite().tolist() == [[True, False, False]]
    assert filter_logits(logits, 2, 1.0).isfinite().tolist() == [[True, True, False]]


def test_changing_a_prompt_token_moves_no_logprob_position_and_masked_rows_give_zero():
    policy = PolicyModule(tiny_model(), 1.0, 0, 1.0)
    ids = torch.randint(3, VOCAB, (2, 8))
    out = policy(ids, torch.ones_like(ids), torch.zeros(2, 8, dtype=torch.bool))
    assert out.shape == (2, 8)
    assert not out.any()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
@pytest.mark.parametrize("kind", ["dropout", "several ends", "pad is end", "llama with bos"])
@torch.no_grad()
def test_the_agreement_holds_for_every_kind_of_model(kind, temperature, top_k, top_p):
    """In train mode, as DeepSpeed leaves the learner's module; prompts of one length and of several."""
    if kind == "llama with bos":
        config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                             num_attention_heads=4, initializer_range=0.15, bos_token_id=2, eos_token_id=END)  # fmt: skip
        torch.manual_seed(5)
        model = LlamaForCausalLM(config).eval()
        use_float32_output(model)
    else:
        model = tiny_model(0, **({"attention_dropout": 0.3} if kind == "dropout" else {}))
    if kind == "several ends":
        model.generation_config.eos_token_id = [END, 17, 23]
    if kind == "pad is end":
        model.config.pad_token_id = model.generation_config.pad_token_id = END
    lora = LoraConfig(
        r=4, target_modules="all-linear", lora_dropout=0.3 if kind == "dropout" else 0.0
    )
    peft = get_peft_model(model, lora)
    torch.manual_seed(3)
    for name, p in peft.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.2)
    sampling = Sampling(temperature, top_k, top_p, max_new_tokens=9)
    for prompts in (PROMPTS, PROMPTS[:1] * 3):
        groups = generate(HFEngine(peft, TinyTokenizer()), prompts, 3, sampling)
        ids, attention, mask, old = rows_of(prompts, groups)
        policy = PolicyModule(peft, temperature, top_k, top_p).train()
        new = policy(ids, attention, mask)
        assert (new - old)[mask].abs().max() < 1e-4
        assert ((new - old)[mask].exp() - 1).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_logprobs_and_entropy_in_chunks_equal_the_plain_ones_in_value_and_gradient(
    chunk, temperature, top_k, top_p
):
    engine = engine_with_lora()
    groups = generate(engine, PROMPTS, 2, Sampling(temperature, top_k, top_p, 8))
    ids, attention, mask, _ = rows_of(PROMPTS, groups)
    model = engine.model.requires_grad_(True)
    weights = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(1))

    def plain():
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        dist = filter_logits(logits / temperature, top_k, top_p).log_softmax(-1)
        taken = dist.gather(-1, ids[:, 1:, None])[..., 0]
        finite = dist.masked_fill(dist == float("-inf"), 0.0)
        out = torch.stack([taken, -(dist.exp() * finite).sum(-1)])
        return torch.nn.functional.pad(out, (1, 0)).masked_fill(~mask, 0.0)

    def gradient(out):
        model.zero_grad()
        (out * weights).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    policy = PolicyModule(model, temperature, top_k, top_p, entropy_grad=True, chunk_tokens=chunk)
    expected, got = plain(), policy(ids, attention, mask, with_entropy=True)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(got), gradient(expected), atol=2e-4, rtol=2e-4)


def test_the_entropy_is_a_number_and_not_in_the_gradient_unless_asked_for():
    policy = PolicyModule(tiny_model(), 1.0, 0, 1.0)
    ids = torch.randint(3, VOCAB, (2, 8))
    out = policy(
        ids, torch.ones_like(ids), torch.arange(8)[None].repeat(2, 1) > 3, with_entropy=True
    )
    out[1].sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())
    assert token_entropy(torch.zeros(1, 8), 1.0, 0, 1.0).item() == pytest.approx(np.log(8))
    assert token_entropy(torch.zeros(1, 8), 1.0, 0, 0.5).item() == pytest.approx(np.log(4))


def test_a_forward_pass_for_the_mismatch_is_made_of_one_group_and_only_where_no_row_is_fresh():
    groups = [0, 0, 1, 1, 2, 2]
    assert rows_to_measure([4, 4, 6, 6, 6, 6], groups, 7, False) == [4, 5]
    assert rows_to_measure([6, 6, 6, 6, 5, 5], groups, 7, False) == [2, 3]
    assert rows_to_measure([6, 6, 7, 7, 6, 6], groups, 7, False) == []
    assert rows_to_measure([6, 6, 7, 7, 6, 6], groups, 7, True) == [0, 1, 4, 5]
    assert rows_to_measure([], [], 7, False) == []


def test_a_jump_of_the_mismatch_is_said_at_once_with_its_cause_and_then_now_and_again():
    alarm = MismatchAlarm(0.1, filtered=False)
    high = {"mismatch_mean": 0.5, "mismatch_max": 2.0}
    assert alarm.note({"mismatch_mean": 0.05, "mismatch_max": 0.4}) is None
    said = [alarm.note(high) for _ in range(41)]
    assert [i for i, text in enumerate(said) if text] == [0, 20, 40]
    assert "by 0.5 nats in the mean, 2 at most" in said[0]
    assert "another precision" in said[0]
    assert "--top_k" not in said[0]
    assert alarm.note({"mismatch_mean": 0.05, "mismatch_max": 0.4}) is None
    assert alarm.note(high | {"mismatch_mean": float("nan")}) is not None
    assert "--top_k" in MismatchAlarm(0.1, filtered=True).note(high)

"""Supervised steps, and the embedded model that they make."""

import numpy as np
import pytest
import torch
from conftest import TinyTokenizer, tiny_model

from data import build_prompts, load_problems, worked_response
from splitgrpo import demo
from splitgrpo.engines.base import Sampling
from splitgrpo.engines.hf import HFEngine
from splitgrpo.models import load_base, load_tokenizer
from splitgrpo.warmstart import pad, response_ids, save_model, warmstart
from utils import check_answer, check_format

ROWS = [
    (np.array([2, 5, 6], dtype=np.int32), np.array([10, 11, 12, 1], dtype=np.int32)),
    (np.array([2, 7, 8, 9], dtype=np.int32), np.array([20, 21, 1], dtype=np.int32)),
]
OPTIONS = {"steps": 60, "batch_size": 2, "learning_rate": 1e-2, "seed": 0}


def test_a_model_learns_the_responses_and_to_end_them():
    model = tiny_model()
    loss = warmstart(model, ROWS, **OPTIONS)
    assert loss < 0.05
    engine = HFEngine(model, TinyTokenizer())
    for prompt, response in ROWS:
        ((c,),) = engine.generate(
            [prompt], 1, Sampling(0.0, 0, 1.0, 10), seed=0, on_token=lambda: None
        )
        np.testing.assert_array_equal(c.token_ids, response)
        assert c.finished


def test_the_same_seed_gives_the_same_weights_bit_for_bit():
    models = [tiny_model(), tiny_model()]
    for model in models:
        warmstart(model, ROWS, **(OPTIONS | {"steps": 5}))
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(a, b)


def test_prompts_are_not_trained_on():
    _, attention, mask = pad(ROWS, torch.device("cpu"))
    assert mask.tolist() == [
        [False, False, False, True, True, True, True],
        [False, False, False, False, True, True, True],
    ]
    assert attention.sum(1).tolist() == [7, 7]


def test_a_bfloat16_model_is_trained_in_float32_and_comes_back_as_bfloat16():
    model = tiny_model().bfloat16()
    before = [p.clone() for p in model.parameters()]
    warmstart(model, ROWS, **(OPTIONS | {"steps": 20}))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not model.training


@pytest.fixture(scope="module")
def tokenizer():
    return demo.build_tokenizer()


def test_every_demo_text_survives_its_tokenizer(tokenizer, tmp_path):
    save_model(demo.build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    problems = load_problems("arithmetic", "train") + load_problems("arithmetic", "test")
    for problem in problems:
        ids = response_ids(worked_response(problem), tokenizer)
        assert ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert check_format(text)
        assert check_answer(text, problem.ground_truth)
    prompts, dropped = build_prompts(problems, tokenizer, demo.RECIPE["max_prompt_tokens"])
    assert dropped == 0
    for prompt in prompts:
        assert tokenizer.unk_token_id not in prompt.token_ids
        assert list(prompt.token_ids).count(tokenizer.bos_token_id) == 1


def test_the_demo_model_has_about_a_hundred_thousand_parameters(tokenizer):
    model = demo.build_model(tokenizer, seed=0)
    assert 80_000 < sum(p.numel() for p in model.parameters()) < 130_000


def test_the_teacher_is_careless_in_three_rows_of_five(tokenizer):
    problems = load_problems("arithmetic", "train")[:100]
    prompts, _ = build_prompts(problems, tokenizer, 48)
    rows = demo.careless_rows(
        [p.token_ids for p in prompts], problems, worked_response, tokenizer, 0
    )
    texts = [tokenizer.decode(r.tolist(), skip_special_tokens=True) for _, r in rows]
    assert len(texts) == 500
    assert sum(map(check_format, texts)) == 200
    right = [check_answer(t, problems[i // 5].ground_truth) for i, t in enumerate(texts)]
    assert 200 <= sum(right) < 250


def test_a_saved_model_is_whole_or_not_there(tokenizer, tmp_path):
    model = demo.build_model(tokenizer, seed=0)
    save_model(model, tokenizer, tmp_path / "model")
    again = load_base(str(tmp_path / "model"), torch.float32)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

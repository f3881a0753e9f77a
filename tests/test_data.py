"""Data sets, prompts and their order."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data import (
    SYSTEM_PROMPT,
    PromptOrder,
    build_prompts,
    is_test,
    load_problems,
    prompt_ids,
    worked_response,
)
from splitgrpo.config import DataError
from utils import check_answer, check_format, reward_function

ROWS = [
    {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
    for i in range(300)
]


def gsm8k_folder() -> Path:
    """Real data, where it is present."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
    folder = Path(os.environ.get("SPLITGRPO_GSM8K", default))
    if not folder.is_dir():
        pytest.skip("skipped: no GSM8K folder; SPLITGRPO_GSM8K names one")
    return folder


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def word_tokenizer(*, bos: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """Splits at whitespace; with `bos` it puts one in front when special tokens are on, as Llama's does."""
    core = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


def test_gsm8k_is_read_whole_and_every_worked_answer_earns_full_reward():
    folder = gsm8k_folder()
    train, test = (load_problems(str(folder), split) for split in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert not {p.question for p in train} & {p.question for p in test}
    for problem in train + test:
        response = worked_response(problem)
        assert check_format(response), response
        assert check_answer(response, problem.ground_truth), response
        assert "<<" not in response
    assert sum("," in p.answer.rpartition("####")[2] for p in train) == 79
    assert sum(p.ground_truth.startswith("-") for p in train + test) == 5


def test_the_embedded_set_is_in_the_same_format_and_splits_do_not_overlap():
    train, test = load_problems("arithmetic", "train"), load_problems("arithmetic", "test")
    assert (len(train), len(test)) == (1096, 200)
    assert not {p.question for p in train} & {p.question for p in test}
    assert train == load_problems("arithmetic", "train")
    for problem in train + test:
        assert problem.answer.endswith(f"#### {problem.ground_truth}")
        assert check_answer(worked_response(problem), problem.ground_truth)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_file_format_gives_the_same_problems(tmp_path, suffix, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from datasets import Dataset

    table, path = Dataset.from_list(ROWS), tmp_path / f"all.{suffix}"
    if suffix == "jsonl":
        write(path, ROWS)
    elif suffix == "json":
        path.write_text(json.dumps(ROWS))
    else:
        getattr(table, f"to_{suffix}")(str(path))
    problems = load_problems(str(path), "train") + load_problems(str(path), "test")
    assert Counter(p.question for p in problems) == Counter(r["question"] for r in ROWS)


def test_one_file_for_both_splits_is_divided_by_the_question_alone(tmp_path):
    doubled = write(tmp_path / "all.jsonl", ROWS + ROWS[::-1])
    train, test = (load_problems(doubled, split) for split in ("train", "test"))
    assert len(train) + len(test) == 600
    assert 30 <= len(test) <= 100
    assert not {p.question for p in train} & {p.question for p in test}
    assert all(is_test(p.question) for p in test)


def test_other_column_names_are_taken_by_flag(tmp_path):
    rows = [{"q": r["question"], "a": r["answer"]} for r in ROWS]
    path = write(tmp_path / "x.jsonl", rows)
    assert load_problems(path, "train", question_column="q", answer_column="a")
    with pytest.raises(
        DataError, match=r"row 1: no column 'question' \(--question_column\); found \['a', 'q'\]"
    ):
        load_problems(path, "train")


def test_a_ground_truth_under_another_name_is_a_hard_error_naming_the_columns_found(tmp_path):
    rows = [{"question": r["question"], "solution": r["answer"]} for r in ROWS]
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=r"no column 'answer' .*found \['question', 'solution'\]"):
        load_problems(path, "train")
    assert all(p.ground_truth for p in load_problems(path, "train", answer_column="solution"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"question": "a", "answer": "no mark"},
            "row 2: column 'answer' has no number after '####'",
        ),
        ({"question": "a", "answer": "x #### none"}, "row 2: column 'answer' has no number"),
        ({"question": "", "answer": "#### 1"}, "row 2: column 'question' is ''"),
        ({"question": None, "answer": "#### 1"}, "row 2: column 'question' is None"),
        ({"question": float("nan"), "answer": "#### 1"}, "row 2: column 'question' is nan"),
        ({"question": True, "answer": "#### 1"}, "row 2: column 'question' is True"),
        ({"question": "a", "answer": "#### \u0663"}, "row 2: column 'answer' has no number"),
        ({"question": "a"}, "row 2: no column 'answer'"),
        ([1], "row 2: expected an object, found list"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, reason):
    with pytest.raises(DataError, match=reason):
        load_problems(write(tmp_path / "x.jsonl", [ROWS[0], row]), "train")


def test_blank_lines_are_no_rows_and_a_small_file_says_how_it_was_split(tmp_path):
    path = write(tmp_path / "x.jsonl", ROWS)
    before = load_problems(path, "train")
    (tmp_path / "x.jsonl").write_text("\n\n" + (tmp_path / "x.jsonl").read_text() + "\n")
    assert load_problems(path, "train") == before
    with pytest.raises(DataError, match="split by the hash of each question"):
        load_problems(
            write(
                tmp_path / "one.jsonl",
                [{"question": before[0].question, "answer": before[0].answer}],
            ),
            "test",
        )


def test_files_and_folders_that_cannot_be_used_are_named(tmp_path):
    cases = {
        str(tmp_path / "none.jsonl"): "no such file",
        str(tmp_path / "none"): "no such folder",
        str(tmp_path): r"expected exactly one of train\{",
    }
    (tmp_path / "empty.csv").touch()
    cases[str(tmp_path / "empty.csv")] = "the file is empty"
    (tmp_path / "torn.jsonl").write_text('{"question": ')
    cases[str(tmp_path / "torn.jsonl")] = "row 1: not JSON"
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    cases[str(tmp_path / "latin.jsonl")] = "not UTF-8"
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    cases[str(tmp_path / "junk.parquet")] = "not readable as parquet"
    for data, reason in cases.items():
        with pytest.raises(DataError, match=reason):
            load_problems(data, "train")


def test_a_hub_set_that_cannot_be_had_says_how_to_give_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(
        DataError,
        match=r"openai/gsm8k \(config main, split train\).*Give a folder with train\.jsonl",
    ):
        load_problems("openai/gsm8k", "train")


@pytest.mark.parametrize("template", [None, CHAT, "<s> " + CHAT])
def test_a_prompt_has_exactly_one_bos_whoever_writes_it(template):
    ids = prompt_ids("what is it", word_tokenizer(bos=True, template=template))
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_a_model_that_uses_no_bos_gets_none():
    assert 0 not in prompt_ids("what is it", word_tokenizer(template=CHAT))


def test_a_chat_prompt_is_a_flat_list_of_ids_and_no_dictionary():
    tokenizer = word_tokenizer(template=CHAT)
    tokenizer.add_tokens(["user", "what", "assistant"])
    ids = prompt_ids("what is it", tokenizer)
    assert all(type(i) is int for i in ids)
    assert len(ids) > 10
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "what is it"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == expected


def test_a_think_tag_that_the_template_writes_is_scored_with_the_completion():
    problems = load_problems("arithmetic", "train")[:1]
    plain, _ = build_prompts(problems, word_tokenizer(template=CHAT), 500)
    filled, _ = build_prompts(
        problems, word_tokenizer(template=CHAT.replace("assistant ", "assistant <think>\n")), 500
    )
    assert plain[0].response_prefix == ""
    assert filled[0].response_prefix == "<think>\n"
    completion = "work</think><answer>4</answer>"
    assert reward_function(filled[0].response_prefix + completion, "4")["format"] == 1.25
    assert reward_function(completion, "4")["format"] == 0.0


def test_a_long_prompt_is_dropped_whole_and_counted():
    problems = load_problems("arithmetic", "train")[:50]
    tokenizer = word_tokenizer(template="{{ messages[1].content }}")
    lengths = [len(prompt_ids(p.question, tokenizer)) for p in problems]
    assert set(lengths) == {16}
    assert build_prompts(problems, tokenizer, 15) == ([], 50)
    kept, dropped = build_prompts(problems, tokenizer, 16)
    assert (len(kept), dropped) == (50, 0)
    assert [len(p.token_ids) for p in kept] == lengths


def test_every_epoch_takes_every_prompt_once_in_another_order():
    order = PromptOrder(20, seed=1, sampler_id=0)
    drawn = [order.at(seq) for seq in range(60)]
    for epoch in range(3):
        assert sorted(p for p, e in drawn if e == epoch) == list(range(20))
    assert [p for p, e in drawn if e == 0] != [p for p, e in drawn if e == 1]


def test_the_order_is_a_function_of_seed_sampler_and_sequence_number_alone():
    one, two = (PromptOrder(20, seed=1, sampler_id=0) for _ in range(2))
    forwards = [one.at(s) for s in range(50)]
    assert forwards == [two.at(s) for s in reversed(range(50))][::-1]
    assert forwards != [PromptOrder(20, seed=2, sampler_id=0).at(s) for s in range(50)]
    assert forwards != [PromptOrder(20, seed=1, sampler_id=1).at(s) for s in range(50)]

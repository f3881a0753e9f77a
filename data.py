"""Problems, and the prompts made of them. Train rows train, test rows evaluate."""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from splitgrpo.config import DataError

SYSTEM_PROMPT = (
    "You solve problems step by step. First think inside <think> and </think>, then give the final "
    "number, and nothing else, inside <answer> and </answer>."
)
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
TEST_PERCENT = 10  # of a single file that is given for both splits


@dataclass(frozen=True)
class Problem:
    """One row: `answer` is the worked answer that ends in "#### 72", `ground_truth` the number after it."""

    question: str
    answer: str
    ground_truth: str


@dataclass(frozen=True, eq=False)
class Prompt:
    """A problem as the model sees it.

    token_ids        (P,) int32, chat template applied, exactly one BOS where the model has one
    response_prefix  what the template already wrote for the model ("<think>\\n"), to be scored with the completion
    """

    prompt_index: int
    token_ids: np.ndarray
    ground_truth: str
    response_prefix: str


def load_problems(
    data: str, split: str, *, question_column: str = "question", answer_column: str = "answer"
) -> list[Problem]:
    """Load the "train" or "test" rows of a data set.

    `data` is "arithmetic" (embedded), a folder with train.* and test.*, one .jsonl/.json/.csv/.parquet file (its
    questions are split by their hash, about one in ten to test), or a hub name such as openai/gsm8k.
    Raises DataError naming the row, or the columns found.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: only train and test are used")
    if data == "arithmetic":
        return arithmetic(split)
    path = Path(data)
    source: object = data
    if path.is_dir():
        source, rows = read_folder(path, split)
    elif path.suffix in SUFFIXES:
        source, rows = path, read_file(path)
    else:
        rows = read_hub(data, split)
    problems = [
        make_problem(row, f"{source}, row {i + 1}", question_column, answer_column)
        for i, row in enumerate(rows)
    ]
    if path.suffix in SUFFIXES:
        problems = [p for p in problems if (split == "test") == is_test(p.question)]
    if not problems:
        split_by = (
            " (a single file is split by the hash of each question)"
            if path.suffix in SUFFIXES
            else ""
        )
        raise DataError(f"{source} holds no {split} rows{split_by}")
    return problems


def make_problem(
    row: dict[str, Any], where: str, question_column: str, answer_column: str
) -> Problem:
    """Check one row. Raises DataError."""
    for column, flag in ((question_column, "question_column"), (answer_column, "answer_column")):
        if column not in row:
            raise DataError(f"{where}: no column {column!r} (--{flag}); found {sorted(row)}")
        if not is_text(row[column]):
            raise DataError(f"{where}: column {column!r} is {row[column]!r}, expected text")
    answer = str(row[answer_column])
    _, marker, gold = answer.rpartition("####")
    gold = gold.strip().replace(",", "").lstrip("$")
    if not marker or not re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+", gold):
        raise DataError(
            f"{where}: column {answer_column!r} has no number after '####': {answer[-60:]!r}"
        )
    return Problem(str(row[question_column]).strip(), answer, gold)


def is_text(value: object) -> bool:
    """Text, or a number as CSV and Parquet columns hold it; no blank, no NaN, no true or false."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    return bool(str(value).strip()) and value == value and str(value) not in ("inf", "-inf")


def read_folder(folder: Path, split: str) -> tuple[Path, list[dict[str, Any]]]:
    """The one file of a split in a folder."""
    found = [folder / f"{split}{s}" for s in SUFFIXES if (folder / f"{split}{s}").exists()]
    if len(found) != 1:
        names = sorted(p.name for p in folder.iterdir())[:10]
        raise DataError(
            f"--data {folder}: expected exactly one of {split}{{{','.join(SUFFIXES)}}}, the folder holds {names}"
        )
    return found[0], read_file(found[0])


def read_file(path: Path) -> list[dict[str, Any]]:
    """Rows of a local file. JSON Lines is read here, so that a broken line can be named; the rest by `datasets`."""
    if not path.exists():
        raise DataError(f"--data {path}: no such file (looked for {path.absolute()})")
    if path.stat().st_size == 0:
        raise DataError(f"--data {path}: the file is empty")
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"--data {path}: not UTF-8: {error}") from error
        return [parse_line(line, path, i) for i, line in enumerate(lines) if line.strip()]
    from datasets import load_dataset

    kind = path.suffix.removeprefix(".")
    try:
        rows = load_dataset(kind, data_files=str(path), split="train")
    except Exception as error:
        raise DataError(f"--data {path}: not readable as {kind}: {error}") from error
    return list(rows)


def parse_line(line: str, path: Path, index: int) -> dict[str, Any]:
    """One line of JSON Lines. Raises DataError with the line's number."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {index + 1}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, row {index + 1}: expected an object, found {type(row).__name__}")
    return row


def read_hub(name: str, split: str) -> list[dict[str, Any]]:
    """Rows of a hub data set; the local cache and HF_HUB_OFFLINE are honoured by `datasets`."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise DataError(
            f"--data {name}: no such folder, no file ending in {', '.join(SUFFIXES)}, and no hub name (owner/name)"
        )
    from datasets import load_dataset

    config = "main" if name == "openai/gsm8k" else None
    try:
        return list(load_dataset(name, config, split=split))
    except Exception as error:
        raise DataError(
            f"--data {name} (config {config}, split {split}) is neither in the local cache nor to be had from the hub. "
            f"Give a folder with train.jsonl and test.jsonl instead. Reason: {str(error).splitlines()[0]}"
        ) from error


def is_test(question: str) -> bool:
    """Whether a question of a single file is held out: by its own text, so that equal questions stay together."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < TEST_PERCENT


# ---- the embedded set: word problems in GSM8K's own format --------------------------------------

NAMES = ("Anna", "Ben", "Cleo", "Dan")
THINGS = ("apples", "books", "coins", "stamps")


def arithmetic(split: str) -> list[Problem]:
    """Sums of two numbers from 1 to 9 as word problems, in a fixed shuffled order: 200 for test, 1,096 to train.

    No question is in both; the same two numbers are, under other names.
    """
    numbers = range(1, 10)
    rows = [(a, b, n, t) for a in numbers for b in numbers for n in NAMES for t in THINGS]
    random.Random(20240817).shuffle(rows)
    return [sum_problem(*row) for row in (rows[:200] if split == "test" else rows[200:])]


def sum_problem(a: int, b: int, name: str, thing: str) -> Problem:
    """One word problem with its worked answer."""
    question = f"{name} has {a} {thing} and gets {b} more . How many {thing} has {name} now ?"
    return Problem(question, f"{a} + {b} = {a + b}\n#### {a + b}", str(a + b))


# ---- prompts ------------------------------------------------------------------------------------


def build_prompts(
    problems: Sequence[Problem], tokenizer: Any, max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """Turn problems into prompts; one that is too long is dropped whole and counted, never cut."""
    prefix = response_prefix(tokenizer)
    prompts = []
    for i, problem in enumerate(problems):
        ids = prompt_ids(problem.question, tokenizer)
        if len(ids) <= max_prompt_tokens:
            prompts.append(Prompt(i, np.array(ids, dtype=np.int32), problem.ground_truth, prefix))
    return prompts, len(problems) - len(prompts)


def messages(question: str) -> list[dict[str, str]]:
    """The conversation that a prompt opens."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def prompt_text(question: str, tokenizer: Any) -> str:
    """The chat template's text, or plain text for a model without one."""
    if tokenizer.chat_template is None:
        return f"{SYSTEM_PROMPT}\n\nQuestion: {question}\n\nResponse: "
    # As text: transformers 5 answers tokenize=True with a dictionary unless told otherwise.
    text = tokenizer.apply_chat_template(
        messages(question), tokenize=False, add_generation_prompt=True
    )
    return str(text)


def prompt_ids(question: str, tokenizer: Any) -> list[int]:
    """Token ids of a prompt with exactly one BOS, where the tokenizer has one that it uses."""
    text = prompt_text(question, tokenizer)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    uses_bos = bos is not None and list(tokenizer("x")["input_ids"])[:1] == [bos]
    if uses_bos and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def response_prefix(tokenizer: Any) -> str:
    """What the chat template writes after the assistant's turn began, such as "<think>\\n"; most write nothing."""
    tail = prompt_text("x", tokenizer)[-40:]
    return "<think>\n" if tail.rstrip().endswith("<think>") else ""


def worked_response(problem: Problem) -> str:
    """The worked answer in the tags, for the warm start; GSM8K's calculator marks <<…>> are taken out."""
    work = re.sub(r"<<[^>]*>>", "", problem.answer.rpartition("####")[0]).strip()
    return f"<think>{work}</think>\n<answer>{problem.ground_truth}</answer>"


class PromptOrder:
    """Which prompt belongs to which sequence number: every epoch a new shuffle, a pure function of its arguments."""

    def __init__(self, num_prompts: int, seed: int, sampler_id: int) -> None:
        """Each sampler walks in an order of its own."""
        self.num_prompts, self.seed, self.sampler_id = num_prompts, seed, sampler_id
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def at(self, seq: int) -> tuple[int, int]:
        """(position in the list of prompts, epoch) of a sequence number."""
        epoch, place = divmod(seq, self.num_prompts)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, self.sampler_id, epoch])
            self._epoch, self._order = epoch, rng.permutation(self.num_prompts)
        return int(self._order[place]), epoch

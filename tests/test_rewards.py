"""What a completion is paid, case by case."""

import threading
import time
from types import SimpleNamespace

import pytest

from splitgrpo.sampler import Sampler
from splitgrpo.scoring import Score
from utils import check_answer, check_format, parse_number, reward_function


def tagged(answer: str, thought: str = "so") -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


def is_right(answer: str, gold: str) -> bool:
    """Whether a completion in the asked format is paid for this answer."""
    return reward_function(tagged(answer), gold)["answer"] == 1.0


# ---- the number ---------------------------------------------------------------------------------


def test_a_thousands_separator_on_either_side_makes_no_difference():
    for answer in ("1,080", "1080"):
        assert is_right(answer, "1,080")
        assert is_right(answer, "1080")
    assert is_right("1,234,567.50", "1234567.5")


def test_a_comma_in_a_sentence_is_no_number():
    assert is_right("is 72 clips, altogether.", "72")
    assert is_right("1, 2", "2")
    assert parse_number(",") is None
    assert parse_number("first, second") is None


def test_a_currency_sign_and_empty_decimals_make_no_difference():
    assert is_right("$29.00", "29")
    assert is_right("18.00", "18")
    assert is_right("€12", "12")
    assert is_right("-$7", "-7")


def test_a_full_stop_or_a_newline_after_the_number_makes_no_difference():
    assert is_right("29.", "29")
    assert is_right("29.\n", "29")


def test_numbers_beyond_the_exact_range_of_floats_are_told_apart():
    assert not is_right("9007199254740993", "9007199254740992")
    assert is_right("9007199254740993", "9007199254740993")
    assert parse_number("0.1") * 10 == 1


def test_a_percent_sign_is_dropped_and_divides_by_nothing():
    assert is_right("28%", "28")
    assert is_right("28\\%", "28")
    assert not is_right("0.28", "28")
    assert not is_right("28%", "0.28")


def test_a_minus_sign_belongs_to_the_number():
    assert is_right("-7", "-7")
    assert is_right("−7", "-7")
    assert not is_right("7", "-7")
    assert not is_right("-7", "7")


def test_the_value_after_the_last_equals_sign_counts_and_a_subtraction_is_no_negative_number():
    assert is_right("10-3=7", "7")
    assert is_right("x = 10 - 3 = 7", "7")
    for answer in ("10-7", "x = 10-7", "x = 10 - 7"):
        assert parse_number(answer) is None
        assert not is_right(answer, "-7")
        assert not is_right(answer, "3")


def test_a_number_in_a_box_or_a_latex_fraction_is_read_with_its_braces_balanced():
    assert is_right(r"\boxed{18}", "18")
    assert is_right(r"\boxed{\frac{36}{2}}", "18")
    assert is_right(r"$\frac{36}{2}$", "18")
    assert not is_right(r"\boxed{18", "17")


def test_a_decimal_comma_is_refused_because_it_could_mean_two_numbers():
    assert parse_number("1,5") is None
    assert not is_right("1,5", "1")
    assert not is_right("1,5", "5")


def test_a_power_tower_is_no_number_and_takes_no_time():
    started = time.perf_counter()
    assert not is_right("5^(5^(5^(5^5)))", "5")
    assert not is_right("9**9**9**9", "9")
    assert not is_right("1e999999999", "999999999")
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("36/2", "18"), ("72 clips", "72"), (" 5 ", "5"), ("+5", "5"), (".5", "0.5"), ("0.50", "1/2"), ("12 km", "12"),
        ("1/2 of 3", "3"),
    ],
)  # fmt: skip
def test_the_same_number_written_otherwise_is_right(answer, gold):
    assert check_answer(tagged(answer), gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("1e3", "1000"), ("", "5"), ("five", "5"), (",", "5"), ("-", "5"), ("1/0", "1"), ("/", "1"), ("1/2/2", "2"),
        ("٥", "5"), ("2*9", "18"), ("2 × 9", "9"), (r"2 \times 9", "9"), ("8 " * 200, "8"), ("1,08", "1"),
        ("1.2.3", "3"), ("12:30", "12"), ("1/2 of 3", "1/2"),
    ],
)  # fmt: skip
def test_another_number_or_none_is_wrong(answer, gold):
    assert not check_answer(tagged(answer), gold)


# ---- where it stands ----------------------------------------------------------------------------


def test_only_the_answer_tag_after_the_thought_is_read():
    assert not check_answer("<think>so 18</think><answer>20</answer>", "18")
    assert not check_answer("<think><answer>18</answer></think>", "18")
    assert not check_answer("18", "18")
    assert not check_answer("<answer>18", "18")
    assert not check_answer("<ANSWER>18</ANSWER>", "18")
    assert check_answer("<answer>3</answer> no, <answer>18</answer>", "18")


def test_a_right_answer_before_a_long_chatter_is_right_and_out_of_format():
    text = tagged("18") + " and so on" * 100
    assert reward_function(text, "18") == {"reward": 1.0, "format": 0.0, "answer": 1.0}


def test_a_recited_example_before_the_answer_is_not_graded():
    recited = "<think>as in <answer>7</answer></think><answer>18</answer>"
    assert check_answer(recited, "18")
    assert not check_answer(recited, "7")
    assert check_answer("<answer> answer here </answer><answer>18</answer>", "18")


# ---- the format ---------------------------------------------------------------------------------


def pays(text: str) -> float:
    return reward_function(text, "4")["format"]


def test_a_closing_tag_written_twice_earns_no_format():
    assert pays("<think>a</think><answer>333</answer></answer>") == 0.0


def test_a_thought_of_several_lines_earns_the_format():
    assert pays("<think>one\ntwo\n\nthree</think><answer>4</answer>") == 1.25


def test_whitespace_between_the_two_parts_is_free_and_text_is_not():
    assert pays("<think>a</think>\n\n<answer>4</answer>") == 1.25
    assert pays("<think>a</think><answer>4</answer>") == 1.25
    assert pays("<think>a</think>so<answer>4</answer>") == 0.0


def test_an_end_marker_left_in_the_text_costs_no_format():
    for marker in ("<|im_end|>", "<|im_end|>\n", "</s>", "<|eot_id|><|endoftext|>"):
        assert pays("<think>a</think><answer>4</answer>" + marker) == 1.25


def test_empty_parts_and_upper_case_tags_earn_nothing():
    for text in ("<think>a</think><answer></answer>", "<think>a</think><answer> \n</answer>",
                 "<THINK>a</THINK><ANSWER>4</ANSWER>"):  # fmt: skip
        assert reward_function(text, "4") == {"reward": 0.0, "format": 0.0, "answer": 0.0}
    assert pays("<think></think><answer>4</answer>") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>1</answer>", "<think>a\nb\n</think>\n\n<answer>1</answer>\n",
        "  <think>a</think> <answer> 1 </answer>", "<think>a</think><answer>1</answer><|im_end|>",
        "<think>a</think><answer>1</answer></s>", "<think>\nwork</think><answer>4</answer><|im_end|>\n<|endoftext|>",
        "<think>2 < 3 and <b></think><answer>1</answer>",
    ],
)  # fmt: skip
def test_the_asked_format_is_paid(text):
    assert check_format(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "<think></think><answer>1</answer>", "<think> \n</think><answer>1</answer>", "<think>a</think><answer></answer>",
        "<think>a</think><answer>333</answer></answer>", "<THINK>a</THINK><ANSWER>5</ANSWER>", "a</think><answer>1</answer>",
        "<think>a</think>so <answer>1</answer>", "x<think>a</think><answer>1</answer>", "<think>a</think><answer>1",
        "<think>a<think>b</think><answer>1</answer>", "<answer>1</answer><think>a</think>", "<answer>1</answer>",
        "<think>a</think><answer>1</answer>.", "<think>a<answer>1</answer></think>",
    ],
)  # fmt: skip
def test_anything_else_is_not(text):
    assert not check_format(text)


# ---- the whole ----------------------------------------------------------------------------------


def test_the_parts_add_up():
    assert reward_function(tagged("18"), "18") == {"reward": 2.25, "format": 1.25, "answer": 1.0}
    assert reward_function(tagged("19"), "18") == {"reward": 1.25, "format": 1.25, "answer": 0.0}
    assert reward_function("no idea", "18") == {"reward": 0.0, "format": 0.0, "answer": 0.0}


def test_a_gold_answer_without_a_number_is_an_error_and_not_a_miss():
    with pytest.raises(ValueError, match="holds no number"):
        check_answer(tagged("1"), "none")


@pytest.mark.parametrize(
    "text",
    [
        "<" * 1_000_000, "<think>" * 200_000,
        "</s>" * 250_000, " " * 1_000_000, "<answer>" + "9" * 1_000_000 + "</answer>",
        "<answer>" + "{" * 250 + "</answer>", "<answer>" + "1," * 120 + "</answer>",
        "<answer>" + "\\boxed{" * 30 + "</answer>",
        "<answer>" + "9" * 250 + "/" + "7" + "</answer>", "<|" + "a" * 999_999, "<answer>" + "1 / " * 60 + "</answer>",
    ],
    ids=range(11),
)  # fmt: skip
def test_hostile_text_is_scored_in_no_time(text):
    started = time.perf_counter()
    assert reward_function(text, "5")["reward"] == 0.0
    assert time.perf_counter() - started < 0.5


def test_scoring_works_from_another_thread():
    out = []
    thread = threading.Thread(target=lambda: out.append(reward_function(tagged("18"), "18")))
    thread.start()
    thread.join()
    assert out[0]["answer"] == 1.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"1{,}080", "1080"), (r"1\,080", "1080"), ("1\u202f080", "1080"), ("–7", "-7"), ("—7", "-7"),
        (r"18^\circ", "18"), (r"18^{\circ}", "18"), ("18°", "18"), (r"\frac12", "1/2"), (r"\frac{36}{2}", "18"),
    ],
)  # fmt: skip
def test_a_number_written_in_latex_or_with_another_dash_is_read_whole(answer, gold):
    assert check_answer(tagged(answer), gold)


@pytest.mark.parametrize(("answer", "gold"), [(r"1{,}080", "80"), ("–7", "7"), ("10–7", "7")])
def test_a_part_of_a_number_is_not_paid(answer, gold):
    assert not check_answer(tagged(answer), gold)


# ---- groups without a difference -----------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_group_of_equal_rewards_is_replaced_but_never_more_than_so_many_in_a_row(limit):
    sampler = SimpleNamespace(
        settings=SimpleNamespace(dynamic_sampling=limit), _in_row=0, num_replaced=0
    )
    equal, differing = (
        [Score(r, {}, False) for r in rewards] for rewards in ((1.25, 1.25), (1.25, 0))
    )

    def replaced(scores):
        return Sampler.is_to_be_replaced(sampler, scores)  # type: ignore[arg-type]

    for _ in range(2):  # what is sent in the end ends the row
        assert [replaced(equal) for _ in range(limit + 1)] == [True] * limit + [False]
    assert not replaced(differing)
    assert sampler.num_replaced == 2 * limit

"""What you edit: the reward of a completion and the loss of a batch.

Shapes: B rows (completions), L length. Position t of every stream speaks of token t.
"""

import re
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from splitgrpo.losses import (
    LossResult,
    cispo_loss,
    clipped_loss,
    dapo_loss,
    dr_grpo_loss,
    finish,
    reinforce_loss,
    sapo_loss,
    sequence_ratio,
    token_kl,
    token_ratio,
)

FORMAT_REWARD, ANSWER_REWARD = 1.25, 1.0
MAX_ANSWER_CHARS = (
    256  # more than this inside <answer> is no answer; it also bounds the time to read it
)

# ---- reward -------------------------------------------------------------------------------------


def reward_function(response: str, answer: str) -> dict[str, float]:
    """Score one completion: 1.25 for the asked format, 1.0 for the right number, 0 for a miss.

    `response` is what the model generated (with "<think>" in front where the chat template put it
    into the prompt), `answer` the gold answer. Return a dict that holds "reward"; other keys are
    logged as its parts. The learner sees no more than this, so anything can be rewarded here.
    """
    format_part = FORMAT_REWARD * check_format(response)
    answer_part = ANSWER_REWARD * check_answer(response, answer)
    return {"reward": format_part + answer_part, "format": format_part, "answer": answer_part}


def check_format(response: str) -> bool:
    """True for <think>something</think><answer>something</answer>, only whitespace around and between.

    Each tag comes exactly once, in lower case; blank contents do not count.
    """
    text = strip_special_tokens(response).strip()
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return False
    thought, _, rest = text.partition("</think>")
    rest = rest.lstrip()
    if not (thought.startswith("<think>") and rest.startswith("<answer>")):
        return False
    inside = rest.removeprefix("<answer>")
    return (
        inside.endswith("</answer>")
        and bool(thought.removeprefix("<think>").strip())
        and bool(inside.removesuffix("</answer>").strip())
    )


def check_answer(response: str, answer: str) -> bool:
    """True if the number in the answer tag equals the gold number, as exact fractions.

    Only the last <answer>…</answer> after the last </think> is read: neither the thought nor the
    prompt can score. Raises ValueError if the gold answer holds no number.
    """
    gold = parse_number(answer)
    if gold is None:
        raise ValueError(f"the gold answer {answer[:80]!r} holds no number")
    spoken = response.rpartition("</think>")[2]
    _, found, inside = spoken.rpartition("<answer>")
    inside, closed, _ = inside.partition("</answer>")
    return bool(found and closed) and parse_number(inside) == gold


def strip_special_tokens(text: str) -> str:
    """Remove end markers such as <|im_end|> and </s> from the end of a text (the last 64 of them)."""
    text = text.rstrip()
    for _ in range(64):
        start = text.rfind("<")
        if start < 0 or not SPECIAL.fullmatch(text, start):
            break
        text = text[:start].rstrip()
    return text


SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>|</s>")
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# Not inside of a longer run of digits, commas and points: "1,5" is no number, it could mean two.
NUMBER = re.compile(
    rf"(?<![0-9])(?<![0-9][.,])(-?)({DIGITS})(?:\s*/\s*({DIGITS}))?(?![0-9]|[.,][0-9])"
)
FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}\{([^{}]+)\}|\s?([0-9])([0-9]))")
# LaTeX's ways to write 1,080, and its degree sign; a comma is kept.
THIN_SPACE = re.compile(
    r"\{(,)\}|\\[!,;:]|[\u00a0\u2009\u202f](?=[0-9]{3})|\^\s*(?:\\circ|\{\s*\\circ\s*\})"
)
EXPRESSION = re.compile(
    r"[0-9)]\s*(?:[-+*^×·÷]|\\times|\\cdot|\*\*)\s*[0-9(.]|[0-9][eE][-+]?[0-9]|\^|/\s*[0-9.,]+\s*/"
)


def parse_number(text: str) -> Fraction | None:
    r"""Read the number that a text ends on: "$1,080.00" -> 1080, "10-3=7" -> 7, "\boxed{36/2}" -> 18.

    Currency signs and % are dropped (28% is 28, not 0.28), units and a final full stop ignored; of
    several numbers the last counts. An expression that was left to compute ("10-7", "5^5") is no
    number: None.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = re.sub("[−–—]", "-", unbox(text).rpartition("=")[2])  # every dash is a minus
    text = THIN_SPACE.sub(r"\1", text)
    text = FRACTION.sub(r"\1\3/\2\4", text)
    text = re.sub(r"\\?[$€£¥%]", "", text)
    if EXPRESSION.search(text):
        return None
    found = NUMBER.findall(text)
    if not found:
        return None
    sign, top, bottom = found[-1]
    value, below = Fraction(top.replace(",", "")), Fraction((bottom or "1").replace(",", ""))
    return Fraction(f"{sign}1") * value / below if below else None


def unbox(text: str) -> str:
    r"""The inside of the last \boxed{…}, braces balanced, or the text itself."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i]
    return text


# ---- advantages and losses ----------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, group_size: int, eps: float = 1e-4, estimator: str = "group"
) -> Tensor:
    """(S,) rewards, group after group -> (S,) float32 advantages: how much better than its group's mean each one is.

    estimator "group": (r - mean) / (std + eps) (DeepSeekMath, arXiv 2402.03300, section 4.1) · "batch": the same with the
    std of the whole step · "none": r - mean (Dr. GRPO, arXiv 2503.20783) · "rloo": r - mean of the others, which is
    (r - mean) * G / (G - 1) (arXiv 2402.14740). std has ddof 1; equal rewards give exact zeros.
    Raises ValueError for a reward that is not finite, a group of one, or rows that are not groups.
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are not groups of {group_size} (at least 2)")
    if not torch.isfinite(rewards).all():
        bad = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards[bad].item()}")
    r = rewards.detach().double().view(-1, group_size)
    better = r - r.mean(dim=1, keepdim=True)
    if estimator == "group":
        better = better / (r.std(dim=1, keepdim=True) + eps)
    elif estimator == "batch":
        better = better / (r.std() + eps)
    elif estimator == "rloo":
        better = better * group_size / (group_size - 1)
    elif estimator != "none":
        raise ValueError(f"estimator {estimator!r} is none of group, batch, none, rloo")
    equal = (r == r[:, :1]).all(dim=1, keepdim=True)
    return better.masked_fill(equal, 0.0).flatten().float()


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    kl_coef: float = 0.04,
    denominator: float | None = None,
    aggregation: str = "sequence",
    dual_clip: float | None = None,
) -> LossResult:
    """GRPO: a clipped ratio for every token (DeepSeekMath, arXiv 2402.03300, equation 3).

    Streams are (B, L) float32 nats, completion_mask (B, L) bool, advantages (B,), or (B, L) with a weight for each token.
    ref_logprobs may be None: no KL. `aggregation` says what the sum over tokens is divided by (`losses.aggregate`),
    `denominator` is that number of the whole optimizer step, so that micro-batches add up; None: this batch's own.
    Returns the loss (a scalar, nats) and sums for the metrics (`losses.finish`).
    """
    ratio = token_ratio(logprobs, old_logprobs, completion_mask)  # (B, L)
    policy, clipped = clipped_loss(ratio, advantages, clip_eps, clip_eps_high, dual_clip)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, clipped, kl, kl_coef, completion_mask, aggregation, denominator)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    clip_eps: float = 3e-4,
    clip_eps_high: float | None = 4e-4,
    kl_coef: float = 0.0,
    denominator: float | None = None,
    aggregation: str = "sequence",
    dual_clip: float | None = None,
) -> LossResult:
    """GSPO: one clipped ratio for a whole completion (arXiv 2507.18071, equations 5 to 7).

    The ratio is the geometric mean of the token ratios, so it stays far closer to 1 than theirs:
    hence clip bounds of 3e-4 and 4e-4. Arguments and result as in `grpo_loss`.
    """
    ratio = sequence_ratio(logprobs, old_logprobs, completion_mask)  # (B, L), equal along L
    policy, clipped = clipped_loss(ratio, advantages, clip_eps, clip_eps_high, dual_clip)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return finish(policy, ratio, clipped, kl, kl_coef, completion_mask, aggregation, denominator)


LOSSES: dict[str, Callable[..., LossResult]] = {
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "dr_grpo": dr_grpo_loss,
    "dapo": dapo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
}

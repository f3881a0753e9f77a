"""What you edit: the reward of a completion and the loss of a batch.

Shapes: B rows (completions), L length. Position t of every stream speaks of token t.
"""

import re
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

FORMAT_REWARD, ANSWER_REWARD = 1.25, 1.0
MAX_ANSWER_CHARS = (
    256  # more than this inside <answer> is no answer; it also bounds the time to read it
)
MAX_LOG_RATIO = 20.0  # exp() of more overflows float32 into NaN gradients

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
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
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
    text = unbox(text).rpartition("=")[2].replace("−", "-").replace("\\!", "")
    text = FRACTION.sub(r"\1/\2", text)
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


def group_advantages(rewards: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    """(S,) rewards, group after group -> (S,) float32 advantages (r - mean) / (std + eps) in each group.

    std has ddof 1; equal rewards give exact zeros. DeepSeekMath, arXiv 2402.03300, section 4.1.
    Raises ValueError for a reward that is not finite, a group of one, or rows that are not groups.
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are not groups of {group_size} (at least 2)")
    if not torch.isfinite(rewards).all():
        bad = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards[bad].item()}")
    r = rewards.detach().double().view(-1, group_size)
    scaled = (r - r.mean(dim=1, keepdim=True)) / (r.std(dim=1, keepdim=True) + eps)
    equal = (r == r[:, :1]).all(dim=1, keepdim=True)
    return scaled.masked_fill(equal, 0.0).flatten().float()


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """GRPO: a clipped ratio for every token (DeepSeekMath, arXiv 2402.03300, equation 3).

    Streams are (B, L) float32 nats, completion_mask (B, L) bool, advantages (B,). ref_logprobs may
    be None: no KL. `denominator` is the number of completions of the whole optimizer step, so that
    micro-batches add up; None means this batch's own.
    Returns the loss (a scalar, nats) and sums for the metrics; see `aggregate`.
    """
    log_ratio = masked(logprobs - old_logprobs, completion_mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (B, L)
    clip = (clip_eps, clip_eps if clip_eps_high is None else clip_eps_high)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return aggregate(ratio, advantages, completion_mask, clip, kl, kl_coef, denominator)


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO: one clipped ratio for a whole completion (arXiv 2507.18071, equations 5 to 7).

    The ratio is the geometric mean of the token ratios, so it stays far closer to 1 than theirs:
    hence clip bounds of 3e-4 and 4e-4. Arguments and result as in `grpo_loss`.
    """
    log_ratio = masked(logprobs - old_logprobs, completion_mask)
    mean = log_ratio.sum(dim=1, keepdim=True) / lengths(completion_mask)[:, None]  # (B, 1)
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(logprobs)
    clip = (clip_eps, clip_eps if clip_eps_high is None else clip_eps_high)
    kl = token_kl(logprobs, ref_logprobs, completion_mask) if kl_coef else None
    return aggregate(ratio, advantages, completion_mask, clip, kl, kl_coef, denominator)


LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "grpo": grpo_loss,
    "gspo": gspo_loss,
}


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values on the mask, 0 with gradient exactly 0 elsewhere, whatever stood there."""
    return values.masked_fill(~mask, 0.0)


def lengths(mask: Tensor) -> Tensor:
    """(B,) sampled tokens of each row, at least 1."""
    return mask.sum(dim=1).clamp(min=1)


def token_kl(logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor) -> Tensor | None:
    """k3 = exp(f - lp) - (f - lp) - 1 for each token, never negative; None without a reference."""
    if ref_logprobs is None:
        return None
    gap = masked(ref_logprobs - logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return gap.exp() - gap - 1.0


def aggregate(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: tuple[float, float],
    kl: Tensor | None,
    kl_coef: float,
    denominator: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip, add the KL, take the mean over each row's tokens, then the sum of rows over `denominator`.

    Metrics are detached sums over this batch (ratio_max a maximum), for the learner to add up over
    micro-batches and ranks: kl_sum is over rows (mean over tokens each) and absent without a KL, the others over tokens.
    """
    low, high = 1.0 - clip[0], 1.0 + clip[1]
    a = advantages[:, None]  # (B, 1)
    per_token = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)  # (B, L)
    if kl is not None:
        per_token = per_token + kl_coef * kl
    per_row = masked(per_token, mask).sum(dim=1) / lengths(mask)  # (B,)
    num_rows = mask.any(dim=1).sum()
    loss = per_row.sum() / max(1.0, float(num_rows) if denominator is None else denominator)
    seen = masked(ratio.detach(), mask)
    outside = mask & ((ratio < low) | (ratio > high))
    metrics = {
        "clipped_sum": outside.sum().float(),
        "ratio_sum": seen.sum(),
        "ratio_max": torch.cat([seen.flatten(), seen.new_zeros(1)]).max(),
        "num_tokens": mask.sum().float(),
        "num_sequences": num_rows.float(),
    }
    if kl is not None:
        metrics["kl_sum"] = (masked(kl, mask).sum(dim=1) / lengths(mask)).detach().sum()
    return loss, metrics

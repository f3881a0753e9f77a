"""Calls the user's reward_function and checks what it returns, so that a fault in it is seen and not trained on."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitgrpo.config import SettingsError

MAX_ERRORS_IN_ROW = 10
MAX_PARTS, MAX_PART_CHARS = 64, 100  # what the learner takes
MAX_VALUE = 1e30  # far above it a reward is infinite in float32


@dataclass(frozen=True)
class Score:
    """reward and parts as `reward_function` returned them; correct from `check_answer`, which no reward can bend."""

    reward: float
    parts: dict[str, float]
    correct: bool


class Scorer:
    """Scores completions.

    A call that raises, or returns a NaN or a value beyond MAX_VALUE, counts as 0 for that completion, is counted and logged.
    """

    def __init__(
        self,
        reward_function: Callable[[str, str], Mapping[str, Any]],
        check_answer: Callable[[str, str], bool],
        log: logging.Logger,
    ) -> None:
        self.reward_function, self.check_answer, self.log = reward_function, check_answer, log
        self.errors = 0
        self._in_row = 0

    def score_group(self, responses: list[str], ground_truth: str) -> list[Score]:
        """Score the completions of one prompt; all get the same part names, absent ones are 0.0.

        Raises SettingsError when reward_function does not return a dict with `reward`, names parts that cannot be
        sent, or fails MAX_ERRORS_IN_ROW times in a row.
        """
        scores = [self.score(text, ground_truth) for text in responses]
        names = list(dict.fromkeys(name for s in scores for name in s.parts))
        check_names(names)
        return [Score(s.reward, {n: s.parts.get(n, 0.0) for n in names}, s.correct) for s in scores]

    def score(self, response: str, ground_truth: str) -> Score:
        """Score one completion. An exception of `check_answer` is no fault of the reward and is not caught."""
        correct = bool(self.check_answer(response, ground_truth))
        try:
            result = self.reward_function(response, ground_truth)
        except Exception as error:
            self._count(f"reward_function raised {error!r}", response, exc_info=True)
            return Score(0.0, {}, correct)
        if not isinstance(result, Mapping) or "reward" not in result:
            raise SettingsError(
                f"reward_function in utils.py returned {result!r}; it must return a dict that holds 'reward', such as "
                '{"reward": 1.0}'
            )
        try:
            values = {name: float(value) for name, value in result.items()}
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"reward_function in utils.py returned {result!r}: every value must be a number"
            ) from error
        if not all(math.isfinite(v) and abs(v) <= MAX_VALUE for v in values.values()):
            self._count(f"reward_function returned {result!r}", response)
            return Score(0.0, {}, correct)
        self._in_row = 0
        reward = values.pop("reward")
        return Score(reward, values, correct)

    def _count(self, what: str, response: str, exc_info: bool = False) -> None:
        self.errors += 1
        self._in_row += 1
        if self._in_row >= MAX_ERRORS_IN_ROW:
            raise SettingsError(
                f"{what}, the {self._in_row}th time in a row; last response: {response[:200]!r}. Mend reward_function "
                "in utils.py."
            )
        self.log.warning(
            "%s (%d so far; counted as reward 0) on %r",
            what, self.errors, response[:200], exc_info=exc_info,
        )  # fmt: skip


def check_names(names: list[Any]) -> None:
    """Refuse reward parts that the learner would not take. Raises SettingsError."""
    for name in names:
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or not 1 <= len(name) <= MAX_PART_CHARS
        ):
            raise SettingsError(
                f"reward_function in utils.py returned a part named {str(name)[:MAX_PART_CHARS]!r} ({type(name).__name__}): "
                f"names are printable text of at most {MAX_PART_CHARS} characters"
            )
    if len(names) > MAX_PARTS:
        raise SettingsError(
            f"reward_function in utils.py returned {len(names)} parts for one group, allowed are {MAX_PARTS}"
        )

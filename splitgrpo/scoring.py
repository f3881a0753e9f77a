"""Scores completions with the user's reward_function, so that no fault in it harms the run or is trained on."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitgrpo.config import SettingsError
from splitgrpo.reward_child import BadResult, check_count
from splitgrpo.reward_process import RewardFault, RewardProcess, locate

MAX_FAILURES_IN_ROW = 10  # groups


@dataclass(frozen=True)
class Score:
    """reward and parts as `reward_function` returned them; correct from `check_answer`, which no reward can bend."""

    reward: float
    parts: dict[str, float]
    correct: bool


class Scorer:
    """Scores groups of completions; reward_function runs in a child process that is replaced after a fault.

    A group is dropped as a whole when one of its calls fails: without one of its rewards it has no baseline. For one thread,
    as `RewardProcess` is.
    """

    def __init__(
        self,
        reward_function: Callable[[str, str], Mapping[str, Any]],
        check_answer: Callable[[str, str], bool],
        log: logging.Logger,
        *,
        timeout_s: float,
        on_wait: Callable[[], None],
    ) -> None:
        """Start the child, which imports the function while other work goes on; the first group waits for it.

        `timeout_s` is for one completion. `on_wait` is called at least every 0.2 s in any wait and may raise Stopped.
        Raises SettingsError for a function that cannot be imported by name.
        """
        self.check_answer, self.log, self.timeout_s = check_answer, log, timeout_s
        self.failures = 0  # groups dropped so far
        self._in_row = 0
        self._seen: Counter[str] = Counter()
        self._on_wait = on_wait
        self._process = RewardProcess(locate(reward_function), on_wait)

    def score_group(self, responses: list[str], ground_truth: str) -> list[Score] | None:
        """Score the completions of one prompt; all get the same part names, absent ones are 0.0.

        None: the group has to be dropped, because a call raised, took longer than timeout_s, ended its process or returned
        no mapping of finite numbers with a `reward`. Raises SettingsError after MAX_FAILURES_IN_ROW such groups in a row, or
        when the function's module cannot be imported, and what on_wait raises. An exception of `check_answer` is not caught.
        """
        self._on_wait()
        if self._process.ended():
            if not self._process.killed:  # or what it did has been said
                self.log.info(
                    "reward_function gets a new process, its last one %s",
                    self._process.how_it_ended(),
                )
            self._process.kill()
            self._process = RewardProcess(self._process.target, self._on_wait)
        results = []
        try:
            for text in responses:
                self._on_wait()
                results.append(self._process.call(text, ground_truth, self.timeout_s))
            names = list(dict.fromkeys(name for r in results for name in r if name != "reward"))
            check_count(dict.fromkeys(names, 0.0))
        except RewardFault as fault:
            self._count(fault.kind, fault.text, responses[len(results)])
            return None
        except BadResult as error:
            self._count("returned no reward", f"in one group it returned {error}", responses[-1])
            return None
        self._in_row = 0
        return [
            Score(
                r["reward"],
                {n: r.get(n, 0.0) for n in names},
                bool(self.check_answer(text, ground_truth)),
            )
            for text, r in zip(responses, results, strict=True)
        ]

    def close(self) -> None:
        """End the child, within 2 s whatever user code does."""
        self._process.close()

    def _count(self, kind: str, text: str, response: str) -> None:
        self.failures += 1
        self._in_row += 1
        self._seen[kind] += 1
        count = self._seen[kind]
        if self._in_row >= MAX_FAILURES_IN_ROW:
            raise SettingsError(
                f"reward_function failed on {self._in_row} groups in a row; the last time it {kind}: {text}\nResponse: "
                f"{response[:200]!r}. Mend reward_function in utils.py; --reward_timeout_s gives a slow one more time."
            )
        if count == 1:
            self.log.warning(
                "reward_function %s (this group is dropped) on %r: %s", kind, response[:200], text
            )
        elif count == 10 ** (len(str(count)) - 1):
            self.log.warning("reward_function %s on %d groups so far", kind, count)

"""Watching a run: log lines, metrics.jsonl, a progress bar, and a picture of the curves."""

import collections
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from splitgrpo.files import append_line

QUIET = ("DeepSpeed", "deepspeed", "transformers", "peft", "datasets", "urllib3", "httpx",
         "huggingface_hub", "matplotlib", "torch.distributed", "filelock", "fsspec", "vllm")  # fmt: skip

MAX_WAITING = 1000  # rows

log = logging.getLogger("monitor")


def setup_logging(prefix: str, *, verbose: bool) -> None:
    """Log to stderr as "HH:MM:SS [prefix] text"; other libraries speak from ERROR on, unless `verbose`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{prefix}] %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
        # DeepSpeed sets its level again when it is imported; a filter stays.
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    if "transformers" in sys.modules:  # imported before the environment above could tell it
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


class MetricsWriter:
    """Appends one JSON object a step. A full disk is said once; its rows follow when there is room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: collections.deque[dict[str, Any]] = collections.deque(maxlen=MAX_WAITING)
        self._failed = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one line whole; a number that is not finite becomes null, because JSON has none."""
        self._waiting.append(
            {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in row.items()
            }
        )
        try:
            self.flush()
        except OSError as error:
            if not self._failed:
                log.warning("metrics cannot be written now to %s: %s", self.path, error)
            self._failed = True

    def flush(self) -> None:
        """Write what waits for room. Raises OSError."""
        while self._waiting:
            append_line(self.path, self._waiting[0])
            self._waiting.popleft()
        self._failed = False


class MetricsReader:
    """Reads what was appended to a metrics file since the last call, from its start when another file took its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def new_rows(self) -> list[dict[str, Any]]:
        """Complete new lines; a file that is not there yet, or a line half written, is not an error."""
        try:
            if self._file is None or not os.path.samestat(
                os.fstat(self._file.fileno()), self.path.stat()
            ):
                self.close()
                self._file = self.path.open("rb")
        except FileNotFoundError:
            return []
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # somebody cut it
        at = self._file.tell()
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._file.seek(at + len(whole))
        rows = []
        for line in whole.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # cut in its middle, and written on; this is for people to look at
        return rows

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def number(row: Mapping[str, Any], name: str, spec: str) -> str:
    """A metric as text, a dash where there is none."""
    value = row.get(name)
    return "-" if value is None else format(value, spec)


def step_line(row: Mapping[str, Any]) -> str:
    """One line a step, fixed columns; README, "Metrics", explains each."""
    parts = " ".join(
        f"{name.removeprefix('reward/')} {number(row, name, '.2f')}"
        for name in row
        if name.startswith("reward/")
    )
    columns = [
        f"step {row['step']:>4}/{row.get('max_steps', '?')}",
        f"reward {number(row, 'reward', '5.2f')}" + (f" ({parts})" if parts else ""),
        f"acc {number(row, 'accuracy', '4.0%')}",
        f"kl {number(row, 'kl', '.4f')}",
        f"clip {number(row, 'clip_frac', '.3f')}",
        f"|g| {number(row, 'grad_norm', '.3f')}",
        f"lr {number(row, 'lr', '.1e')}",
        f"stale {number(row, 'staleness_mean', '.1f')}",
        f"{number(row, 'tokens_per_s', '5.0f')} tok/s",
        f"{number(row, 'step_s', '.1f')} s (wait {number(row, 'wait_s', '.1f')})",
    ]
    return " | ".join(columns)


class ProgressBar:
    """A bar with reward, accuracy, KL, staleness and ETA; without a terminal, a plain line every few seconds instead."""

    PLAIN_EVERY_S = 10.0

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._row: Mapping[str, Any] = {}
        self._last_row = self._last_said = self._started = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TextColumn("ETA"),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("starting both workers", total=self.max_steps)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def describe(self) -> str:
        """The numbers beside the bar."""
        row = self._row
        return (
            f"reward {number(row, 'reward', '.2f')} acc {number(row, 'accuracy', '.0%')} "
            f"kl {number(row, 'kl', '.3f')} stale {number(row, 'staleness_mean', '.1f')}"
        )

    def update(self, row: Mapping[str, Any]) -> None:
        """Take in one step."""
        self._row, self._last_row = row, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], description=self.describe())
        self.tick()

    def tick(self) -> None:
        """Call often: says where the run is, also when it stands still."""
        now = time.monotonic()
        if self._bar is not None or now - self._last_said < self.PLAIN_EVERY_S:
            return
        self._last_said = now
        step = self._row.get("step", 0)
        if not step:
            log.info("no step yet (%.0f s)", now - self._started)
            return
        eta_s = (self.max_steps - step) * (self._last_row - self._started) / step
        log.info(
            "step %d/%d, %s, last step %.0f s ago, ETA %.0f s",
            step, self.max_steps, self.describe(), now - self._last_row, eta_s,
        )  # fmt: skip


# Panels of the picture: title, y label, metrics drawn in it.
PANELS = (
    ("Reward", "reward", ("reward", "reward/*")),
    ("Accuracy of sampled completions", "share right", ("accuracy", "truncated_frac")),
    ("KL, entropy, mismatch", "nats a token", ("kl", "entropy", "mismatch_mean")),
    ("Clipping and gradient", "share / norm", ("clip_frac", "grad_norm")),
    ("Staleness", "versions / share", ("staleness_mean", "staleness_max", "zero_std_frac")),
    ("Speed", "seconds", ("step_s", "wait_s", "train_s")),
)


def plot_curves(metrics_path: Path, png_path: Path) -> None:
    """Draw the metrics of a run; works on an empty file too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = MetricsReader(metrics_path).new_rows()
    names = list(dict.fromkeys(name for row in rows for name in row))
    figure, axes = plt.subplots(2, 3, figsize=(15, 7), layout="constrained")
    for axis, (title, label, wanted) in zip(axes.flat, PANELS, strict=True):
        drawn = [
            n
            for w in wanted
            for n in names
            if n == w or (w == "reward/*" and n.startswith("reward/"))
        ]
        for name in drawn:
            points = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
        axis.set(title=title, xlabel="optimizer step", ylabel=label)
        axis.grid(alpha=0.3)
        if drawn:
            axis.legend(fontsize="small")
    figure.savefig(png_path, dpi=100)
    plt.close(figure)

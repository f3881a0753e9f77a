"""What a measurement asks of the machine: memory, cores, and what other processes take of them. Standard library only."""

import os
import time
from pathlib import Path

QUIET_SHARE = 0.1  # of the cores, used by others, at most


def status_mib(field: str, pid: int | str = "self") -> float:
    """VmHWM, VmRSS … of a process in MiB; 0.0 where it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def peak_rss_mib() -> float:
    """Largest resident size of this process so far, its ended children's included."""
    import resource

    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return max(status_mib("VmHWM"), children)


def reset_peak() -> float:
    """Start the peak anew from what is resident now, in MiB, where the system allows it; returns the level to subtract."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return status_mib("VmHWM")  # then only what goes above the peak of loading counts
    return status_mib("VmRSS")


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds that all processes of this machine have used, and those of this one's ended children."""
    import resource

    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, _ = (int(f) / os.sysconf("SC_CLK_TCK") for f in fields)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return user + nice + system + irq + softirq, children.ru_utime + children.ru_stime


class Others:
    """What processes other than the measured one take of the cores, from its making on."""

    def __init__(self) -> None:
        self.started, self.before = time.monotonic(), cpu_seconds()

    def others_share(self) -> float:
        """Of all cores, 0 to 1; the measured child has ended."""
        took_s = max(1e-3, time.monotonic() - self.started)
        busy, own = (now - then for now, then in zip(cpu_seconds(), self.before, strict=True))
        return max(0.0, busy - own) / (took_s * (os.cpu_count() or 1))


def wait_for_quiet() -> None:
    """Where SPLITGRPO_BENCH_PATIENCE_S is set, wait at most so long for other processes to leave the cores alone."""
    deadline = time.monotonic() + float(os.environ.get("SPLITGRPO_BENCH_PATIENCE_S", "0"))
    while time.monotonic() < deadline:
        others = Others()
        time.sleep(2.0)
        if others.others_share() < QUIET_SHARE:
            return


def all_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load_1m() -> float:
    """The machine's load average of the last minute."""
    return os.getloadavg()[0]

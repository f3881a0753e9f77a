"""training_worker.py, but the last rank is killed at the moment when it is to give its part of step 3's checkpoint."""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from splitgrpo.process import begin_process

if __name__ == "__main__":
    begin_process()

import training_worker
from splitgrpo import checkpoints
from splitgrpo.process import end_process

real = checkpoints.rng_states


def rng_states(ranks):
    """The last collective of a save."""
    if ranks.rank == ranks.num_ranks - 1 and os.environ.get("DIES") == str(rng_states.calls):
        os.kill(os.getpid(), signal.SIGKILL)
    rng_states.calls += 1
    return real(ranks)


rng_states.calls = 0
checkpoints.rng_states = rng_states

if __name__ == "__main__":
    end_process(training_worker.main())

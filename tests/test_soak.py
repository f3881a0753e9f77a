"""Two minutes of random kills of everything that takes part, then the audit."""

import pytest
from soak import soak


@pytest.mark.timeout(600)
def test_everything_is_killed_at_random_and_every_group_is_accounted_for(tmp_path):
    """tests/soak.py in long: bash run.sh soak --minutes 30."""
    books = soak(tmp_path / "soak", minutes=2.0, seed=0)
    assert books["blows"] >= 6
    assert books["restarts"] >= 2

"""A short run of the fuzzing campaign: its mutations find nothing."""

import tempfile

import pytest

from campaigns import fuzz_seeds
from campaigns.fuzz import Bench
from campaigns.fuzz_oracles import Watch
from campaigns.fuzz_targets import TARGETS

pytestmark = pytest.mark.requires_backend("tensorflow", reason="readers are the same on each backend")

MUTATIONS = 6
"""Number of executions of each target; `make fuzz` runs tens of thousands."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Return a function that creates the bench of a target, all with one watch."""
    folder = tmp_path_factory.mktemp("fuzz")
    before = tempfile.tempdir
    (folder / "run").mkdir()
    fuzz_seeds.trained(folder / "run")
    fuzz_seeds.save(folder / "run", folder / "seeds")
    watch = Watch(folder / "bench" / "inputs")
    made: dict[str, Bench] = {}

    def make(name):
        if name not in made:
            made[name] = Bench(TARGETS[name], folder / "bench", watch)
        return made[name]

    yield make
    tempfile.tempdir = before


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(bench, name):
    """Files of a run, and mutations of them, are read or rejected, without any other effect."""
    if name == "orbax":
        pytest.importorskip("tensorstore")
    made = bench(name)
    for number, seed in enumerate(made.seeds):
        assert made.run(seed, commands=number == 0) == []
    recipe = None
    for number in range(MUTATIONS):
        recipe = made.mutated(recipe if number % 3 else None, number)
        assert made.run(recipe, commands=False) == [], recipe
    assert made.executions > MUTATIONS // 2

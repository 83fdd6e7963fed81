"""Copies of the state are made only if they fit into memory, and a run without them continues."""


import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._core import memory

MB = 1 << 20


def files(root, **contents):
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


STATUS = "Name:\tpython\nVmPeak:\t 9000 kB\nVmSize:\t 8000 kB\nVmHWM:\t 3000 kB\nVmRSS:\t 2000 kB\nVmData:\t 1000 kB\n"


class TestRoom:
    def test_of_the_machine(self, tmp_path):
        """The available memory, less how far the process now is below its own peak."""
        assert memory.room(tmp_path) == np.inf
        files(tmp_path, proc__meminfo="MemTotal: 900000 kB\nMemAvailable: 500000 kB\n")
        assert memory.room(tmp_path) == 500000 << 10
        files(tmp_path, proc__self__status=STATUS)
        assert memory.room(tmp_path) == (500000 - 1000) << 10

    @pytest.mark.parametrize("nested", [False, True])
    def test_of_a_container(self, tmp_path, nested):
        """The tightest limit of all cgroups up to the root counts; cached files count as free."""
        files(tmp_path, proc__meminfo="MemAvailable: 500000 kB\n", proc__self__cgroup="0::/a/b\n" if nested else "0::/\n")
        group = tmp_path / "sys/fs/cgroup"
        files(group, **{"memory.max": f"{100 * MB}\n", "memory.current": f"{60 * MB}\n"})
        files(group, **{"memory.stat": f"anon {50 * MB}\ninactive_file {6 * MB}\nactive_file {4 * MB}\nslab 9\n"})
        assert memory.room(tmp_path) == 50 * MB
        files(group / "a", **{"memory.max": f"{40 * MB}\n", "memory.current": f"{10 * MB}\n"})
        files(group / "a/b", **{"memory.max": "max\n", "memory.current": f"{10 * MB}\n"})
        assert memory.room(tmp_path) == (30 if nested else 50) * MB

    def test_exhausted(self):
        """The errors of Python and the backends for exhausted memory, and other errors."""
        for error in (MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes"), RuntimeError("std::bad_alloc")):
            assert memory.is_exhausted(error)
        assert memory.is_exhausted(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"))
        assert not memory.is_exhausted(OSError(28, "No space left on device"))


def trained(guard, bad=(), build=zoo.plain, epochs=1):
    data = zoo.regression(batches=20)
    for step in bad:
        zoo.poison(data, step)
    return zoo.run(build, data, guard=guard, epochs=epochs)


OFTEN = {"every": 4, "verify_after": 1}


class TestFit:
    @pytest.mark.usefixtures("snapshots_kept")
    def test_without_any_copy(self, room, capsys):
        """The run has the same numbers, and each message is printed once."""
        expected = trained(NanGuard(snapshot=OFTEN, verbose=0))
        room(0)
        guard = NanGuard(snapshot=OFTEN)
        assert zoo.differences(trained(guard), expected) == []
        said = capsys.readouterr().out
        assert said.count("NanGuard: no snapshot of the state before the first step: ") == 1
        assert said.count("NanGuard: no snapshot: a copy takes ") == 1
        assert said.count(" free at the peak of the process.\n") == 2, "the process may use less now"
        assert guard.session.run.ring.snapshots == [] and "Traceback" not in said

    def test_steps_are_refused_all_the_same(self, room):
        """No step is replayed, as the incident states; actions that need a snapshot are skipped."""
        room(0)
        guard = NanGuard(snapshot=OFTEN, verbose=0)
        run = trained(guard, bad=(6, 7, 8, 9))
        assert guard.session.run.counts.refused == 4 and zoo.bad_entries(run.model) == []
        assert guard.incidents[0].diagnosis.cause == "input_nonfinite"
        assert any("was not replayed" in text for text in guard.incidents[0].diagnosis.evidence)
        skipped = [o for i in guard.incidents for o in i.outcomes if o.action == "rollback"]
        assert all(o.status == "skipped" and "no verified snapshot" in o.detail for o in skipped)

    def test_a_divergence_is_not_tried(self, room, capsys):
        """A run that diverges ends, because nothing can be done without a copy."""

        def unbounded():
            body = [layers.Dense(8, activation="relu"), layers.Dense(1)]
            model = keras.Sequential([keras.Input((6,)), *body])
            model.compile(keras.optimizers.SGD(3.0), "mse")
            return model

        room(0)
        run = trained(NanGuard(snapshot=OFTEN), build=unbounded, epochs=8)
        assert run.model.stop_training and zoo.bad_entries(run.model) == []
        assert capsys.readouterr().out.count("no other learning rate is tried") <= 1

    @pytest.mark.usefixtures("snapshots_kept")
    def test_one_copy(self, room, capsys):
        """The newest one replaces the previous one, without a line."""
        guard = NanGuard(snapshot=OFTEN)
        room(lambda: np.inf if guard.session.run.step < 8 else 0)
        trained(guard)
        assert "NanGuard" not in capsys.readouterr().out
        assert len([s for s in guard.session.run.ring.snapshots if s.step]) == 1

    def test_rollback_from_files_alone(self, room, tmp_path):
        room(500)  # for writing the largest variable, and for no copy of all of them
        rule = {"name": "back", "site": "inputs", "do": "rollback"}
        snapshot = {**OFTEN, "storage": "disk"}
        guard = NanGuard(rules=[rule], snapshot=snapshot, directory=tmp_path)
        run = trained(guard, bad=(11,))
        assert "restored the state after 8 steps" in str(guard.incidents[0])
        assert zoo.bad_entries(run.model) == []
        assert sorted(p.name for p in (tmp_path / "snapshots").glob("snapshot-*"))

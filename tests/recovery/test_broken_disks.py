"""No disk error ends training: it is reported once, and existing files are kept."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import zoo

from keras_nanguard import NanGuard

DISK = {"storage": "disk", "every": 4, "verify_after": 1, "keep": 2}


def trained(guard):
    return zoo.run(zoo.plain, zoo.regression(batches=20), guard=guard, epochs=1)


def steps_on_disk(directory):
    """Return the steps from which a run could resume."""
    paths = (directory / "snapshots").glob("[!.]*/snapshot.json")
    return [json.loads(path.read_text())["step"] for path in paths]


@pytest.fixture(scope="module")
def undisturbed():
    return trained(NanGuard(verbose=0))


def failing(monkeypatch, code, calls):
    """Let `os.fsync` fail with this error in these calls."""
    real, number = os.fsync, [0]

    def fsync(handle):
        number[0] += 1
        if number[0] in calls:
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_report_that_cannot_be_synced_replaces_nothing(tmp_path, monkeypatch):
    """A file that is renamed before it is on the disk can be empty after a power failure."""
    path, guard = tmp_path / "incidents.json", NanGuard(verbose=0)
    path.write_text("earlier")
    failing(monkeypatch, errno.EIO, [1])
    with pytest.raises(OSError, match=str(path)):
        guard.report(path)
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.usefixtures("snapshots_kept")
def test_full(code, tmp_path, monkeypatch, capsys, undisturbed):
    """From some file on nothing can be written: reported once, and earlier snapshots stay."""
    failing(monkeypatch, code, range(16, 10_000))
    guard = NanGuard(directory=tmp_path, snapshot=DISK)
    assert zoo.differences(trained(guard), undisturbed) == []
    said = capsys.readouterr().out
    assert said.count("cannot write snapshots") == 1 and os.strerror(code) in said
    assert steps_on_disk(tmp_path)
    assert guard.session.run.ring.newest().step == 16, "those that are not on disk are in memory"


@pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folder")
@pytest.mark.usefixtures("snapshots_kept")
def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch, capsys):
    """As some network file systems: files are written and removed as on any other."""
    real = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    trained(NanGuard(directory=tmp_path, snapshot=DISK))
    assert "cannot write" not in capsys.readouterr().out
    assert max(steps_on_disk(tmp_path)) >= 16 and len(steps_on_disk(tmp_path)) <= DISK["keep"] + 1


def test_full_for_a_while(tmp_path, monkeypatch, capsys):
    """With space again snapshots are written, and marked as verified if that had failed."""
    failing(monkeypatch, errno.ENOSPC, range(9, 11))
    trained(NanGuard(directory=tmp_path, snapshot=DISK))
    assert capsys.readouterr().out.count("cannot write snapshots") == 1
    assert max(steps_on_disk(tmp_path)) >= 16
    assert [path.name for path in (tmp_path / "snapshots").iterdir() if path.name.startswith(".")] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a folder without write permission")
@pytest.mark.usefixtures("snapshots_kept")
def test_nothing_can_be_written(capsys, undisturbed):
    """Also if the folder cannot be created."""
    guard = NanGuard(directory="/proc/nanguard", snapshot=DISK)
    assert zoo.differences(trained(guard), undisturbed) == []
    said = capsys.readouterr().out
    assert said.count("cannot write snapshots") == 1 and "This run has none yet" in said
    assert guard.session.run.ring.newest().step == 16


HOLDS = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1])  # a lock that nobody holds a reference to is released
lock.acquire(timeout=0)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
class TestTwoProcesses:
    @pytest.fixture
    def other(self, tmp_path):
        tmp_path.joinpath("snapshots").mkdir()
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", HOLDS, str(tmp_path / "snapshots.lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout.readline() == "locked\n"
            yield process
            process.stdin.close()

    @pytest.mark.usefixtures("snapshots_kept")
    def test_second(self, tmp_path, other, capsys, undisturbed):
        """It reports this, changes nothing, keeps its snapshots in memory, has its own numbers."""
        theirs = tmp_path / "snapshots" / ".unfinished-1-snapshot-00000001"
        theirs.mkdir()
        guard = NanGuard(directory=tmp_path, snapshot=DISK)
        assert zoo.differences(trained(guard), undisturbed) == []
        said = capsys.readouterr().out
        assert said.count("is in use by another run") == 1 and "use one directory per run" in said
        assert list((tmp_path / "snapshots").iterdir()) == [theirs] and guard.session.run.ring.newest().step == 16

    def test_after_the_end_of_the_first(self, tmp_path, other, capsys):
        """A process that ends in any way leaves no lock behind."""
        other.kill()
        other.wait()
        trained(NanGuard(directory=tmp_path, snapshot=DISK))
        assert "another process" not in capsys.readouterr().out
        assert max(steps_on_disk(tmp_path)) >= 16

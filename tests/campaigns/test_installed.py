"""`make release` detects every missing file and every command that ends unexpectedly."""

import io
import subprocess
import sys
import tarfile
import zipfile

import pytest

from campaigns import installed


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=installed.ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a clone: git lists no files here")
    return done.stdout.splitlines()


def archives(folder, in_wheel, in_sdist):
    with zipfile.ZipFile(folder / "one.whl", "w") as wheel:
        for name in in_wheel:
            wheel.writestr(name, "")
    with tarfile.open(folder / "one.tar.gz", "w:gz") as sdist:
        for name in in_sdist:
            sdist.addfile(tarfile.TarInfo(f"keras_nanguard-1.0.0/{name}"), io.BytesIO())
    return folder / "one.whl", folder / "one.tar.gz"


def test_files_that_are_not_packed(tracked, tmp_path):
    """Exactly the missing data file of the wheel and the missing test of the sdist are named."""
    data, test = "keras_nanguard/policies/recover.toml", "tests/test_api.py"
    packed = [name for name in tracked if name.startswith("keras_nanguard/")]
    assert installed.missing(*archives(tmp_path, packed, tracked)) == []
    lacking = archives(tmp_path, [name for name in packed if name != data], [name for name in tracked if name != test])
    assert installed.missing(*lacking) == [f"wheel: {data}", f"sdist: {test}"]


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("raise SystemExit(1)", 0, ""),
        ("print('clean')", 0, "1 NaN"),
        ("print('Traceback (most recent call last)')", 0, ""),
    ],
)
def test_a_command_that_does_not_work(program, code, said, tmp_path):
    """Another exit code, other words or a traceback fail, with the output."""
    with pytest.raises(installed.Failure, match="exit code"):
        installed.run([sys.executable, "-c", program], tmp_path, code=code, said=said)
    installed.run([sys.executable, "-c", "print('1 NaN'); raise SystemExit(1)"], tmp_path, code=1, said="1 NaN")


def test_everything_is_tried():
    """The wheel is tested without a backend and with each, the sdist without one and with one."""
    names = list(installed.tries(None, None, "3.11"))
    assert {name.removeprefix("wheel, ") for name in names if name.startswith("wheel")} == {"without a backend", *installed.BACKENDS}
    assert len([name for name in names if name.startswith("sdist")]) == 2

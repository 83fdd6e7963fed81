"""Wrong use gives an error with the expected and the received value and the remedy."""

import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import (
    Diagnosis,
    Finding,
    NanGuard,
    Outcome,
    diagnose,
    lint,
    recalibrate,
    repair,
    replay,
    scan,
)
from keras_nanguard.errors import (
    BundleError,
    GuardError,
    GuardInUseError,
    NonFiniteError,
    PolicyError,
)


@pytest.mark.parametrize("verbose", [-1, 3, "loud", "auto", None, 1.5, np.zeros(3)])
def test_verbose(verbose):
    """`verbose` is 0, 1 or 2."""
    with pytest.raises(GuardError, match=r"Expected verbose.*Received.*Write verbose=1"):
        NanGuard(verbose=verbose)


def test_verbose_is_a_switch_too():
    """`verbose=True` is 1 and `verbose=False` is 0, as in Keras."""
    assert [NanGuard(verbose=v).verbose for v in (True, False, 0, 1, 2)] == [1, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"policy": None}, "Received: None. Write 'recover' for the default"),
        ({"policy": 5}, "Received: 5. Write 'recover' for the default"),
        ({"policy": NanGuard}, "Received: the class NanGuard. Write Policy.load('recover')"),
        ({"policy": "recovr"}, "Did you mean 'recover'?"),
        ({"policy": "."}, "Write NanGuard(directory='.')"),
        ({"snapshot": 50}, "snapshot: expected a table, received 50"),
        ({"derectory": "run1"}, "did you mean 'directory'?"),
        ({"verbos": 1}, "did you mean 'verbose'?"),
        ({"snapshots": {"every": 5}}, "did you mean 'snapshot'?"),
        ({"directory": 5}, 'Received: directory=5. Write directory="run1"'),
        ({"directory": "run" * 2000}, 'Write directory="run1"'),
        ({"directory": "run\0"}, "Received: directory='run\\x00', embedded null byte. Write directory="),
        ({"directory": "run\ud800"}, "Received: directory='run\\ud800', 'utf-8' codec can't encode"),
        ({"directory": __file__}, "a file. Write directory"),
        ({"functions": [print]}, 'Write functions={"print": print}.'),
        ({"functions": print}, 'Write functions={"print": print}.'),
        ({"functions": {"a": 3}}, "Expected functions to be a dict of names and functions"),
        ({"resume": "yes"}, "Received: resume='yes'. Write resume=True."),
        ({"diagnose": "no"}, "Expected diagnose to be True or False"),
        ({"logs": "yes"}, "Expected logs to be True or False"),
    ],
)
def test_wrong_arguments_are_answered_in_one_sentence(arguments, answer):
    with pytest.raises((GuardError, PolicyError)) as error:
        NanGuard(**arguments)
    assert answer in str(error.value) and "\n" not in str(error.value)


def test_several_wrong_arguments_at_once():
    with pytest.raises(PolicyError) as error:
        NanGuard(derectory="x", verbos=1, snapshot={"every": -1})
    assert [problem.split(":")[0] for problem in error.value.problems] == ["derectory", "verbos", "snapshot.every"]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_the_class_among_the_callbacks(method):
    """`callbacks=[NanGuard]` suggests `callbacks=[NanGuard()]`, whatever Keras does with it."""
    model, data = zoo.plain(), zoo.regression(batches=1)
    given = (data.x,) if method == "predict" else (data.x, data.y)
    with pytest.raises(GuardError, match=r"Received: the class NanGuard itself. Write callbacks=\[NanGuard\(\)\]"):
        getattr(model, method)(*given, verbose=0, callbacks=[NanGuard])
    model.fit(data.x, data.y, verbose=0)


@pytest.mark.parametrize(
    ("function", "command"), [(lint, "lint"), (diagnose, "diagnose"), (recalibrate, "recalibrate")], ids=lambda f: getattr(f, "__name__", f)
)
def test_the_path_of_a_model_for_a_model(function, command):
    """A path gives an error with the call that loads it, and the command that accepts it."""
    arguments = () if command == "lint" else (np.ones((2, 2)),)
    with pytest.raises(GuardError, match=rf"'model.keras'. Load it .* or run: keras-nanguard {command} model.keras"):
        function("model.keras", *arguments)
    with pytest.raises(GuardError, match="the class Model"):
        function(keras.Model, *arguments)


ROWS = np.ones((8, 4), "float32")


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (recalibrate, {"x": None}, "class NoneType"),
        (recalibrate, {"x": 3}, "class int"),
        (recalibrate, {"x": "data.npz"}, "class str"),
        (recalibrate, {"x": len}, "class builtin_function_or_method"),
        (recalibrate, {"x": keras.utils.PyDataset}, "PyDataset"),
        (recalibrate, {"x": {"a": [1.0]}}, "class dict"),
        (recalibrate, {"x": ROWS, "steps": "a"}, "steps='a'"),
        (recalibrate, {"x": ROWS, "batch_size": 2.5}, "batch_size=2.5"),
        (recalibrate, {"x": ROWS, "only": 3}, "only=3"),
        (repair, {"only": 3}, "only=3"),
        (repair, {"only": [3]}, "only="),
        (repair, {"limit": "a"}, "limit='a'"),
        (scan, {"limit": "a"}, "limit='a'"),
        (scan, {"statistics_limit": None}, "statistics_limit=None"),
        (lint, {"ignore": 3}, "ignore=3"),
        (diagnose, {"x": (row for row in ROWS)}, "generator"),
        (diagnose, {"x": {"a": object()}}, "dict"),
    ],
)
def test_wrong_types_of_the_functions(function, arguments, named):
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    before = model.get_weights()
    with pytest.raises(GuardError, match=r"^Expected .*\. Received: .*") as error:
        function(model, **arguments)
    assert named in str(error.value).partition("Received: ")[2]
    assert all(map(np.array_equal, before, model.get_weights()))


@pytest.mark.parametrize("path", [3, b"run.html", [ROWS]])
def test_wrong_types_of_paths(path):
    """What is not a path is refused by each function that takes one."""
    guard = NanGuard(verbose=0)
    for function in (guard.report, guard.bad_samples):
        with pytest.raises(GuardError, match=r"Expected a path. Received: an object of class .* Write guard\."):
            function(path)
    with pytest.raises(BundleError, match=r"Expected the folder of an incident. Received: .* Pass Incident.bundle"):
        replay(path)


def test_one_code_to_ignore():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    assert str(lint(model, ignore="no_clipping")) == str(lint(model, ignore=["no_clipping"]))


def test_model_without_optimizer():
    """A model without an optimizer is rejected before its first step, and the guard is detached."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer=None, loss="mse")
    data = zoo.regression(batches=1)
    with pytest.raises(GuardError, match=r"Expected a model with an optimizer.*Received.*compile"):
        model.fit(data.x, data.y, verbose=0, callbacks=[NanGuard(verbose=0)])


def test_model_not_compiled():
    """Rejected by Keras in `fit`, and by the guard where Keras does not check."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    guard = NanGuard(verbose=0)
    guard.set_model(model)
    with pytest.raises(GuardError, match=r"Expected a compiled model.*Received.*compile"):
        model.make_train_function()
    assert not {"make_train_function", "train_step", "test_step"} & set(vars(model)), "nothing of the guard stays behind"
    with pytest.raises(ValueError, match="compile"):
        model.fit(zoo.draw(batches=1), zoo.draw(batches=1)[:, :1], verbose=0, callbacks=[NanGuard(verbose=0)])


@pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the state passes through the step")
def test_watch_without_optimizer():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    with pytest.raises(GuardError, match="optimizer"), NanGuard(verbose=0).watch(model):
        pass


def test_watch_with_a_list_of_optimizers():
    model = zoo.plain()
    with (
        pytest.raises(GuardError, match=r"an optimizer of Keras\. .* type list\. .*guard\.watch\(model, first, second\)"),
        NanGuard(verbose=0).watch(model, [model.optimizer]),
    ):
        pass


def test_loop_without_watch_or_with_two():
    model, guard = zoo.plain(), NanGuard(verbose=0)
    with pytest.raises(GuardError, match=r"with guard\.watch"):
        guard.step(lambda: None)()
    with guard.watch(model), pytest.raises(GuardInUseError, match="running loop"), guard.watch(model):
        pass


def test_report_of_unknown_ending(tmp_path):
    """A report is .html, .json or .jsonl, and another suffix writes nothing."""
    with pytest.raises(GuardError, match="json"):
        NanGuard(verbose=0).report(tmp_path / "report.xlsx")
    assert list(tmp_path.iterdir()) == []


def raised():
    """Return the error of a fit whose sixth batch is bad, under the policy `raise`."""
    with pytest.raises(NonFiniteError) as caught:
        zoo.run(zoo.plain, zoo.poison(zoo.regression(), 5), guard=NanGuard("raise", verbose=0))
    return caught.value


def test_the_message_describes_the_incident():
    """The message is the line of the incident: step, finding, cause, place, advice, actions."""
    error = raised()
    assert str(error) == f"NanGuard: {error.incident}" and error.incident.step == 5
    for words in (
        "step 6 (epoch 1, batch 6) refused",
        "inputs x: 1 NaN of 48",
        "Cause: input_nonfinite in 'x'",
        "Clean ",
        "-> raise_error: NonFiniteError is raised; the model still has the last good state",
    ):
        assert words in str(error)


def test_errors_can_be_pickled():
    error = raised()
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is NonFiniteError and str(copy) == str(error) and copy.incident.to_json() == error.incident.to_json()
    with pytest.raises(PolicyError) as caught:
        NanGuard(lower_lr={"fctor": 0.5})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.problems == caught.value.problems


@pytest.mark.parametrize(
    ("record", "given", "what"),
    [
        (Finding, {"site": "gradient"}, "site"),
        (Finding, {"site": "loss", "kind": "nan"}, "kind"),
        (Diagnosis, {"cause": "nan"}, "cause"),
        (Outcome, {"action": "stop", "status": "failed"}, "status"),
    ],
)
def test_words_of_records(record, given, what):
    """A record takes only the words of its closed lists, and the error shows them."""
    with pytest.raises(ValueError, match=f"Expected {what} to be one of .*Received"):
        record(**given)


def test_errors_cross_processes():
    """An exception in a worker process reaches the process that waits for it, with its incident."""
    code = (
        "from keras_nanguard import Finding, Incident, NonFiniteError\n"
        "raise NonFiniteError('in a worker', Incident(3, 0, 3, (Finding('loss'),)))"
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool, pytest.raises(NonFiniteError) as caught:
        pool.submit(exec, code, {}).result(timeout=120)
    assert str(caught.value) == "in a worker" and caught.value.incident.step == 3


WITHOUT_BACKEND = {
    "import": "from keras_nanguard import NanGuard",
    "lint": "from keras_nanguard.__main__ import main; sys.exit(main(['lint', 'model.keras']))",
    "demo": "from keras_nanguard.__main__ import main; sys.exit(main(['demo']))",
}


@pytest.mark.parametrize("use", WITHOUT_BACKEND)
def test_backend_that_is_not_installed(use, tmp_path):
    """One sentence names the package to install or the variable to set; a command ends with it."""
    (tmp_path / "model.keras").write_bytes(b"")
    hidden = f"import sys; sys.modules[{zoo.BACKEND!r}] = None\n"
    done = subprocess.run([sys.executable, "-c", hidden + WITHOUT_BACKEND[use]], cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert f'pip install "keras-nanguard[{zoo.BACKEND}]", or set KERAS_BACKEND' in last
    if use in ("lint", "demo"):
        assert done.returncode == 2 and "Traceback" not in done.stderr
    else:
        assert last.startswith("ModuleNotFoundError: Expected a backend for Keras.")

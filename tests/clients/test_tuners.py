"""Real tuners copy callbacks for each trial, and a failed trial is never the best one."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

RATES = [0.01, 1e30, 30.0]
"""The model trains, overflows in the second step, and diverges."""


def data():
    found = zoo.regression(batches=24)
    return found.x, found.y


def network(rate, metrics=()):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=list(metrics))
    return model


def fit(rate, *callbacks, metrics=(), x=None, epochs=4, **more):
    keras.utils.set_random_seed(0)
    given, y = data()
    settings = {"batch_size": zoo.BATCH, "epochs": epochs, "validation_split": 0.25, "verbose": 0, **more}
    return network(rate, metrics).fit(given if x is None else x, y, callbacks=list(callbacks), **settings)


def guard():
    return NanGuard("tune", verbose=0, diagnose=False)


class TestPreset:
    @pytest.mark.parametrize("rate", RATES[1:])
    def test_a_hopeless_rate_ends_early(self, rate):
        """In its first epoch, with the worst value of every metric: NaN without a direction."""

        def unknown(y_true, y_pred):
            return keras.ops.mean(y_pred, -1)

        history = fit(rate, guard(), metrics=["mae", keras.metrics.R2Score(name="r2"), unknown]).history
        assert len(history["loss"]) == 1
        for name in ("loss", "val_loss", "mae", "val_mae"):
            assert history[name] == [pytest.approx(3.4e38, rel=0.01)]
        assert history["r2"] == history["val_r2"] == [pytest.approx(-3.4e38, rel=0.01)]
        assert np.isnan(history["val_unknown"]).all()

    def test_a_healthy_rate_is_left_alone(self):
        used = guard()
        assert zoo.plain_logs(fit(0.01, used).history) == fit(0.01).history and used.incidents == []

    def test_a_bad_batch_is_refused(self):
        """A trial with one bad batch is evaluated like the others."""
        x, _ = data()
        x[20] = np.nan
        history = fit(0.01, guard(), x=x).history
        assert history["refused_steps"] == [1] * 4 and max(history["val_loss"]) < 10

    def test_callbacks_take_the_worst_value_for_no_best_one(self, tmp_path):
        path = tmp_path / "best.keras"
        fit(1e30, guard(), keras.callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True))
        assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RandomSearch", "Hyperband", "BayesianOptimization", "GridSearch"])
def test_keras_tuner(name, tmp_path):
    """Failing trials end in their first epoch and never win; the given guard is unchanged."""
    tuners = pytest.importorskip("keras_tuner", reason="keras-tuner is not installed: pip install keras-tuner")
    limits = {"max_epochs": 4, "factor": 2} if name == "Hyperband" else {"max_trials": 3}
    tuner = getattr(tuners, name)(
        lambda hp: network(hp.Choice("rate", RATES)), objective="val_loss", directory=tmp_path, seed=1, **limits
    )
    used = guard()
    x, y = data()
    more = {} if name == "Hyperband" else {"epochs": 3}
    tuner.search(x, y, batch_size=zoo.BATCH, validation_split=0.25, verbose=0, callbacks=[used], **more)
    trials = {trial.hyperparameters.get("rate"): trial for trial in tuner.oracle.trials.values()}
    assert set(trials) == set(RATES)
    assert all(trials[rate].score > 1e38 and trials[rate].best_step == 0 for rate in RATES[1:]) and trials[0.01].score < 10
    assert tuner.get_best_hyperparameters()[0].get("rate") == 0.01 and used.incidents == [] and used.session is None


@pytest.mark.slow
def test_keras_tuner_with_a_custom_fit(tmp_path):
    """`HyperModel.fit` creates a guard per trial: failing rates lose, callbacks are kept."""
    tuners = pytest.importorskip("keras_tuner", reason="keras-tuner is not installed: pip install keras-tuner")
    guards = []

    class Hyper(tuners.HyperModel):
        def build(self, hp):
            return network(hp.Choice("rate", RATES))

        def fit(self, hp, model, *args, callbacks=(), **kwargs):
            guards.append(guard())
            return model.fit(*args, callbacks=[*callbacks, guards[-1]], **kwargs)

    tuner = tuners.GridSearch(Hyper(), objective="val_loss", directory=tmp_path, seed=1, max_trials=3)
    tuner.search(*data(), batch_size=zoo.BATCH, validation_split=0.25, epochs=2, verbose=0)
    assert tuner.get_best_hyperparameters()[0].get("rate") == 0.01 and np.isfinite(tuner.get_best_models()[0].get_weights()[0]).all()
    assert sorted(bool(used.incidents) for used in guards) == [False, True, True]


@pytest.mark.slow
def test_optuna():
    """The pruning callback gets the worst value, no failed trial wins, the study goes on."""
    optuna = pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna optuna-integration")
    integration = pytest.importorskip("optuna_integration", reason="optuna-integration is not installed")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial):
        rate = trial.suggest_categorical("rate", RATES)
        pruning = integration.KerasPruningCallback(trial, "val_loss")
        return min(fit(rate, pruning, guard(), epochs=2).history["val_loss"])

    grid = optuna.samplers.GridSampler({"rate": RATES}, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(sampler=grid, pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
        study.optimize(objective, n_trials=len(RATES))
    assert study.best_params == {"rate": 0.01} and study.best_value < 10
    states = {trial.params["rate"]: trial.state.name for trial in study.trials}
    assert states[0.01] == "COMPLETE" and set(states.values()) <= {"COMPLETE", "PRUNED"} and len(states) == len(RATES)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_scikeras(jobs):
    """A `Pipeline` in `GridSearchCV`, by `clone`: a failing rate fails, the best one trains."""
    wrappers = pytest.importorskip("scikeras.wrappers", reason="scikeras is not installed: pip install scikeras")
    selection = pytest.importorskip("sklearn.model_selection")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    class Regressor(wrappers.KerasRegressor):
        def __sklearn_tags__(self):  # scikeras 0.13 was written for an older scikit-learn
            from sklearn.base import BaseEstimator, RegressorMixin

            return type("Both", (RegressorMixin, BaseEstimator), {})().__sklearn_tags__()

    used = NanGuard("raise", verbose=0, diagnose=False)
    settings = {"epochs": 2, "batch_size": zoo.BATCH, "verbose": 0, "random_state": 0}
    regressor = Regressor(model=network, rate=0.01, callbacks=[used], **settings)
    steps = make_pipeline(StandardScaler(), regressor)
    grid = {f"{steps.steps[-1][0]}__rate": [0.01, 1e30]}
    search = selection.GridSearchCV(steps, grid, cv=2, n_jobs=jobs, error_score=np.nan, pre_dispatch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search.fit(*data())
    assert list(search.best_params_.values()) == [0.01] and np.isnan(search.cv_results_["mean_test_score"][1])
    assert used.incidents == []

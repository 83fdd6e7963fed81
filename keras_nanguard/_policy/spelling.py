"""Suggestions for unknown words: first by synonym, then by spelling. Imports no backend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

__all__ = ["SYNONYMS", "nearest"]

SYNONYMS: Mapping[str, str] = {
    # kinds of trouble
    "nonfinite": "nan nans inf infs infinity infinite non_finite not_finite invalid overflow overflows",
    "explosion": "explode explodes exploding diverge divergence diverging blow_up blowup growth runaway",
    "lasting_spike": "sustained_spike permanent_spike",
    "spike": "jump jumps outlier outliers peak",
    "out_of_range": "range out_of_bounds too_large large huge",
    "collapse": "underflow vanish vanishing",
    "stuck": "frozen dead constant stale",
    # sites
    "inputs": "input x features data batch",
    "targets": "target y y_true label labels sample_weight",
    "outputs": "output y_pred activation activations logits",
    "loss": "losses cost objective",
    "gradients": "gradient grad grads grad_norm gradient_norm",
    "weights": "weight kernel kernels bias biases variable variables parameter parameters params",
    "statistics": "bn batchnorm batch_norm batch_normalization batchnormalization moving_mean moving_variance running_mean running_var",
    "slots": "slot optimizer optimizer_state optimizer_variables momentum moments velocity",
    "loss_scale": "scale scaler loss_scaling loss_scaler lossscale dynamic_scale amp",
    "metrics": "metric accuracy",
    "validation": "val val_loss evaluate evaluation",
    "predictions": "predict prediction inference",
    # moments
    "refused": "rejected skipped left_out blocked",
    "committed": "accepted applied commit",
    "before_training": "start begin beginning before on_train_begin",
    # actions
    "skip": "ignore drop leave_out pass discard nothing noop",
    "rollback": "restore revert undo back go_back rewind reload backtrack",
    "lower_lr": "lr learning_rate lower_learning_rate reduce_lr reduce_learning_rate decrease_lr decay_lr lr_decay reduce_lr_on_plateau",
    "clip": "clipping clip_gradients gradient_clipping grad_clip clipnorm clip_norm global_clipnorm clip_by_norm clip_by_global_norm",
    "fix_loss_scale": "loss_scale scale reset_loss_scale lower_loss_scale",
    "repair": "fix heal replace nan_to_num zeros",
    "reset_batchnorm": "bn batchnorm batch_norm reset_bn reset_statistics",
    "recalibrate_batchnorm": "recalibrate recalibrate_bn",
    "reset_slots": "slots reset_optimizer reset_momentum",
    "quarantine": "save save_batch keep_batch dump",
    "warn": "warning log print tell notify alert report",
    "stop": "halt abort end quit exit terminate kill early_stop early_stopping terminate_on_nan stop_training",
    "raise_error": "raise error exception throw fail",
    "call": "callback function hook",
    # presets
    "recover": "default heal auto on",
    "raise": "raise_error error exception throw fail",
    "observe": "warn log monitor watch dry_run off disable",
    "strict-fp16": "fp16 float16 half mixed_precision mixed_float16 amp",
    "finetune": "fine_tune finetuning fine_tuning transfer",
    "tune": "tuner tuning keras_tuner optuna trial search hyperband",
    # sections of a policy, and arguments of NanGuard
    "snapshot": "checkpoint checkpoints backup every keep storage good_after",
    "checks": "trend inputs targets outputs loss gradients weights statistics slots loss_scale metrics validation predictions",
    "preset": "base extends inherit policy",
    "title": "description comment",
    "refuse": "reject",
    "directory": "dir path folder log_dir logdir backup_dir checkpoint_dir output_dir",
    "verbose": "verbosity quiet silent",
    "functions": "callbacks hooks",
    "diagnose": "diagnosis explain",
    "resume": "continue restart",
    # fields of a rule
    "name": "id title",
    "on": "site sites where at",
    "kind": "type types",
    "layer": "path paths",
    "when": "moment phase",
    "unless": "except exclude",
    "do": "action actions then",
    "after": "condition if trigger consecutive total within fraction",
    "limit": "budget max max_times retries times",
    "otherwise": "else fallback finally escalate",
    "cooldown": "cool_down pause wait",
    "enabled": "active enable disabled",
    "magnitude": "size severity",
    # conditions
    "consecutive": "in_a_row row streak patience steps",
    "total": "count sum times",
    "within": "window last",
    "fraction": "share ratio percent percentage",
    "any": "or always",
    "all": "and",
    # parameters
    "times": "count max n number",
    "per_steps": "per window steps within",
    "every": "interval frequency freq period save_freq steps",
    "keep": "max_to_keep count number n",
    "storage": "where location medium",
    "good_after": "verify_after verified_after",
    "memory": "ram host cpu",
    "disk": "file files ssd folder",
    "max_abs": "max limit threshold max_value",
    "min_value": "min floor minimum",
    "max_value": "max ceiling maximum",
    "factor": "multiplier gamma decay ratio",
    "min_lr": "min_learning_rate lr_min",
    "skip_batches": "skip batches",
    "global_clipnorm": "norm max_norm clipnorm clip_norm",
    "floor": "min min_value minimum",
    "ceiling": "max max_value maximum",
    "growth_steps": "growth_interval dynamic_growth_steps",
    "source": "from value",
    "last_good": "snapshot last",
    "initializer": "initial init",
    "max_batches": "batches",
    "message": "text",
    "restore": "rollback restore_best_weights",
    "function": "fn callable name",
}
"""Synonyms of each word of a policy; the words that are valid in a place decide between several candidates."""

_BY_SYNONYM: dict[str, list[str]] = {}
for _word, _synonyms in SYNONYMS.items():
    for _synonym in _synonyms.split():
        _BY_SYNONYM.setdefault(_synonym, []).append(_word)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word that `word` is a synonym of, or is nearest to in spelling; `""` where there is none."""
    words = {_plain(name): name for name in known}
    if not isinstance(word, str) or word in words.values():
        return ""
    key = _plain(word)
    meant = next((other for other in _BY_SYNONYM.get(key, ()) if other in words.values()), "")
    found = difflib.get_close_matches(key, words, n=1, cutoff=0.7)
    return words.get(key) or meant or (words[found[0]] if found else "")


def _plain(word: str) -> str:
    return word.lower()[:64].replace("-", "_").replace(" ", "_")

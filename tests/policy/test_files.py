"""Policy files: three formats, one shape, all problems at once, and nothing that a hostile file can do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from keras_nanguard._core.errors import PolicyError
from keras_nanguard._policy.documents import MAX_BYTES, MAX_DEPTH, parsed
from keras_nanguard._policy.policy import Policy

TOML = """
version = 1
preset = "recover"
title = "mine"

[snapshot]
every = 50

[[rules]]
name = "persistent"
limit = { times = 2, per_steps = 1e3 }

[[rules]]
name = "mine"
on = ["loss", "gradients"]
after = { fraction = { share = 0.25, steps = 40 } }
do = [{ lower_lr = { factor = 0.5, min_lr = 1e-6 } }, "warn"]
limit = { times = 2 }

[layers."post_bn*"]
statistics = { max_abs = 65504 }
""".replace("1e3", "1000")

YAML = """
version: 1
preset: recover
title: mine
snapshot: {every: 50}
rules:
  - name: persistent
    limit: {times: 2, per_steps: 1000}
  - name: mine
    on: [loss, gradients]     # in YAML 1.1 this key would be the value true
    after: {fraction: {share: .25, steps: 40}}
    do:
      - lower_lr: {factor: 0.5, min_lr: 1e-6}
      - warn
    limit: {times: 2}
layers:
  "post_bn*":
    statistics: {max_abs: 65504}
"""

PLAIN = {
    "version": 1,
    "preset": "recover",
    "title": "mine",
    "snapshot": {"every": 50},
    "rules": [
        {"name": "persistent", "limit": {"times": 2, "per_steps": 1000}},
        {
            "name": "mine",
            "on": ["loss", "gradients"],
            "after": {"fraction": {"share": 0.25, "steps": 40}},
            "do": [{"lower_lr": {"factor": 0.5, "min_lr": 1e-6}}, "warn"],
            "limit": {"times": 2},
        },
    ],
    "layers": {"post_bn*": {"statistics": {"max_abs": 65504}}},
}
TEXTS = {".toml": TOML, ".json": json.dumps(PLAIN), ".yaml": YAML, ".yml": YAML}


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refused(source, **overrides) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        Policy.from_any(source, **overrides)
    return caught.value


@pytest.mark.parametrize("suffix", sorted(TEXTS))
def test_three_formats_say_the_same(tmp_path, suffix):
    """TOML, JSON, YAML and a dict of the same content make the same policy, by text path and by Path."""
    path = written(tmp_path, "policy" + suffix, TEXTS[suffix])
    assert Policy.from_any(path) == Policy.from_any(str(path)) == Policy.from_any(PLAIN)


def test_a_policy_prints_the_file_that_makes_it(tmp_path):
    """`str(policy)` written to a file gives the same policy, and so does its dict as JSON."""
    policy = Policy.from_any(PLAIN)
    assert Policy.from_any(written(tmp_path, "a.toml", str(policy))) == policy
    assert Policy.from_any(written(tmp_path, "a.json", json.dumps(policy.to_dict()))) == policy
    assert str(Policy.from_any(written(tmp_path, "b.toml", str(policy)))) == str(policy)


def test_what_lies_over_a_preset(tmp_path):
    """Rules are merged over those of their name field by field, new ones come first, sections are merged by field."""
    base, policy = Policy.from_any("recover"), Policy.from_any(PLAIN)
    assert [rule.name for rule in policy.rules] == ["mine", *(rule.name for rule in base.rules)]
    mine = next(rule for rule in policy.rules if rule.name == "persistent")
    theirs = next(rule for rule in base.rules if rule.name == "persistent")
    assert mine.ladder[0].limit.times == 2 and mine.ladder[0].do == theirs.ladder[0].do
    assert mine.ladder[1:] == theirs.ladder[1:] and mine.unless == theirs.unless
    assert policy.snapshot.every == 50 and policy.snapshot.good_after == base.snapshot.good_after
    path = written(tmp_path, "p.toml", TOML)
    assert Policy.from_any(path, snapshot={"keep": 5}).snapshot.keep == 5
    assert Policy.from_any(path, snapshot={"keep": 5}).snapshot.every == 50
    assert Policy.from_any(policy, snapshot={"keep": 5}) == Policy.from_any(path, snapshot={"keep": 5})
    assert Policy.from_any({}) == Policy.from_any() == base
    assert Policy.from_any(policy) is policy


def test_every_problem_is_reported_at_once_with_its_path():
    """A file with many problems gets all of them in one error: path, expected, received, nearest known word."""
    problems = refused(
        {
            "version": 2,
            "presett": "recover",
            "snapshot": {"every": -1, "storage": "dik"},
            "checks": {"statistics": {"max_abs": math.nan}, "slot": True, "loss_scale": 3},
            "rules": [
                {"name": "a", "on": "los", "do": ["rolback", {"lower_lr": {"factor": 2.0}}], "otherwise": "stopp"},
                {
                    "name": "b",
                    "after": {"any": [{"consecutve": 1}]},
                    "do": [{"fix_loss_scale": {"floor": 9, "ceiling": 2}}],
                },
                {"do": "stop", "limit": {"times": 10**30}},
                7,
            ],
            "layers": {"x*": {"loss": True}},
        }
    ).problems
    expected = [
        "version: expected one of 1, received 2",
        "presett: expected one of version, preset, title, refuse, checks, snapshot, rules, layers, received 'presett', "
        "did you mean 'preset'?",
        "snapshot.every: expected a whole number >= 0, received -1",
        "snapshot.storage: expected one of memory, disk, received 'dik', did you mean 'disk'?",
        "checks.statistics.max_abs: expected a finite number > 0, received nan",
        "checks.loss_scale: expected a table, received 3",
        "rules[1].after.any[0].consecutve: expected one of consecutive, total, within, fraction, spike, any, all, not, "
        "received 'consecutve', did you mean 'consecutive'?",
        "rules[1].do[0].fix_loss_scale.floor: expected a number <= ceiling = 2, received 9.0",
        "rules[2].name: expected a name of at most 64 letters, digits, '_', '-' and '.', received nothing",
        "rules[2].limit.times: expected a whole number >= 1 and <= 10000, received a whole number of about 30 digits",
        "rules[3]: expected a table, received 7",
        "rules[0].do[1].lower_lr.factor: expected a finite number > 0 and < 1, received 2.0",
    ]
    assert [line for line in expected if line not in problems] == []
    starts = {
        "checks.slot": "slots",
        "rules[0].on[0]": "loss",
        "rules[0].do[0].rolback": "rollback",
        "rules[0].otherwise.do[0].stopp": "stop",
    }
    for path, word in starts.items():
        assert any(line.startswith(f"{path}: ") and line.endswith(f"did you mean {word!r}?") for line in problems)
    assert len(problems) == len(expected) + len(starts) + 1


def test_problems_name_the_file(tmp_path):
    """The error says which file is at problem, and that of the overrides says so."""
    path = written(tmp_path, "mine.toml", 'preset = "recovr"')
    assert "mine.toml" in str(refused(path)) and "did you mean 'recover'" in str(refused(path))
    assert "given as arguments" in str(refused("recover", snapshto={"every": 3}))


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        ("recovr", "Did you mean 'recover'?"),
        ("longrun", "Did you mean 'long-run'?"),
        ("policy.tml", "A file has to end in .toml"),
        ("missing.toml", "No such file"),
        ("folder/missing", "ends in .toml"),
        ("", "Expected a preset"),
        ("bad\0name.toml", "Expected a policy file"),
        ("x" * 5000 + ".toml", "Expected a policy file"),
        (3, "Received: 3. Write 'recover'"),
        (None, "Received: None. Write 'recover'"),
        (b"recover", "Received: an object of class bytes"),
        (["recover"], "Received: an object of class list"),
        (Policy, "Received: the class Policy. Write Policy.from_any"),
        (Path("missing.json"), "No such file"),
        (Path("recover"), "ends in .toml"),
    ],
)
def test_what_is_no_policy_is_reported_so(source, reported):
    """A misspelt preset, a missing file, another type: one clear sentence each."""
    assert reported in str(refused(source))


def test_what_is_no_regular_file_is_not_read(tmp_path):
    """A directory, a device and a pipe are not opened; nothing blocks and nothing is endless."""
    (tmp_path / "folder.toml").mkdir()
    assert "a directory" in str(refused(tmp_path / "folder.toml"))
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "zero.toml"):
        assert "not a regular file" in str(refused(tmp_path / name))


HOSTILE = {
    "another encoding.toml": "title = 'Größe'".encode("latin-1"),
    "utf-16.json": json.dumps(PLAIN).encode("utf-16"),
    "binary.yaml": bytes(range(256)),
    "too large.toml": b"#" * (MAX_BYTES + 1),
    "empty.json": b"",
    "a list.json": b"[1, 2]",
    "a text.yaml": b"hello",
    "nothing.yaml": b"",
    "two documents.yaml": b"version: 1\n---\nversion: 1\n",
    "deep.json": b'{"title":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "deep.toml": b"title = " + b"[" * 20_000 + b"]" * 20_000,
    "deep tables.toml": b"[" + b".".join([b"a"] * 10_000) + b"]\n",
    "deep.yaml": b"title: " + b"[" * 20_000 + b"]" * 20_000,
    "deep blocks.yaml": b"".join(b" " * n + b"- \n" for n in range(300)),
    "deep conditions.json": b'{"rules":[{"name":"a","do":"stop","after":' + b'{"not":' * 40 + b"3" + b"}" * 41 + b"]}",
    "many values.json": json.dumps({"title": [0] * 21_000}).encode(),
    "huge number.json": b'{"snapshot": {"every": ' + b"9" * 50_000 + b"}}",
    "huge number.toml": b"snapshot.every = " + b"9" * 50_000,
    "huge number.yaml": b"snapshot: {every: " + b"9" * 50_000 + b"}",
    "large number.json": b'{"snapshot": {"every": 1' + b"0" * 400 + b"}}",
    "hexadecimal.toml": b"title = [0x" + b"f" * 5000 + b"]",
    "dotted key.toml": b".".join([b"a"] * 30_000) + b" = 1",
    "overflow.json": b'{"checks": {"weights": {"max_abs": 1e999}}}',
    "overflow.toml": b"checks.weights.max_abs = 1e999",
    "overflow.yaml": b"checks: {weights: {max_abs: 1e999}}",
    "nan.json": b'{"checks": {"weights": {"max_abs": NaN}}}',
    "infinity.json": b'{"checks": {"weights": {"max_abs": -Infinity}}}',
    "nan.toml": b"checks.weights.max_abs = nan",
    "inf.toml": b"checks.weights.max_abs = +inf",
    "nan.yaml": b"checks: {weights: {max_abs: .nan}}",
    "null.json": b'{"checks": {"weights": {"max_abs": null}}}',
    "null section.yaml": b"checks:\n",
    "twice.json": b'{"title": "a", "title": "b"}',
    "twice.toml": b'title = "a"\ntitle = "b"\n',
    "twice.yaml": b"title: a\ntitle: b\n",
    "code.yaml": b"title: !!python/object/apply:os.system ['touch hacked']\n",
    "object.yaml": b"title: !!python/name:os.system\n",
    "plain tag.yaml": b"title: !!str a\n",
    "binary tag.yaml": b"title: !!binary aGVsbG8=\n",
    "anchor.yaml": b"title: &a x\n",
    "bomb.yaml": b"a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "merge.yaml": b"<<: {title: a}\n",
    "circle.yaml": b"&a title: *a\n",
    "key of another kind.yaml": b"1: 2\n",
    "list as key.yaml": b"? [a]\n: 2\n",
    "tab.yaml": b"title:\n\t- a\n",
    "date.toml": b"title = 2020-01-01\n",
    "surrogate.json": b'{"title": "\\ud800"}',
    "surrogate glob.json": b'{"layers": {"\\ud800": {"weights": true}}}',
    "control.json": b'{"title": "a\\u001b[31mb"}',
    "odd name.json": b'{"rules": [{"name": "a\\nb", "do": "stop"}]}',
    "empty glob.json": b'{"layers": {"": {"weights": true}}}',
    "long title.json": json.dumps({"title": "x" * 201}).encode(),
    "many rules.json": json.dumps({"rules": [{"name": f"r{n}", "do": "stop"} for n in range(201)]}).encode(),
    "path as function.json": b'{"rules": [{"name": "a", "do": {"call": {"function": "os.system(1)"}}}]}',
    "missing brace.json": b'{"title": "a"',
    "unfinished.toml": b'title = "a',
    "unfinished.yaml": b"title: [a",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_file_gets_one_clear_error(tmp_path, monkeypatch, name):
    """Deep, huge, tagged, aliased, doubled or broken: a PolicyError, soon, in printable words, and no code is run."""
    monkeypatch.chdir(tmp_path)
    path, start = written(tmp_path, name, HOSTILE[name]), time.process_time()
    error = refused(path)
    assert time.process_time() - start < 10
    assert str(error).isascii() and len(str(error)) < 3000
    assert "expected" in str(error).lower() and "received" in str(error).lower()
    assert not (tmp_path / "hacked").exists()
    assert error.__cause__ is None


@pytest.mark.parametrize(
    "document",
    [
        {1: 2},
        {"title": object()},
        {"rules": ({"name": "a"},)},
        {"snapshot": {"every": 3.0}},
        {"snapshot": {"every": "3"}},
        {"snapshot": {"every": True}},
        {"checks": {"weights": "yes"}},
        {"checks": {"weights": 1}},
        {"refuse": 1},
        {"rules": {"name": "a"}},
        {"layers": []},
    ],
)
def test_a_dict_is_validated_like_a_file(document):
    """A dict gets the same errors; nothing is converted on the way."""
    refused(document)


def test_a_dict_that_goes_in_a_circle_is_refused():
    """A dict may hold itself, which no file can."""
    circle: dict = {"title": "a"}
    circle["snapshot"] = circle
    assert f"{MAX_DEPTH} levels" in str(refused(circle))


def test_yaml_is_read_as_yaml_1_2():
    """`on` is a word, `1e6` a number, `010` ten, `1:30` and dates are texts."""
    text = "on: [yes, 1e6, 010, 1:30, 2020-01-01, true, -.5, 0x1F, 1_000]\nempty:\n"
    values = ["yes", 1e6, 10, "1:30", "2020-01-01", True, -0.5, "0x1F", "1_000"]
    assert parsed(text, ".yaml") == {"on": values, "empty": None}


def test_a_byte_order_mark_does_no_harm(tmp_path):
    """Files saved by Windows editors are read."""
    assert Policy.from_any(written(tmp_path, "a.toml", b"\xef\xbb\xbf" + TOML.encode())) == Policy.from_any(PLAIN)


words = st.sampled_from(
    [
        "rules",
        "name",
        "do",
        "stop",
        "on",
        "loss",
        "after",
        "any",
        "limit",
        "times",
        "checks",
        "slots",
        "layers",
        "*",
        "snapshot",
        "every",
        "otherwise",
        "preset",
        "none",
        "lower_lr",
        "factor",
        "version",
    ]
)
junk = st.recursive(
    st.one_of(words, st.text(max_size=5), st.integers(), st.floats(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(words, st.text(max_size=3)), inner)),
    max_leaves=12,
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(["version", "preset", "rules", "checks", "layers", "snapshot", "title"]), junk))
def test_no_document_gets_anything_but_a_policy_or_a_policy_error(document):
    """Whatever is thrown at it, the validator answers with a policy that round-trips or with a PolicyError."""
    try:
        policy = Policy.from_any(document)
    except PolicyError as error:
        assert error.args[0].isascii()
        return
    assert Policy.from_any(policy.to_dict()) == policy


@settings(max_examples=200)
@given(st.sampled_from([".toml", ".json", ".yaml"]), st.one_of(st.text(max_size=60), st.binary(max_size=60)))
def test_no_text_gets_anything_but_a_table_or_a_policy_error(suffix, text):
    """Reading any file gives a table or a PolicyError."""
    with contextlib.suppress(PolicyError):
        assert isinstance(parsed(text if isinstance(text, str) else text.decode("latin-1"), suffix), dict)


def test_a_preset_by_name_needs_no_pydantic():
    """pydantic is imported where a policy of the user's own is validated, and not before: not to decide either."""
    code = (
        "import sys; from keras_nanguard._policy.policy import Policy, Ledger, decide; policy = Policy.from_any('long-run')\n"
        "from keras_nanguard._core.incident import Finding, Incident\n"
        "ledger, depths = Ledger(), []\n"
        "for step in range(12):\n"
        "    decision, ledger = decide(policy, ledger, Incident(step, 0, step, (Finding('loss'),)))\n"
        "    depths += [action['depth'] for action in decision.actions if action['action'] == 'rollback']\n"
        "assert len(set(depths)) > 1 and 'pydantic' not in sys.modules and 'yaml' not in sys.modules; "
        "Policy.from_any({}); assert 'pydantic' in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )

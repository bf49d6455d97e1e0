"""Runs: one command trains, shows how it goes, writes a report, and goes on where it stopped; mistakes are one line."""

import dataclasses
import io
import json
import re
import signal
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest

from braintrace_flax import bench, evaluate, explain, train
from braintrace_flax.runs import LRU, Config, ConfigError, build, command, load_config, with_overrides
from braintrace_flax.runs import run as runs
from braintrace_flax.runs.progress import Reporter
from braintrace_flax.runs.records import Records, read_records
from braintrace_flax.tasks import Copy, Text

pytestmark = pytest.mark.loose_promotion  # Optax relies on it

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = """
from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Copy

config = Config(
    name="tiny", task=Copy(symbols=2, length=1, delay=2), network=LRU(units=2, width=2, layers=1), window=2,
    batch_size=2, steps=7, evaluate_every=3, checkpoint_every=2, log_every=2,
)
"""
TEXT = TINY.replace("Copy(symbols=2, length=1, delay=2)", "Text(file={})").replace("Copy", "Text")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def tiny(config):
    """The tiny run, compiled once."""
    return build(load_config(config))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A run without interruption: its folder and what it printed."""
    folder, out = tmp_path_factory.mktemp("whole"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", lambda config: tiny)
        patch.setattr("sys.stdout", out)
        given = ["--config", str(tiny_file(folder)), "--folder", str(folder)]
        assert command.main(train._train, ("fresh", "quiet"), "", given) == 0
    return folder, out.getvalue()


def tiny_file(folder):
    path = folder / "config.py"
    path.write_text(TINY)
    return path


def call(what, *given, switches=()):
    return command.main(getattr(what, f"_{what.__name__.rpartition('.')[2]}"), switches, "usage", list(map(str, given)))


def state_of(run, folder):
    with runs.open_checkpoints(run.config, folder) as checkpoints:
        state = runs.restore(run, checkpoints).state
    plain = state._replace(key=jax.random.key_data(state.key))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def assert_same_run(run, folder, whole):
    assert (folder / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert state_of(run, folder) == state_of(run, whole)


class Page(HTMLParser):
    """What a page is made of; each tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.links, self.seen = [], "", [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_records_have_every_step_and_tests_follow_training(whole):
    lines = [json.loads(line) for line in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    order = [(line["step"], line["kind"]) for line in lines]
    expected = [(step, "train") for step in range(1, 8)] + [(step, "test") for step in (3, 6, 7)]
    assert order == sorted(expected, key=lambda entry: (entry[0], entry[1] == "test"))
    assert {frozenset(line) for line in lines} == {
        frozenset({"step", "kind", "loss", "accuracy"}),
        frozenset({"step", "kind", "test_loss", "test_accuracy"}),
    }
    assert len({line["loss"] for line in lines if "loss" in line}) == 7


def test_a_log_has_plain_lines(whole):
    shown = [line for line in whole[1].splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == ["2/7", "4/7", "6/7", "7/7"]
    assert all(re.search(r"loss [\d.]+ .*[\d.]+ steps/s  \d+ MiB  \d+:\d\d left$", line) for line in shown)
    assert "test_accuracy" in shown[-1]
    assert "\x1b" not in whole[1]


def test_the_report_needs_no_network_and_has_all_parts(whole):
    folder = whole[0]
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert not page.open
    assert "http" not in text.lower()
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"]
    assert {"svg", "img", "table"} <= page.seen
    for part in ('"window": 2', '"kind": "LRU"', "layers/0/in_re", "test_loss", " s in the last process", "MiB"):
        assert part in page.text
    assert str(folder / "checkpoints") in page.text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "config.json").read_text())["task"]["kind"] == "Copy"


def test_a_second_run_goes_on_to_the_same_bits(tiny, whole, tmp_path, capsys):
    for steps in (4, 5, 7, 7):  # with and without a test at the end; the last has nothing left to do
        shorter = tiny._replace(config=dataclasses.replace(tiny.config, steps=steps))
        assert runs.train(shorter, tmp_path, quiet=True).finished
    assert "Going on from step 5." in capsys.readouterr().out
    assert_same_run(tiny, tmp_path, whole[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_stop_it_saves_and_says_how_to_go_on(number, tiny, whole, tmp_path, monkeypatch, capsys):
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    step, calls = tiny.step, []

    class Step:
        window = step.window
        settings = step.settings
        init = staticmethod(step.init)

        def __call__(self, *given):
            calls.append(None)
            if len(calls) == 3:
                signal.raise_signal(number)
            return step(*given)

    monkeypatch.setattr(train, "build", lambda config: tiny._replace(step=Step()))
    try:
        code = call(train, "--config", tiny_file(tmp_path), "--folder", tmp_path)
    finally:
        signal.signal(signal.SIGINT, former)
    assert code == 75
    assert len(calls) == 3
    assert "Stopped after step 3, saved. Run the same command again to go on." in capsys.readouterr().out
    assert [line["step"] for line in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    runs.train(tiny, tmp_path, quiet=True)
    assert_same_run(tiny, tmp_path, whole[0])


def test_evaluate_finds_what_training_found(tiny, whole, config, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "build", lambda config: tiny)
    assert call(evaluate, "--config", config, "--folder", whole[0]) == 0
    last = read_records(whole[0] / "metrics.jsonl")[-1]
    found = capsys.readouterr().out
    assert found == f"step 7  test_accuracy {last['test_accuracy']:.4f}  test_loss {last['test_loss']:.4f}\n"


def test_explain_and_bench(tiny, config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explain, "build", lambda config: tiny)
    assert call(explain, "--config", config, "--folder", tmp_path) == 0
    assert "layers/0/in_re" in capsys.readouterr().out
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    monkeypatch.setattr(bench, "RULES", ("bptt",))
    assert call(bench, "--config", config) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["rule", "d_rtrl", "bptt"]
    assert all(float(row[1]) > 0 and row[2].endswith("x") for row in rows[1:])


def test_fresh_removes_the_run_alone_and_only_if_the_config_is_right(tiny, tmp_path, monkeypatch, capsys):
    path = tiny_file(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    runs.train(tiny, tmp_path, quiet=True)
    assert call(train, "--config", path, "--folder", tmp_path, "--fresh", "--window", 3, switches=("fresh",)) == 2
    assert "`window` of 3 steps does not divide the 4 steps" in capsys.readouterr().err
    assert read_records(tmp_path / "metrics.jsonl")[-1]["step"] == 7
    train._remove(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"config.py", "notes.txt"}


def test_a_terminal_shows_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Reporter(4, stream=out) as reporter:
        reporter.update(2, {"loss": 0.5, "accuracy": 0.25})
    assert re.search(r"2/4.*loss 0\.5  accuracy 0\.25  [\d.]+ steps/s  \d+ MiB", out.getvalue(), re.DOTALL)
    assert re.search(r"\d:\d\d:\d\d|-:--:--", out.getvalue())


def test_records_are_json_whatever_the_loss(tmp_path):
    records = Records(tmp_path / "metrics.jsonl")
    records.write(1, "train", {"loss": float("nan"), "accuracy": 0.5})
    records.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "kind": "tr')  # killed while it was written
    Records(tmp_path / "metrics.jsonl", 2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "kind": "train", "loss": null, "accuracy": 0.5}\n'


def test_streams_are_evaluated_as_streams(tmp_path):
    (tmp_path / "text").write_text("abcd" * 200)
    found = []
    for length in (2, 8):  # how a stream is cut does not matter
        task = Text(length=length, file=str(tmp_path / "text"))
        network = LRU(units=2, width=2, layers=1)
        run = build(Config(name="stream", task=task, network=network, window=2, batch_size=2))
        found.append(runs.evaluate(run, run.step.init(jax.random.key(0)).params))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0]["test_loss"] > 0.1


def test_learning_rate_rises_and_falls(config):
    settings = [("warmup", "2"), ("cooldown", "0.5"), ("steps", "8"), ("learning_rate", "1"), ("window", "2")]
    changed = with_overrides(load_config(config), settings)
    rate = runs._rate(changed, 2)  # two updates a step
    assert [float(rate(i)) for i in range(17)] == [0, 0.25, 0.5, 0.75, *[1] * 5, *(i / 8 for i in range(7, -1, -1))]
    assert runs._rate(load_config(config), 2) == 1e-3
    assert "steps" in runs._compared(changed.as_dict())  # with more of them, the rate would have been another
    assert "steps" not in runs._compared(load_config(config).as_dict())


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_configs_are_sound(path):
    config = load_config(path)
    assert config.name == path.stem
    assert config.task.steps % (config.window or config.task.steps) == 0
    assert config == with_overrides(
        config, [("steps", str(config.steps)), ("learning-rate", str(config.learning_rate))]
    )
    assert f"--config configs/{path.name}" in path.read_text()


def test_overrides_keep_types():
    config = Config(name="a", task=Text(), network=LRU())
    found = with_overrides(
        config, [("network.units", "3"), ("clip", "2"), ("task.file", "x.txt"), ("rule", "snap:n=2")]
    )
    assert (found.network.units, found.clip, found.task.file, found.rule) == (3, 2.0, "x.txt", "snap:n=2")
    assert type(found.clip) is float
    assert with_overrides(found, [("task.file", "none")]).task.file is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "20"}, "`steps` of Config is a whole number, got '20'."),
        ({"steps": True}, "`steps` of Config is a whole number, got True."),
        ({"clip": "1"}, "`clip` of Config is a number, got '1'."),
        ({"network": Copy()}, "`network` of Config is a Network, got Copy("),
        ({"network": LRU(units=2.0)}, "`units` of LRU is a whole number, got 2.0."),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0."),
    ],
)
def test_a_config_checks_its_types(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(**{"name": "a", "task": Copy(), "network": LRU(), **values})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--rule nope", "There is no rule 'nope'. Use one of bptt, d_rtrl"),
        ("--rule pp_prop:speed=1", "unexpected keyword argument 'speed'"),
        ("--rule pp_prop:decay", "write arguments as `name=value`, got 'decay'"),
        ("--speed 3", "There is no setting `speed`: Config has batch_size, "),
        ("--network.speed 3", "There is no setting `network.speed`: LRU has dtype, fastest, layers"),
        ("--steps.of 3", "`steps` has no settings of its own"),
        ("--network GRU", "change its parts, as in `--network.<setting>`"),
        ("--steps many", "`steps` is a whole number, got 'many'."),
        ("--steps 1.5", "`steps` is a whole number, got '1.5'."),
        ("--clip big", "`clip` is a number, got 'big'."),
        ("--learning_rate nan", "`learning_rate` must be finite and not negative, got nan."),
        ("--cooldown 2", "`cooldown` is a part of the steps, 0 to 1, got 2.0."),
        ("--network.units 0", "LRU needs units of at least 1, got 0."),
        ("--task.delay -1", "`task.delay`: Copy needs delay as a whole number of at least 0, got -1."),
        ("--trace_dtype float1", "`trace_dtype` is a dtype such as bfloat16, got 'float1'."),
        ("--credit late", '`credit` is "window" or "step", got \'late\'.'),
        ("--steps", "`--steps` needs a value."),
        ("--quiet=1", "`--quiet` takes no value."),
        ("steps", "What is 'steps'? Settings are written `--name value`."),
        ("--seed 1", "The checkpoint is of another config: seed was 0 and is 1. Use another folder, or `--fresh`."),
        ("--network.units 3", "The checkpoint is of another config: network was {'kind': 'LRU', 'units': 2"),
    ],
)
def test_a_wrong_setting_is_one_line(given, message, config, whole, capsys):
    assert call(train, "--config", config, "--folder", whole[0], *given.split(), switches=("quiet",)) == 2
    assert_one_line(capsys, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no config "),
        ("config = 3", "must define `config = Config(...)`."),
        ("config = (", "cannot be read: SyntaxError"),
        ("import nowhere_to_be_found", "cannot be read: ModuleNotFoundError"),
        (TINY.replace("units=2", "unit=2"), "unexpected keyword argument 'unit'"),
        (TINY.replace("steps=7", "steps='7'"), "`steps` of Config is a whole number, got '7'."),
        (TEXT.format("'gone.txt'"), "found none at 'gone.txt'"),
        (TEXT.format("__file__"), "steps to train on, too few for batch_size=64 streams of length=64"),
    ],
    ids="missing other syntax import name type data short".split(),
)
def test_a_wrong_file_is_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "wrong.py"
    if content is not None:
        path.write_text(content)
    assert call(train, "--config", path, "--folder", tmp_path / "run", "--batch_size", 64) == 2
    assert_one_line(capsys, message)


def test_no_config_and_no_run_are_one_line(config, tmp_path, capsys):
    assert call(train) == 2
    assert_one_line(capsys, "Which config? Write `--config configs/digits.py`.")
    assert call(evaluate, "--config", config, "--folder", tmp_path) == 2
    assert_one_line(capsys, f"There is no checkpoint in {tmp_path}: train first.")


def assert_one_line(capsys, message):
    found = capsys.readouterr().err
    assert found.startswith("error: ")
    assert found.count("\n") == 1
    assert message in found

"""Tasks: batches depend on a position alone, streams go on, held-out data stay apart, generators keep their word."""

import dataclasses
import json
import re
import subprocess
import sys
import zlib
from collections import Counter

import numpy as np
import pytest

from braintrace_flax import tasks
from braintrace_flax.tasks import Adding, Copy, DelayedMatch, Digits, EvidenceAccumulation, MemoryChain, Series, Text

TRIALS = {
    "digits by pixel": Digits(),
    "digits by row": Digits(by="row", answer=3),
    "copy": Copy(symbols=4, length=3, delay=2),
    "memory chain": MemoryChain(length=5),
    "adding": Adding(length=7),
    "delayed match": DelayedMatch(stimuli=3, neurons=4),
    "delayed match of rates": DelayedMatch(coding="rates"),
    "evidence": EvidenceAccumulation(cues=3, neurons=5),
}
STREAMS = {"text": Text(length=9), "series": Series(length=9)}
ANSWERS = {"digits by pixel": 8, "digits by row": 3, "copy": 3, "memory chain": 1, "adding": 1, "evidence": 10}
ALL = {**TRIALS, **STREAMS}

every = pytest.mark.parametrize("task", ALL.values(), ids=ALL)
every_trial = pytest.mark.parametrize("task", TRIALS.values(), ids=TRIALS)
every_stream = pytest.mark.parametrize("task", STREAMS.values(), ids=STREAMS)


def same(a, b):
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def differ(a, b):
    """Whether the data differ; masks and resets may well be the same."""
    return not np.array_equal(a.inputs, b.inputs) and not np.array_equal(a.targets, b.targets)


# What every task keeps


@every
def test_shapes_and_dtypes_are_those_that_the_task_states(task):
    for batch in (task.batch(3, 6), next(task.test_batches(6))):
        assert batch.inputs.shape == ((task.steps, 6) if task.is_tokens else (task.steps, 6, task.num_inputs))
        assert batch.inputs.dtype == (np.int32 if task.is_tokens else np.float32)
        assert batch.targets.shape == ((task.steps, 6) if task.kind == "class" else (task.steps, 6, task.num_outputs))
        assert batch.targets.dtype == (np.int32 if task.kind == "class" else np.float32)
        assert batch.mask.shape == batch.reset.shape == (task.steps, 6)
        assert (batch.mask.dtype, batch.reset.dtype) == (np.float32, bool)
        assert set(np.unique(batch.mask)) <= {0.0, 1.0}
        assert batch.mask.sum() > 0
        assert np.isfinite(batch.inputs).all()
        if task.kind == "class":
            assert 0 <= batch.targets.min() < batch.targets.max() < task.num_outputs
        if task.is_tokens:
            assert 0 <= batch.inputs.min() < batch.inputs.max() < task.num_inputs


@every
def test_a_batch_depends_on_position_and_seed_alone(task):
    batch = task.batch(5, 16, seed=2)
    again = dataclasses.replace(task)
    again.batch(0, 16)  # what was asked before does not matter
    assert same(again.batch(np.int64(5), 16, seed=2), batch)
    assert differ(task.batch(4, 16, seed=2), batch)
    assert differ(task.batch(6, 16, seed=2), batch)
    assert differ(task.batch(5, 16, seed=3), batch)


@every
def test_parts_make_up_the_whole(task):
    parts = [task.batch(2, 12, seed=1, part=(i, 3)) for i in range(3)]
    assert same((np.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True)), task.batch(2, 12, seed=1))
    assert differ(parts[0], parts[1])


@every
def test_held_out_data_are_fixed_and_count_once_at_any_batch_size(task):
    counted = []
    for size in (7, 32):
        batches = list(task.test_batches(size))
        assert {batch.mask.shape for batch in batches} == {(task.steps, size)}
        assert all(map(same, task.test_batches(size), batches))
        inside = [batch.mask > 0 for batch in batches]
        targets = [batch.targets[at] for batch, at in zip(batches, inside, strict=True)]
        counted.append(Counter(map(bytes, np.concatenate(targets))))
    assert counted[0] == counted[1]
    assert len(counted[0]) > 1


@every
def test_a_task_goes_through_json(task):
    fields = json.loads(json.dumps(dataclasses.asdict(task)))
    again = type(task)(**fields)
    assert again == task
    assert hash(again) == hash(task)
    assert same(again.batch(1, 4), task.batch(1, 4))


def test_another_process_finds_the_same_bits_and_loads_data_only_when_asked():
    code = (
        "import sys, zlib\nfrom braintrace_flax.tasks import *\n"
        "print({'sklearn', 'pydoc_data'} & set(sys.modules))\n"
        "for task in (Digits(), EvidenceAccumulation(), Text()):\n"
        "    print(zlib.crc32(b''.join(leaf.tobytes() for leaf in task.batch(7, 8, seed=1))))"
    )
    loaded, *found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert loaded == "set()"
    tasks_here = (Digits(), EvidenceAccumulation(), Text())
    here = [zlib.crc32(b"".join(leaf.tobytes() for leaf in task.batch(7, 8, seed=1))) for task in tasks_here]
    assert found == list(map(str, here))
    assert len(set(here)) == 3


@every_trial
def test_a_trial_starts_at_its_first_step_and_is_answered_at_the_end(task):
    name = next(name for name, other in TRIALS.items() if other is task)
    answer = ANSWERS.get(name, 4)
    for batch in (task.batch(0, 5), list(task.test_batches(100))[-1]):
        assert batch.reset[0].all()
        assert not batch.reset[1:].any()
        counts = batch.mask.sum(0)
        assert set(counts) <= {0.0, float(answer)}
        assert batch.mask[:-answer].sum() == 0
        assert counts.sum() > 0
    assert (counts == 0).sum() == (40 if isinstance(task, Digits) else 44)  # rows that 360 and 256 trials do not fill


# Digits


def test_digits_are_split_in_equal_shares_and_never_mixed():
    task = Digits()
    train, test = (set(part.tolist()) for part in task._split)
    assert (len(train), len(test)) == (1437, 360)
    assert train | test == set(range(1797))
    labels = task._data[1]
    assert np.abs(np.bincount(labels[list(test)]) - np.bincount(labels) / 5).max() < 1
    [held_out] = task.test_batches(360)
    assert sorted(held_out.targets[0]) == sorted(labels[list(test)])


def test_an_epoch_shows_each_digit_once_in_an_order_of_its_own():
    task = Digits(by="row")
    shown = [row.tobytes() for i in range(6) for row in task.batch(i, 479).inputs.swapaxes(0, 1)]
    first, second = shown[:1437], shown[1437:]
    train = task._data[0][task._split[0]]
    assert Counter(first) == Counter(second) == Counter(row.tobytes() for row in train)
    assert first != second
    assert shown[1000:2000] == [row.tobytes() for row in task.batch(1, 1000).inputs.swapaxes(0, 1)]  # over the edge


def test_pixels_and_rows_are_the_same_images():
    pixels, rows = Digits().batch(0, 4), Digits(by="row").batch(0, 4)
    assert np.array_equal(pixels.inputs.reshape(8, 8, 4).swapaxes(1, 2), rows.inputs)
    assert (pixels.inputs.min(), pixels.inputs.max()) == (0.0, 1.0)
    assert Digits().batch(0, 4).mask.sum(0).tolist() == [8] * 4
    assert Digits(by="row").batch(0, 4).mask.sum(0).tolist() == [2] * 4


# Streams


@every_stream
def test_a_stream_goes_on_from_position_to_position_and_round(task):
    ring = task._parts[0]
    task = dataclasses.replace(task, length=len(ring) // 20)
    batches = [task.batch(i, 8, seed=4) for i in range(22)]
    inputs = np.concatenate([batch.inputs for batch in batches])
    targets = np.concatenate([batch.targets for batch in batches])
    assert np.array_equal(inputs[1:], targets[:-1])
    assert np.array_equal(inputs[len(ring) :], inputs[: len(inputs) - len(ring)])
    assert not any(batch.reset.any() for batch in batches)
    assert all(batch.mask.all() for batch in batches)
    for row in range(8):  # streams are spread evenly: each comes to where the next one began
        gap = (row + 1) * len(ring) // 8 - row * len(ring) // 8
        ahead = inputs[gap : gap + 50, row]
        assert any(np.array_equal(inputs[shift : shift + 50, (row + 1) % 8], ahead) for shift in range(2))


@every_stream
def test_held_out_streams_are_the_end_of_the_record(task):
    record = task._parts[1]
    batches = list(task.test_batches(5))
    inside = np.concatenate([batch.mask for batch in batches]) > 0
    inputs = np.concatenate([batch.inputs for batch in batches])
    targets = np.concatenate([batch.targets for batch in batches])
    rows = [inputs[inside[:, row], row] for row in range(5)]
    assert np.array_equal(np.concatenate(rows), record[:-1])
    assert np.array_equal(np.concatenate([targets[inside[:, row], row] for row in range(5)]), record[1:])
    assert not any(batch.reset.any() for batch in batches)
    share = len(record) / (len(record) + len(task._parts[0]))
    assert share == pytest.approx(0.05 if isinstance(task, Text) else 0.2, abs=1e-3)


def test_a_huge_position_is_only_far_away():
    task, ring = Series(length=9), len(Series()._parts[0])
    assert same(task.batch(10**30 * ring, 4), task.batch(0, 4))


def test_text_reads_back_and_knows_what_is_frequent(tmp_path):
    path = tmp_path / "corpus.txt"
    text = "abcä" * 95 + "q" * 9 + "☃" + "z" * 12 + "ab" * 3 + "ß\U0001f40d"
    path.write_text(text, encoding="utf-8")
    task = Text(file=str(path), length=4, min_count=10)
    assert task.vocabulary == "abcä"  # z is frequent in the held-out part alone
    assert task.encode("bäq").tolist() == [1, 3, 4]
    assert task.encode("\U0001f40d\x00").tolist() == [4, 4]
    assert (task.num_inputs, task.num_outputs, task.is_tokens) == (5, 5, True)
    assert task.decode(np.concatenate(task._parts)) == text.translate(
        dict.fromkeys(map(ord, "q☃zß\U0001f40d"), "\ufffd")
    )


def test_text_of_python_itself_is_text():
    task = Text()
    assert len(task._parts[0]) > 400_000
    assert 60 < len(task.vocabulary) < 120
    assert "statement" in task.decode(task._parts[1])
    assert np.mean(task._parts[0] == task.num_outputs - 1) < 1e-3


def test_series_is_scaled_by_what_is_trained_on(tmp_path):
    train, test = Series()._parts
    assert (train.shape, test.shape) == ((640, 4), (160, 4))
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(0), 1, atol=1e-5)
    assert np.abs(test.mean(0)).max() > 0.01
    values = np.column_stack([np.arange(50.0), np.full(50, 3.0)])
    values[40:] = 1e6
    np.save(tmp_path / "values.npy", values)
    np.savetxt(tmp_path / "values.csv", values, delimiter=",", header="ramp,constant", comments="")
    found = [Series(file=str(tmp_path / name), length=4)._parts for name in ("values.npy", "values.csv")]
    assert same(*found)
    np.testing.assert_allclose(found[0][0][:, 0], (np.arange(40) - 19.5) / np.arange(40).std(), rtol=1e-6)
    assert not found[0][0][:, 1].any()
    assert found[0][1].min() > 1e4


# Generators


def test_copy_asks_for_what_was_shown():
    batch = Copy(symbols=5, length=4, delay=3).batch(0, 200)
    shown, cue = batch.inputs[..., :5], batch.inputs[..., 5]
    assert np.array_equal(shown[:4].argmax(-1), batch.targets[-4:])
    assert np.array_equal(shown.sum(-1), np.repeat([1.0, 0.0], [4, 7])[:, None].repeat(200, 1))
    assert np.array_equal(np.argwhere(cue)[:, 0], np.full(200, 7))
    np.testing.assert_allclose(np.bincount(batch.targets[-4:].ravel()) / 800, 0.2, atol=0.05)


def test_memory_chain_asks_for_the_first_bit():
    batch = MemoryChain(length=6).batch(0, 400)
    assert np.array_equal(batch.inputs[0, :, 0], 2.0 * batch.targets[-1] - 1)
    assert not batch.inputs[1:, :, 0].any()
    assert np.array_equal(batch.inputs[:, 0, 1], [0, 0, 0, 0, 0, 1])
    assert abs(batch.targets[-1].mean() - 0.5) < 0.08


def test_adding_marks_one_number_of_each_half():
    batch = Adding(length=9).batch(0, 2000)
    values, marks = batch.inputs[..., 0], batch.inputs[..., 1] == 1
    assert (marks[:4].sum(0) == 1).all()
    assert (marks[4:].sum(0) == 1).all()
    np.testing.assert_allclose(np.where(marks, values, 0).sum(0), batch.targets[-1, :, 0], rtol=1e-6)
    assert marks.any(1).all()
    assert batch.targets[-1].var() == pytest.approx(1 / 6, rel=0.1)


def test_delayed_match_is_a_match_if_both_stimuli_are_the_same():
    task = DelayedMatch(stimuli=3, neurons=4, sample=6, delay=5, probe=6, answer=3, rate=0.9, noise=0.05)
    batch = task.batch(0, 1000)
    groups = batch.inputs.reshape(20, 1000, 4, 4).mean(-1)
    sample, probe = groups[:6, :, :3].mean(0).argmax(-1), groups[11:17, :, :3].mean(0).argmax(-1)
    assert np.array_equal(sample == probe, batch.targets[-1] == 1)
    assert abs(batch.targets[-1].mean() - 0.5) < 0.06
    np.testing.assert_allclose(np.bincount(sample) / 1000, 1 / 3, atol=0.05)
    np.testing.assert_allclose(np.bincount(probe[sample == 0])[1:] / (sample == 0).sum(), 1 / 4, atol=0.06)
    assert set(np.unique(batch.inputs)) == {0.0, 1.0}
    assert groups[6:11].mean() == pytest.approx(0.05, abs=0.01)
    assert groups[17:, :, 3].mean() == pytest.approx(0.9, abs=0.02)
    rates = dataclasses.replace(task, coding="rates").batch(0, 1000)
    assert np.array_equal(rates.targets, batch.targets)
    assert batch.inputs[rates.inputs > 0.5].mean() == pytest.approx(0.9, abs=0.01)
    assert batch.inputs[rates.inputs < 0.5].mean() == pytest.approx(0.05, abs=0.01)


def test_evidence_is_on_the_side_of_the_majority():
    task = EvidenceAccumulation()
    batch = task.batch(0, 500)
    groups = batch.inputs.reshape(114, 500, 4, 10).mean(-1)
    cues = groups[:84].reshape(7, 12, 500, 4)
    left, right = cues[:, :8, :, 0].mean(1), cues[:, :8, :, 1].mean(1)
    assert ((left > 0) ^ (right > 0)).all()  # one side at a time
    side = right > left
    assert np.array_equal(side.sum(0) > 3, batch.targets[-1] == 1)
    assert abs(batch.targets[-1].mean() - 0.5) < 0.08
    agree = (side == (batch.targets[-1] == 1)).mean()
    assert 0.7 < agree < 0.85  # 0.7 would be the share on the favoured side, which is not always the majority
    assert set(side.sum(0)) == set(range(8))
    assert not cues[:, 8:, :, :2].any()
    assert not groups[84:, :, :2].any()
    assert not groups[:104, :, 2].any()
    assert groups[104:, :, 2].mean() == pytest.approx(0.5, abs=0.02)
    assert (left + right).mean() == pytest.approx(0.5, abs=0.02)
    assert groups[:, :, 3].mean() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("task", [Copy(), Adding(), DelayedMatch(), EvidenceAccumulation()], ids=repr)
def test_trials_to_test_on_are_none_of_those_to_train_on(task):
    def rows(batch):
        return {row.tobytes() for row in batch.inputs.swapaxes(0, 1)}

    [held_out] = task.test_batches(256)
    train = [rows(task.batch(position, 256, seed=seed)) for position in (0, 1) for seed in (0, 1)]
    assert [len(found) for found in (rows(held_out), *train)] == [256] * 5
    assert len(set.union(rows(held_out), *train)) == 5 * 256


# Errors

WRONG_FIELDS = [
    (lambda: Digits(by="column"), 'Digits needs by to be "pixel" or "row", got \'column\'.'),
    (lambda: Digits(answer=0), "Digits needs answer as a whole number of at least 1, got 0."),
    (lambda: Digits(by="row", answer=9), "Digits by row needs answer of at most 8 steps, got 9."),
    (lambda: Text(length=0), "Text needs length as a whole number of at least 1, got 0."),
    (lambda: Text(min_count=0), "Text needs min_count as a whole number of at least 1, got 0."),
    (lambda: Series(length=2.0), "Series needs length as a whole number of at least 1, got 2.0."),
    (lambda: Copy(symbols=1), "Copy needs symbols as a whole number of at least 2, got 1."),
    (lambda: Copy(delay=-1), "Copy needs delay as a whole number of at least 0, got -1."),
    (lambda: MemoryChain(length=True), "MemoryChain needs length as a whole number of at least 2, got True."),
    (lambda: Adding(length=1), "Adding needs length as a whole number of at least 2, got 1."),
    (lambda: DelayedMatch(coding="rate"), 'DelayedMatch needs coding to be "spikes" or "rates", got \'rate\'.'),
    (lambda: DelayedMatch(rate=1.5), "DelayedMatch needs rate as a number in [0, 1], got 1.5."),
    (lambda: DelayedMatch(noise=float("nan")), "DelayedMatch needs noise as a number in [0, 1], got nan."),
    (
        lambda: EvidenceAccumulation(cues=6),
        "EvidenceAccumulation needs an odd number of cues, lest sides tie, got cues=6.",
    ),
    (lambda: Copy().batch(-1, 4), "Copy.batch needs position as a whole number of at least 0, got -1."),
    (lambda: Copy().batch(0, 0), "Copy.batch needs batch_size as a whole number of at least 1, got 0."),
    (lambda: Copy().batch(0, 4, seed=-1), "Copy.batch needs seed as a whole number of at least 0, got -1."),
    (lambda: Copy().batch(0, 4, part=(2, 2)), "Copy.batch needs part (i, n) with i below n, got (2, 2)."),
    (lambda: Copy().batch(0, 4, part=(0, 3)), "Copy.batch cannot cut batch_size=4 into 3 equal parts."),
    (lambda: Copy().test_batches(0), "Copy.test_batches needs batch_size as a whole number of at least 1, got 0."),
    (
        lambda: Series(length=32).batch(0, 20),
        "Series has 640 steps to train on, too few for batch_size=20 streams of length=32, which need 660.",
    ),
    (lambda: Series().test_batches(160), "Series holds out 160 steps, too few for batch_size=160 streams."),
]


@pytest.mark.parametrize(("call", "message"), WRONG_FIELDS, ids=[message[:40] for _, message in WRONG_FIELDS])
def test_what_is_out_of_range_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call()
    assert str(error.value) == message  # nothing before or behind it


def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    def refusal(kind, name, content, error):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(error) as found:
            kind(file=str(tmp_path / name)).batch(0, 2)
        assert "\n" not in str(found.value)
        return str(found.value).replace(repr(str(tmp_path / name)), "FILE")

    assert refusal(Text, "none.txt", None, FileNotFoundError).endswith("found none at FILE.")
    assert refusal(Text, "short.txt", b"ab" * 50, ValueError).startswith("Text has 95 steps to train on, too few")
    assert "FILE has another encoding at byte 2" in refusal(Text, "latin.txt", b"ab\xe4c", ValueError)
    assert refusal(Text, "empty.txt", b"", ValueError).startswith("Text has 0 steps to train on")
    assert refusal(Series, "none.csv", None, FileNotFoundError).endswith("found none at FILE.")
    assert "FILE has none: rows differ" in refusal(Series, "ragged.csv", b"1,2\n3\n", ValueError)
    assert "could not convert" in refusal(Series, "words.csv", b"a,b\n1,x\n", ValueError)
    assert "has nan in row 1, column 0" in refusal(Series, "nan.csv", b"1,2\nnan,3\n", ValueError)
    assert "shape (0,)" in refusal(Series, "empty.csv", b"", ValueError)
    assert refusal(Series, "broken.npy", b"no array", ValueError).startswith("Series needs numbers")


@pytest.mark.parametrize(
    ("kind", "module", "message"),
    [(Digits, "sklearn.datasets", "install scikit-learn"), (Series, "matplotlib.cbook", r"braintrace-flax\[plot\]")],
)
def test_a_missing_package_is_named_when_its_data_are_read(monkeypatch, kind, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    task = kind()
    with pytest.raises(ModuleNotFoundError, match=message):
        task.batch(0, 4)


def test_every_task_is_public():
    found = {name for name in tasks.__all__ if isinstance(getattr(tasks, name), type)}
    assert {type(task).__name__ for task in ALL.values()} == found - {"Batch", "Task"}

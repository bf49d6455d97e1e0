"""What the TPU's compiler makes of a train step: where memory lies, and what chips send to one another."""

import re

import jax
import pytest

from braintrace_flax import plan
from braintrace_flax.planning.estimate import data_shapes, state_shapes
from braintrace_flax.planning.tpu import compile_for
from braintrace_flax.runs import GRU, LRU, Config, build
from braintrace_flax.tasks import Text

pytestmark = pytest.mark.loose_promotion  # Optax relies on it
TOPOLOGY, CHIPS = "v5e:2x2", 4
STEPS, WINDOW, BATCH, SIZE = 8, 4, 8, 256
SHARDED = ((r"layers/\d+/(in|out)_", ("fsdp",)), (r"layers/\d+/(in|back)$", ("fsdp",)), ("kernel", ("fsdp",)))


def config_of(network, rule, mesh, sharding=()):
    return Config(
        "tpu", Text(length=STEPS), network, rule=rule, window=WINDOW, batch_size=BATCH, mesh=mesh, sharding=sharding
    )


CASES = {
    "data": config_of(LRU(units=SIZE, width=SIZE, layers=1), "d_rtrl", "data=4"),
    "fsdp": config_of(LRU(units=SIZE, width=SIZE, layers=1), "d_rtrl", "fsdp=4", SHARDED),
    "data and fsdp": config_of(LRU(units=SIZE, width=SIZE, layers=1), "d_rtrl", "data=2,fsdp=2", SHARDED),
    "gru": config_of(GRU(units=SIZE, dtype="bfloat16"), "pp_prop", "data=2,fsdp=2", SHARDED),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    with jax.enable_x64(False):
        config = CASES[request.param]
        return config, compile_for(config, TOPOLOGY), parts_of(config)


def parts_of(config):
    """Shapes and names of weights, traces, and the places of traces among the arguments."""
    run = build(Config(**{**vars(config), "mesh": ""}))
    leaves = jax.tree_util.tree_leaves_with_path((state_shapes(run), *data_shapes(run, STEPS)))
    names = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    traces = {i: leaf for i, (name, leaf) in enumerate(names) if ".traces[" in name}
    weights = [leaf.shape for name, leaf in names if name.startswith("[0].params") and len(leaf.shape) > 1]
    return weights, traces


def test_all_of_the_state_is_updated_in_place(case):
    _, found, (_, traces) = case
    assert found.aliased > 0.99 * (found.arguments - 4096 * STEPS)
    aliases = {int(n) for n in re.findall(r"\{\d+\}: \((\d+), \{\}", found.text.splitlines()[0])}
    assert len(traces) > 3
    assert set(traces) <= aliases


def test_no_trace_is_sent_or_whole_on_every_chip(case):
    config, found, (_, traces) = case
    rows = BATCH // CHIPS
    large = {leaf.shape[1:] for leaf in traces.values() if len(leaf.shape) > 2}
    assert large or config.rule == "pp_prop"
    moved = [shape.dims for c in found.collectives for shape in c.shapes]
    assert moved
    sent = {(size, *own) for size in (rows, BATCH) for own in large}
    sent |= {(size, *leaf.shape[1:]) for size in (rows, BATCH) for leaf in traces.values() if config.rule == "pp_prop"}
    assert not [dims for dims in moved if dims in sent and len(dims) > 1]
    for own in large:  # the whole batch of a trace is nowhere
        assert f"[{','.join(map(str, (BATCH, *own)))}]" not in found.text
        assert f"[{','.join(map(str, (rows, *own)))}]" in found.text


def test_each_gradient_is_reduced_once_a_window(case):
    config, found, (weights, _) = case
    assert found.windows == STEPS // WINDOW
    shards = 1
    for axis, size in re.findall(r"(\w+)=(\d+)", config.mesh):
        shards *= int(size) if axis == "fsdp" else 1
    if shards > 1:
        large = [w for w in weights if w[0] == w[-1] == SIZE]
        moved = [(c.kind, s.dims, c.loops, c.group) for c in found.collectives for s in c.shapes if s.dims in large]
        once = [(kind, w, (found.windows,), shards) for w in large for kind in ("all-gather", "reduce-scatter")]
        assert sorted(moved) == sorted(once)
    else:
        sums = [s.dims for c in found.collectives if c.kind == "all-reduce" for s in c.shapes if len(s.dims) > 1]
        assert sorted(sums) == sorted(weights)
        assert {(c.kind, c.loops) for c in found.collectives} == {("all-reduce", (found.windows,))}


def test_no_time_step_waits_for_another_chip(case):
    _, found, _ = case
    assert not [c for c in found.collectives if len(c.loops) > 1]


def test_with_divided_units_no_more_is_sent_than_a_window_needs_without_traces():
    units = ((r"layers/\d+/(in|back)$", (None, None, "model")),)
    sent = {}
    with jax.enable_x64(False):
        for rule in ("tbptt", "d_rtrl", "pp_prop"):
            found = compile_for(config_of(GRU(units=SIZE), rule, "data=2,model=2", units), TOPOLOGY)
            sent[rule] = sorted(
                (c.kind, c.group, s.dims, c.loops) for c in found.collectives for s in c.shapes if s.dims
            )
    assert sent["tbptt"]
    assert sent["d_rtrl"] == sent["pp_prop"] == sent["tbptt"]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("braintrace_flax.planning.advice.RULES", ())
    file = tmp_path / "small.py"
    file.write_text(
        "from braintrace_flax.runs import GRU, Config\nfrom braintrace_flax.tasks import Copy\n"
        "task, network = Copy(symbols=3, length=3, delay=2), GRU(units=128)\n"
        "config = Config('small', task, network, rule='pp_prop', window=0, batch_size=8)\n"
    )
    base = ["--config", str(file), "--topology"]
    with jax.enable_x64(False):
        assert plan.main([*base, TOPOLOGY, "--mesh", "data=4", "--json", str(tmp_path / "plan.json")]) == 0
        shown = capsys.readouterr().out
        assert "By the compiler, on one chip" in shown
        assert re.search(r"all-reduce +1 +4", shown)
        assert '"collectives"' in (tmp_path / "plan.json").read_text()
        for topology, mesh, text in [
            ("v5e:2x2", "data=8", "The mesh 'data=8' takes 8 devices, and v5e:2x2 has 4."),
            ("v5e:3x7", "data=4", "knows no topology 'v5e:3x7'"),
        ]:
            assert plan.main([*base, topology, "--mesh", mesh]) == 2
            error = capsys.readouterr().err
            assert text in error
            assert error.count("\n") == 1


def test_what_does_not_fit_is_said():
    network = LRU(units=4096, width=4096, layers=1)
    wide = Config("wide", Text(length=2), network, window=1, batch_size=4 * 128, mesh="data=4")
    with jax.enable_x64(False):
        found = compile_for(wide, TOPOLOGY)
    assert not found.fits
    assert found.needed > 16 * 2**30

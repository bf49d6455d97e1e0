"""Plans from shapes alone: what they say of a config, and what they refuse."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from braintrace_flax import plan
from braintrace_flax.mesh import parse_mesh
from braintrace_flax.planning.advice import advise, compare
from braintrace_flax.planning.chips import CHIPS, Chip, PlanError, chip_of, size_of
from braintrace_flax.planning.estimate import estimate, largest_batch
from braintrace_flax.planning.hlo import Program
from braintrace_flax.planning.liveness import Divided, peak_bytes
from braintrace_flax.runs import LRU, Config
from braintrace_flax.tasks import Copy

pytestmark = pytest.mark.loose_promotion  # Optax relies on it
TASK = Copy(symbols=3, length=3, delay=2)
RULES = ((r"layers/\d+/(in|out)_", ("fsdp",)),)


def config_of(**changes):
    return replace(Config("tiny", TASK, LRU(units=256, width=128, layers=1), window=4, batch_size=16), **changes)


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.enable_x64(False):
        yield


def test_state_is_exact():
    need = estimate(config_of())
    weights = 4 * 128 * 256 * 4
    assert weights < need.parameters < 1.3 * weights
    assert 2 * need.parameters <= need.optimizer < 2.1 * need.parameters
    traces = 16 * 2 * 128 * 256 * 4  # two components, for two weights together
    assert traces < need.traces < 1.1 * traces
    assert need.total > need.activations > 0


def test_a_mesh_divides():
    whole = estimate(config_of())
    data = estimate(config_of(mesh="data=4"))
    both = estimate(config_of(mesh="data=2,fsdp=2", sharding=RULES))
    assert data.parameters == whole.parameters
    assert data.traces == both.traces
    assert 3.9 < whole.traces / data.traces < 4.1
    assert 1.5 < whole.parameters / both.parameters < 2
    assert data.activations < whole.activations
    units = estimate(config_of(mesh="model=2", sharding=(("in_", (None, "model")), ("carry", (None, "model")))))
    assert 1.8 < whole.traces / units.traces < 2.1


def test_traces_and_activations_follow_rule_window_and_dtype():
    own = estimate(config_of())
    assert estimate(config_of(rule="pp_prop")).traces < own.traces / 20
    assert estimate(config_of(trace_dtype="bfloat16")).traces < 0.6 * own.traces
    short, long = (estimate(config_of(rule="pp_prop", window=w)).activations for w in (1, 8))
    assert short < long


def test_the_largest_batch_fits_and_twice_as_much_does_not():
    config = config_of()
    memory = 80 * 2**20
    batch = largest_batch(config, memory)
    assert 0.9 * memory < estimate(replace(config, batch_size=batch)).total < 1.1 * memory
    assert largest_batch(config, 1000) == 0


@pytest.fixture
def fewer_rules(monkeypatch):
    monkeypatch.setattr("braintrace_flax.planning.advice.RULES", ("pp_prop",))


@pytest.mark.usefixtures("fewer_rules")
def test_advice_for_what_fits_and_what_does_not():
    config = config_of(batch_size=64)
    own = estimate(config)
    small = Chip("small", int(0.8 * own.total), 1e12, 1e9, 1e9)
    rows = compare(config, small.memory)
    assert [(row.rule, row.window) for row in rows] == [
        *((rule, window) for rule in ("d_rtrl", "pp_prop") for window in (4, 1)),
        ("bptt", 8),
    ]
    told = "\n".join(advise(config, small, rows[0], rows))
    assert "It does not fit" in told
    assert "This would fit: `--trace_dtype bfloat16`" in told
    assert "This would fit: `--rule pp_prop`" in told
    assert f"--batch_size {rows[0].largest_batch}" in told
    told = "\n".join(advise(config, CHIPS["v5e"], rows[0], rows))
    assert "It fits" in told
    assert "Traces are most of it" in told


@pytest.mark.usefixtures("fewer_rules")
def test_the_command(tmp_path, capsys):
    file = tmp_path / "tiny.py"
    file.write_text(
        "from braintrace_flax.runs import GRU, Config\nfrom braintrace_flax.tasks import Copy\n"
        "task, network = Copy(symbols=3, length=3, delay=2), GRU(units=8)\n"
        "config = Config('tiny', task, network, rule='pp_prop', window=8, batch_size=8)\n"
    )
    out = tmp_path / "plan.json"
    assert plan.main(["--config", str(file), "--mesh", "data=4", "--json", str(out), "--clip=2"]) == 0
    shown = capsys.readouterr().out
    assert "tiny: 475 parameters, batch 8, sequences of 8" in shown
    assert "bptt" in shown
    found = json.loads(out.read_text())
    assert found["rows"][0]["rule"] == "pp_prop"
    assert found["rows"][0]["total"] == sum(found["rows"][0]["need"].values())
    for arguments, text in [
        (["--topology", "v9:2x2"], "There is no chip 'v9': v4, v5e, v5p, v6e are known."),
        (["--topology", "v5e:two"], "A topology is a chip and a shape"),
        (["--topology", "v5e:2x2"], "`--topology` needs libtpu"),
        (["--chip", "v1"], "There is no chip 'v1'"),
        (["--mesh", "data=3"], "A batch of 8 cannot be divided over 3 devices."),
        (["--mesh", "rows=3"], "has an axis 'rows'"),
        (["--topology"], "`--topology` needs a value."),
    ]:
        if "libtpu" in text and plan_has_libtpu():
            continue
        assert plan.main(["--config", str(file), *arguments]) == 2
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


def plan_has_libtpu():
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


def test_topologies():
    assert (chip_of("v6e").name, size_of("v5e:16x16"), size_of("v5p:8x8x8")) == ("v6e", 256, 512)
    with pytest.raises(PlanError, match="There is no chip"):
        size_of("8x8")


def test_what_is_alive_at_once():
    x = jnp.zeros((8, 8), jnp.float32)
    size = 8 * 8 * 4

    def chain(a):  # one product at a time, and the one before it
        for _ in range(5):
            a = jnp.tanh(a @ a)
        return a

    assert peak_bytes(jax.make_jaxpr(chain)(x)) == 2 * size

    def all_kept(a):
        found = [a @ (a + i) for i in range(5)]
        return sum(jnp.sum(f @ f) for f in found)

    assert peak_bytes(jax.make_jaxpr(all_kept)(x)) == 6 * size
    divided = peak_bytes(jax.make_jaxpr(all_kept)(x), Divided(sizes={8: 2}))
    assert divided == 3 * size

    def swapped(a, b):  # neither can be written before the other is read
        return b + 1.0, a + b

    assert peak_bytes(jax.make_jaxpr(swapped)(x, x)) == size  # a copy of one

    def layers(*pairs):  # copies of two sets at once
        return [new for a, b in zip(pairs[::2], pairs[1::2], strict=True) for new in swapped(a, b)]

    assert peak_bytes(jax.make_jaxpr(layers)(*[x] * 8)) == 2 * size


TEXT = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %s = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (i: f32[64,32]) -> f32[16,32] {
  %i = f32[64,32]{1,0} parameter(0)
  %r = f32[64,32]{1,0} all-reduce(%i), channel_id=7, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %d = f32[16,32]{1,0} dynamic-slice(%r), dynamic_slice_sizes={16,32}
}

%cond (p: (s32[], bf16[8,16])) -> pred[] {
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%g, %n), direction=LT
}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p = (s32[], bf16[8,16]{1,0}) parameter(0)
  %a = bf16[8,16]{1,0} get-tuple-element(%p), index=1
  %w = bf16[16,16]{1,0:T(8,128)(2,1)S(1)} all-gather(%q), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}
  %c = f32[8,16]{1,0} convolution(%a, %w), window={size=1}, dim_labels=b0f_io0->b0f
  ROOT %t = (s32[], bf16[8,16]) tuple(%i, %a)
}

ENTRY %main (p0: f32[64,32]) -> f32[16,32] {
  %p0 = f32[64,32]{1,0} parameter(0)
  %while.1 = (s32[], bf16[8,16]) while(%t0), condition=%cond, body=%body
  %e = f32[64,64]{1,0} dot(%p0, %p0), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %f = f32[16,32]{1,0} fusion(%p0), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_program_is_read():
    program = Program(TEXT)
    gather, scatter = program.collectives()
    assert (gather.kind, gather.times, gather.loops, gather.group) == ("all-gather", 5, (5,), 2)
    assert (str(gather.shapes[0]), gather.bytes, gather.shapes[0].in_hbm) == ("bf16[16,16]", 512, False)
    assert gather.sent == 5 * 512 / 2
    assert (scatter.kind, scatter.times, scatter.group, scatter.bytes) == ("reduce-scatter", 1, 4, 64 * 32 * 4)
    assert program.flops() == 5 * 2 * 8 * 16 * 16 + 2 * 64 * 64 * 32
    assert program.bytes_accessed() > 64 * 64 * 4


@pytest.mark.parametrize(
    ("name", "topology", "least"), [("pod_gru", "v5p:8x8x8", 1.2e9), ("pod_lru", "v5e:16x16", 1e8)]
)
def test_configs_for_pods_are_sound(name, topology, least):
    config = plan.parse(["--config", f"configs/{name}.py"]).config
    sizes = parse_mesh(config.mesh)
    assert math.prod(sizes.values()) == size_of(topology)
    need = estimate(config)
    assert need.parameters * sizes.get("fsdp", 1) > 4 * least
    assert need.total < 0.9 * chip_of(topology).memory

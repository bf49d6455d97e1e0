"""The peer library and this one find the same structure in the same models, apart from a table of differences."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace_core
from braintrace_core import DiagnosticKind, compile_etrace_graph, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer = pytest.importorskip("braintrace", reason="braintrace (the peer library) is not installed for this JAX")
    brainevent = pytest.importorskip("brainevent", reason="braintrace needs brainevent")
    neurons = pytest.importorskip("brainpy.state", reason="the peer's spiking models come from brainpy")
    braintools = pytest.importorskip("braintools", reason="braintrace needs braintools")
jax.config.update("jax_enable_x64", True)  # the imports above may have reset it

pytestmark = [pytest.mark.loose_promotion, pytest.mark.filterwarnings("ignore")]


# Models


class Stack(brainstate.nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = list(layers)

    def update(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Leaky(brainstate.nn.Module):
    """A layer that feeds leaky units."""

    def __init__(self, layer: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def init_state(self, batch_size: int | None = None) -> None:
        self.h = brainstate.HiddenState(jnp.zeros((*(() if batch_size is None else (batch_size,)), *self.shape)))

    def update(self, x: Any) -> Any:
        self.h.value = 0.9 * self.h.value + self.layer(x)
        return self.h.value


class PeerSpiking(brainstate.nn.Module):
    """The peer's way to write a recurrent spiking layer, with our names."""

    def __init__(self, size_in: int, neuron: Any, synapse: Any = None, output: Any = None) -> None:
        super().__init__()
        size = neuron.out_size[-1]
        self.neuron = neuron
        dense = peer.nn.Linear(size_in + size, size, b_init=None)
        if synapse is None:
            self.projection = neurons.DeltaProj(comm=dense, post=neuron)
        else:
            self.projection = neurons.AlignPostProj(comm=dense, syn=synapse, out=output, post=neuron)

    def update(self, x: Any) -> Any:
        self.projection(jnp.concatenate([x, self.neuron.get_spike()], axis=-1))
        self.neuron(0.0)
        return self.neuron.get_spike()


ZEROS = braintools.init.ZeroInit()
SPIKE = {"R": 1.0, "tau": 10.0, "V_th": 1.0, "V_reset": 0.0, "V_rest": 0.0, "V_initializer": ZEROS}
SPIKE |= {"spk_reset": "soft", "spk_fun": braintools.surrogate.ReluGrad()}


def peer_lif(size: int) -> Any:
    return neurons.LIF(size, **SPIKE)


def peer_alif(size: int) -> Any:
    return neurons.ALIF(size, tau_a=100.0, beta=0.1, **SPIKE)


def peer_expon(size: int) -> Any:
    return neurons.Expon(size, tau=10.0, g_initializer=ZEROS)


class Pair(NamedTuple):
    """The same model of both libraries."""

    ours: Callable[[], Any]
    peers: Callable[[], Any]
    input: Any = (3,)  # a shape, or the input itself

    def example(self, batch: int | None) -> Any:
        if isinstance(self.input, tuple):
            # The peer's convolutions have parameters of float32 and cast nothing.
            return jnp.zeros((*(() if batch is None else (batch,)), *self.input), jnp.float32)
        return self.input if batch is None else jnp.broadcast_to(self.input, (batch, *self.input.shape))


def both(build: Callable[[Any], Any], input: Any = (3,)) -> Pair:
    """One recipe for the two libraries' ``nn``."""
    return Pair(lambda: build(nn), lambda: build(peer.nn), input)


def leaky(ours: Callable[[], Any], peers: Callable[[], Any], out: tuple[int, ...] = (4,), input: Any = (3,)) -> Pair:
    return Pair(lambda: Leaky(ours(), out), lambda: Leaky(peers(), out), input)


STRUCTURE = (np.array([0, 2, 1, 0]), np.array([1, 0, 3, 2]), (3, 4))


def peer_sparse() -> Any:
    dense = np.zeros(STRUCTURE[2])
    dense[STRUCTURE[:2]] = 1.0
    return peer.nn.SparseLinear(brainevent.CSR.fromdense(jnp.asarray(dense)), b_init=None)


PLAIN_CELLS = """
    ValinaRNNCell GRUCell MGUCell CFNCell LSTMCell URLSTMCell MinimalRNNCell LRUCell MiniGRU MiniLSTM
""".split()
CELLS = {
    **{name: both(lambda library, name=name: getattr(library, name)(3, 4)) for name in PLAIN_CELLS},
    "LeakyRateReadout": Pair(lambda: nn.LeakyRateReadout(3, 4), lambda: peer.nn.LeakyRateReadout(3, 4, tau=5.0)),
}
LAYERS = {
    "Linear": leaky(lambda: nn.Linear(3, 4), lambda: peer.nn.Linear(3, 4)),
    "Linear without bias": leaky(lambda: nn.Linear(3, 4, b_init=None), lambda: peer.nn.Linear(3, 4, b_init=None)),
    "Linear masked": leaky(
        lambda: nn.Linear(3, 4, mask=np.eye(3, 4)), lambda: peer.nn.Linear(3, 4, w_mask=np.eye(3, 4))
    ),
    "GroupedLinear": leaky(lambda: nn.GroupedLinear(2, 3, 4), lambda: peer.nn.GroupedLinear(2, 3, 4), (2, 4), (2, 3)),
    "SignedWLinear": leaky(lambda: nn.SignedWLinear(3, 4), lambda: peer.nn.SignedWLinear(3, 4)),
    "ScaledWSLinear": leaky(lambda: nn.ScaledWSLinear(3, 4), lambda: peer.nn.ScaledWSLinear(3, 4)),
    "SparseLinear": leaky(lambda: nn.SparseLinear(STRUCTURE, b_init=None), peer_sparse),
    "LoRA": leaky(lambda: nn.LoRA(3, 2, 4), lambda: peer.nn.LoRA(3, 2, 4)),
    "LoRA around Linear": leaky(
        lambda: nn.LoRA(3, 2, 4, base=nn.Linear(3, 4)),
        lambda: peer.nn.LoRA(3, 2, 4, base_module=peer.nn.Linear(3, 4)),
    ),
    "Embedding": leaky(lambda: nn.Embedding(5, 4), lambda: peer.nn.Embedding(5, 4), (4,), jnp.asarray(2)),
    "Conv1d": leaky(
        lambda: nn.Conv1d((6, 3), 4, 3), lambda: peer.nn.Conv1d((6, 3), 4, 3, b_init=ZEROS), (6, 4), (6, 3)
    ),
    "Conv2d": leaky(
        lambda: nn.Conv2d((5, 4, 2), 3, (3, 2)),
        lambda: peer.nn.Conv2d((5, 4, 2), 3, (3, 2), b_init=ZEROS),
        (5, 4, 3),
        (5, 4, 2),
    ),
}
SPIKING = {
    "LIF delta": Pair(lambda: nn.SpikingLayer(3, nn.LIF(4)), lambda: PeerSpiking(3, peer_lif(4))),
    "LIF Expon CUBA": Pair(
        lambda: nn.SpikingLayer(3, nn.LIF(4), nn.Expon(4), nn.CUBA()),
        lambda: PeerSpiking(3, peer_lif(4), peer_expon(4), neurons.CUBA(scale=1.0)),
    ),
    "LIF Expon COBA": Pair(
        lambda: nn.SpikingLayer(3, nn.LIF(4), nn.Expon(4), nn.COBA(E=3.0)),
        lambda: PeerSpiking(3, peer_lif(4), peer_expon(4), neurons.COBA(E=3.0)),
    ),
    "ALIF delta": Pair(lambda: nn.SpikingLayer(3, nn.ALIF(4)), lambda: PeerSpiking(3, peer_alif(4))),
    "ALIF Expon CUBA": Pair(
        lambda: nn.SpikingLayer(3, nn.ALIF(4), nn.Expon(4), nn.CUBA()),
        lambda: PeerSpiking(3, peer_alif(4), peer_expon(4), neurons.CUBA(scale=1.0)),
    ),
}
STACKS = {
    "2 GRU": both(lambda library: Stack(library.GRUCell(3, 4), library.GRUCell(4, 4))),
    "2 GRU, readout": both(lambda library: Stack(library.GRUCell(3, 4), library.GRUCell(4, 5), library.Linear(5, 2))),
    "GRU, LSTM": both(lambda library: Stack(library.GRUCell(3, 4), library.LSTMCell(4, 4))),
    "GRU, LSTM, readout": both(
        lambda library: Stack(library.GRUCell(3, 4), library.LSTMCell(4, 5), library.Linear(5, 2))
    ),
    "2 LRU": both(lambda library: Stack(library.LRUCell(3, 4), library.LRUCell(3, 4))),
    "2 LRU, readout": both(lambda library: Stack(library.LRUCell(3, 4), library.LRUCell(3, 5), library.Linear(3, 2))),
    "2 LIF, readout": Pair(
        lambda: Stack(nn.SpikingLayer(3, nn.LIF(4)), nn.SpikingLayer(4, nn.LIF(5)), nn.Linear(5, 2)),
        lambda: Stack(PeerSpiking(3, peer_lif(4)), PeerSpiking(4, peer_lif(5)), peer.nn.Linear(5, 2)),
    ),
    "2 LIF of one width": Pair(
        lambda: Stack(nn.SpikingLayer(3, nn.LIF(4)), nn.SpikingLayer(4, nn.LIF(4))),
        lambda: Stack(PeerSpiking(3, peer_lif(4)), PeerSpiking(4, peer_lif(4))),
    ),
}
MODELS = CELLS | LAYERS | SPIKING | STACKS


# What is compared


class Structure(NamedTuple):
    """What a graph says, in terms that both libraries share."""

    groups: frozenset[Any]  # (hidden paths, states a unit, shape)
    relations: frozenset[Any]  # (family of the operator, (key, parameter, leaf) of each operand, hidden paths)
    classes: frozenset[Any]  # (parameter, hidden path, class)
    weight_to_weight: frozenset[Any]  # parameters


FAMILIES = {"grouped_mv": "gmv", "grouped_mm": "gmm", "emb": "embedding", "emb_v": "embedding"}
NAMES = {"projection/comm": "W", "projection/post": "neuron", "projection/syn": "synapse", "base_module": "base"}


def rename(path: Any) -> str:
    """A path, in our names."""
    text = "/".join(map(str, path))
    for theirs, ours in NAMES.items():
        text = text.replace(theirs, ours)
    return text


def structure(graph: Any) -> Structure:
    relations, classes = set(), set()
    for relation in graph.hidden_param_op_relations:
        name = relation.primitive.name.removeprefix("etp_")
        leaves = relation.trainable_leaf_indices
        operands = frozenset((key, rename(path), leaves[key]) for key, path in relation.trainable_paths.items())
        hidden = frozenset(map(rename, relation.connected_hidden_paths))
        relations.add((FAMILIES.get(name, name), operands, hidden))
        for path, kind in relation.path_classification.items():
            classes.add((rename(relation.path), rename(path), str(kind)))
    excluded = DiagnosticKind.RELATION_EXCLUDED_WEIGHT_TO_WEIGHT.name
    return Structure(
        frozenset(
            (frozenset(map(rename, g.hidden_paths)), g.num_state, tuple(g.varshape)) for g in graph.hidden_groups
        ),
        frozenset(relations),
        frozenset(classes),
        frozenset(rename(record.weight_path) for record in graph.diagnostics if record.kind.name == excluded),
    )


def compiled(build: Callable[[], Any], compiler: Callable[..., Any], example: Any, batch: int | None = None) -> Any:
    with warnings.catch_warnings(), brainstate.environ.context(dt=1.0):
        warnings.simplefilter("ignore")
        model = build()
        brainstate.nn.init_all_states(model, **({} if batch is None else {"batch_size": batch}))
        return compiler(model, example)


class Difference(NamedTuple):
    """A field of the structure in which the two differ, what each has that the other has not, and why."""

    field: str
    only_ours: Callable[[int | None], set[Any]]
    only_peer: Callable[[int | None], set[Any]]
    reason: str


def standardised(**leaves: int) -> Callable[[int | None], set[Any]]:
    """The relation of the weight-standardised layer with these operands."""
    operands = frozenset((key, "layer/weight", leaf) for key, leaf in leaves.items())
    return lambda batch: {("mv" if batch is None else "mm", operands, frozenset(["h"]))}


DIFFERENCES = {
    "ScaledWSLinear": Difference(
        "relations",
        standardised(weight=1, bias=0),  # made of gain (leaf 1) and weight (leaf 2): the index is that of the first
        standardised(weight=2),
        "rules.md, traps 2 and 3: the peer multiplies by the gain and adds the bias outside of its operator, so that "
        "neither has a relation; ours has the bias as an operand and the gain in the weight's processing chain",
    ),
    "2 LRU, readout": Difference(
        "weight_to_weight",
        lambda batch: set(),
        lambda batch: {"layers/1/C_re/weight", "layers/1/C_im/weight", "layers/1/D"},
        "compiler.md, 'How it is found' 4: classes are those of paths to hidden states. The last layer's output "
        "weights reach none, which is RELATION_EXCLUDED_NON_TEMPORAL, although a readout stands behind them",
    ),
}


def test_every_layer_that_both_have_is_compared():
    shown = {name.split()[0] for name in MODELS}
    missing = set(nn.__all__) & set(peer.nn.__all__) - shown
    assert missing == {"Conv3d"}  # one class for all numbers of axes


@pytest.mark.parametrize("batch", [None, 2], ids=["one stream", "batch"])
@pytest.mark.parametrize("name", MODELS)
def test_structure(name, batch):
    pair = MODELS[name]
    example = pair.example(batch)
    ours = structure(compiled(pair.ours, compile_etrace_graph, example, batch))
    theirs = structure(compiled(pair.peers, peer.compile_etrace_graph, example, batch))
    difference = DIFFERENCES.get(name)
    for field in Structure._fields:
        mine, other = getattr(ours, field), getattr(theirs, field)
        only_ours, only_peer = set(), set()
        if difference is not None and difference.field == field:
            only_ours, only_peer = difference.only_ours(batch), difference.only_peer(batch)
        assert (mine - other, other - mine) == (only_ours, only_peer), field


def test_differences_are_of_models_here():
    assert set(DIFFERENCES) <= set(MODELS)


# What the peer refuses or overlooks, and ours has to find (the end of rules.md)


class Unit(brainstate.nn.Module):
    """States, two parameters and a step that is given as a function of both and of the library's operators."""

    def __init__(self, step: Callable[..., Any], library: Any, states: tuple[str, ...] = ("h",)) -> None:
        super().__init__()
        self.step, self.library, self.names = step, library, states
        self.w = brainstate.ParamState(jnp.eye(4))
        self.v = brainstate.ParamState(jnp.eye(4))

    def init_state(self) -> None:
        for name in self.names:
            setattr(self, name, brainstate.HiddenState(jnp.zeros(4)))

    def update(self, x: Any, **named: Any) -> Any:
        old = [getattr(self, name).value for name in self.names]
        new = self.step(self.library.matmul, x, self.w.value, self.v.value, *old, **named)
        for name, value in zip(self.names, new, strict=True):
            getattr(self, name).value = value
        return new[0]


def difference_of_states(matmul, x, w, v, V, a):
    d = V - a
    return 0.9 * V + matmul(x, w + 0 * v) - d, 0.8 * a + 0.1 * d


def inside_checkpoint(matmul, x, w, v, h):
    return (jax.checkpoint(lambda w, h: 0.9 * h + matmul(x, w + 0 * v))(w, h),)


def inside_custom_vjp(matmul, x, w, v, h):
    project = jax.custom_vjp(lambda w: matmul(x, w + 0 * v))
    project.defvjp(lambda w: (project(w), None), lambda _, g: (jnp.outer(x, g),))
    return (0.9 * h + project(w),)


def fused_and_split(matmul, x, w, v, h):
    y = matmul(x, jnp.concatenate([w, v], axis=1))
    return (jax.nn.sigmoid(y[:4]) * h + y[4:],)


def unmodified(matmul, x, w, v, h):
    return (0.9 * h + x @ (w + 0 * v),)


OVERLOOKED = {
    "v - a": (difference_of_states, ("V", "a"), "rules.md, refused: two hidden states read by one equation"),
    "checkpoint": (inside_checkpoint, ("h",), "rules.md, trap 4: operators inside jax.checkpoint vanish"),
    "custom_vjp": (inside_custom_vjp, ("h",), "rules.md, trap 4: operators inside custom_vjp vanish"),
    "fused": (fused_and_split, ("h",), "compiler.md, 'How it is found' 5 and design.md: patterns, not shapes, decide"),
    "unmodified": (unmodified, ("h",), "design.md, 'Unmodified models': ordinary operations are lifted"),
}


@pytest.mark.parametrize("name", OVERLOOKED)
def test_what_the_peer_overlooks_has_a_relation(name):
    step, states, _ = OVERLOOKED[name]
    x = jnp.ones(4)
    ours = compiled(lambda: Unit(step, braintrace_core, states), compile_etrace_graph, x)
    [relation] = ours.hidden_param_op_relations
    assert set(relation.trainable_processing_chains["weight"].paths) == {("w",), ("v",)}
    assert {path for group in relation.hidden_groups for path in group.hidden_paths} == {(name,) for name in states}
    try:
        theirs = compiled(lambda: Unit(step, peer, states), peer.compile_etrace_graph, x)
    except ValueError as error:
        assert "hidden state" in str(error)  # noqa: PT017 - a graph without relations is as good as an error
    else:
        assert not theirs.hidden_param_op_relations


def test_keyword_inputs():
    def step(matmul, x, w, v, h, gain):
        return (0.9 * h + gain * matmul(x, w + 0 * v),)

    def of(compiler):
        return lambda model, x: compiler(model, x, gain=jnp.asarray(2.0))

    ours = compiled(lambda: Unit(step, braintrace_core), of(compile_etrace_graph), jnp.ones(4))
    assert len(ours.hidden_param_op_relations) == 1
    with pytest.raises(TypeError, match="gain"):
        compiled(lambda: Unit(step, peer), of(peer.compile_etrace_graph), jnp.ones(4))

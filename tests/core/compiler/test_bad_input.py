"""What goes wrong is said where it goes wrong, with the name of what is at fault."""

import re

import brainstate
import jax
import jax.numpy as jnp
import pytest

from braintrace_core import CompilationError, compile_etrace_graph, compile_step_graph, nn
from tests.core.compiler.zoo import both

X = jnp.ones(3)


class Custom(brainstate.nn.Module):
    """A module from a function of itself and its input, with a parameter ``w`` and a state ``h``."""

    def __init__(self, function, state=None):
        super().__init__()
        self.function = function
        self.w = brainstate.ParamState(jnp.ones((3, 4)))
        self.h = brainstate.HiddenState(jnp.zeros(4) if state is None else state)

    def update(self, x):
        return self.function(self, x)


def leaky(model, x):
    model.h.value = 0.5 * model.h.value + x @ model.w.value
    return model.h.value


def refuse(text, make, *args, error=CompilationError, **kwargs):
    with pytest.raises(error, match=re.escape(text)):
        make(*args, **kwargs)


# At compile time


def test_no_hidden_state():
    text = "The step reads or writes no hidden state, so there is nothing to carry credit through time."
    refuse(text, compile_etrace_graph, nn.Linear(3, 4), X)
    refuse(text, compile_step_graph, lambda p, h, x: (h, x @ p), jnp.ones((3, 4)), (), X)


def test_only_states_without_derivatives():
    def step(p, count, x):
        return count + 1, x @ p

    refuse("The step reads or writes no hidden state", compile_step_graph, step, jnp.ones((3, 4)), jnp.asarray(0), X)


def test_no_parameter():
    text = "The step reads no parameter, so there is nothing to train."
    cell = nn.LIF(3)
    cell.init_state()
    refuse(text, compile_etrace_graph, cell, X)
    refuse(text, compile_step_graph, lambda p, h, x: both(0.5 * h + x), {}, jnp.zeros(3), X)


def test_nothing_reaches_a_hidden_state():
    text = "No parameter of the model acts on a hidden state in a way that a trace can follow, so nothing can be learnt"

    def step(p, h, x):
        return 0.5 * h + x, h @ p

    refuse(text, compile_step_graph, step, jnp.ones((3, 4)), jnp.zeros(3), X)
    with pytest.raises(
        CompilationError, match="  - 'params' reaches no hidden state: it acts on the present output only"
    ):
        compile_step_graph(step, jnp.ones((3, 4)), jnp.zeros(3), X)


def test_a_state_that_changes_its_shape_or_dtype():
    def shorter(model, x):
        model.h.value = (x @ model.w.value)[:3]

    refuse(
        "Hidden state 'h' changes between steps: it enters with shape (4,) and dtype float64 and leaves with shape "
        "(3,) and dtype float64.",
        compile_etrace_graph,
        Custom(shorter),
        X,
    )

    def coarser(p, carry, x):
        return {"h": (x @ p).astype(jnp.float32)}, x

    refuse(
        "Hidden state 'carry/h' changes between steps: it enters with shape (4,) and dtype float64 and leaves with "
        "shape (4,) and dtype float32.",
        compile_step_graph,
        coarser,
        jnp.ones((3, 4)),
        {"h": jnp.zeros(4)},
        X,
    )


def test_a_carry_of_another_structure():
    step = lambda p, carry, x: ({"h": x @ p, "c": x}, x)  # noqa: E731
    text = "The step returned a carry of another structure than it was given: PyTreeDef({'c': *, 'h': *}) instead of"
    refuse(text, compile_step_graph, step, jnp.ones((3, 4)), {"h": jnp.zeros(4)}, X)


@pytest.mark.parametrize("result", [lambda h: h, lambda h: (h, h, h), lambda h: [h, h]], ids=["one", "three", "list"])
def test_a_step_that_does_not_return_carry_and_out(result):
    text = "A step function returns `(carry, out)`, this one returned a "
    refuse(text, compile_step_graph, lambda p, h, x: result(x @ p), jnp.ones((3, 4)), jnp.zeros(4), X)


def test_a_parameter_written_inside_the_step():
    def decaying(model, x):
        model.w.value = 0.9 * model.w.value
        return leaky(model, x)

    refuse(
        "Parameter 'w' is written inside the step. Parameters change through the optimizer only",
        compile_etrace_graph,
        Custom(decaying),
        X,
    )


def test_an_integer_state_that_a_parameter_acts_on():
    def counting(model, x):
        model.h.value = model.h.value + (x @ model.w.value > 0).astype(jnp.int32)
        return x

    refuse(
        "Parameter 'w' acts on hidden state 'h', whose dtype int32 has no derivative. Keep it in a "
        "`brainstate.ShortTermState`",
        compile_etrace_graph,
        Custom(counting, jnp.zeros(4, jnp.int32)),
        X,
    )


def test_an_integer_state_by_itself_is_no_concern():
    class Counting(Custom):
        def __init__(self):
            super().__init__(leaky)
            self.n = brainstate.HiddenState(jnp.asarray(0))

        def update(self, x):
            self.n.value = self.n.value + 1
            return super().update(x)

    graph = compile_etrace_graph(Counting(), X)
    assert [g.hidden_paths for g in graph.hidden_groups] == [[("h",)]]
    assert graph.hidden_perturb.perturb_hidden_paths == [("h",)]
    graph.step_with_factors(X)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((X, X), {}, "too many positional arguments"),
        ((X,), {"gate": X}, "got an unexpected keyword argument 'gate'"),
    ],
    ids=["few", "many", "unknown"],
)
def test_the_wrong_number_of_inputs(args, kwargs, reason):
    text = f"The step does not take the example inputs that it is compiled with: {reason}. Its signature is "
    cell = nn.GRUCell(3, 4)
    cell.init_state()
    refuse(text, compile_etrace_graph, cell, *args, **kwargs)
    step = lambda p, h, x: both(0.5 * h + x @ p)  # noqa: E731
    refuse(text, compile_step_graph, step, jnp.ones((3, 4)), jnp.zeros(4), *args, **kwargs)


def test_an_error_of_the_models_own_stays_what_it_is():
    def broken(p, h, x):
        return both(jnp.dot(x, p, h, h, h))

    with pytest.raises(TypeError, match="positional argument"):
        compile_step_graph(broken, jnp.ones((3, 4)), jnp.zeros(4), X)


# At call time


def step_with_two_inputs(p, carry, x, extra):
    h = 0.5 * carry["h"] + (x + extra["a"]) @ p["w"] + p["b"]
    return {"h": h, "n": carry["n"] + 1}, h


PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
CARRY = {"h": jnp.zeros(4), "n": jnp.asarray(0)}
EXTRA = {"a": jnp.ones(3), "b": jnp.ones(2)}


@pytest.fixture(scope="module")
def graph():
    return compile_step_graph(step_with_two_inputs, PARAMS, CARRY, X, EXTRA)


def old_values(graph, **changed):
    values = {
        ("params", "w"): PARAMS["w"],
        ("params", "b"): PARAMS["b"],
        ("carry", "h"): CARRY["h"],
        ("carry", "n"): CARRY["n"],
    }
    return [changed.get(path[-1], values[path]) for path in graph.module_info.paths]


INPUTS = {
    "few": (
        (X,),
        "The step was compiled for 3 input array(s) (input 0, input 1['a'], input 1['b']) and was called with 1 "
        "(input 0)",
    ),
    "many": ((X, EXTRA, X), "was called with 4 (input 0, input 1['a'], input 1['b'], input 2)"),
    "renamed": ((X, {"a": X, "c": X}), "was called with 3 (input 0, input 1['a'], input 1['c'])"),
    "shape": (
        (X, EXTRA | {"b": jnp.ones(5)}),
        "The input 1['b'] has shape (5,) and dtype float64; the step was compiled for (2,) and float64.",
    ),
    "dtype": (
        (X.astype(jnp.float32), EXTRA),
        "The input 0 has shape (3,) and dtype float32; the step was compiled for (3,) and float64.",
    ),
    "batch": (
        (jnp.ones((2, 3)), EXTRA),
        "The input 0 has shape (2, 3) and dtype float64; the step was compiled for (3,)",
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_inputs_that_do_not_fit(graph, case):
    args, text = INPUTS[case]
    for call in (graph.step_with_factors, graph.module_info.jaxpr_call):
        refuse(text, call, *args, old_state_vals=old_values(graph), error=ValueError)
    terms = graph.hidden_perturb.init_perturb_data()
    refuse(text, graph.call_hidden_perturb, args, terms, old_values(graph), error=ValueError)


def test_states_that_do_not_fit(graph):
    def call(values):
        return graph.step_with_factors(X, EXTRA, old_state_vals=values)

    names = "carry/h, carry/n, params/b, params/w"
    refuse(
        f"The step has 4 state(s) ({names}) and was given values for 3.", call, old_values(graph)[:3], error=ValueError
    )
    refuse(
        "The state 'carry/h' has shape (5,) and dtype float64; the step was compiled for (4,) and float64.",
        call,
        old_values(graph, h=jnp.zeros(5)),
        error=ValueError,
    )
    refuse(
        "The state 'params/w' has shape (3, 4) and dtype float32; the step was compiled for (3, 4) and float64.",
        call,
        old_values(graph, w=jnp.ones((3, 4), jnp.float32)),
        error=ValueError,
    )


def test_a_leaf_of_a_parameter_that_does_not_fit():
    cell = nn.GRUCell(3, 4)
    cell.init_state()
    graph = compile_etrace_graph(cell, X)
    values = [state.value for state in graph.module_info.compiled_model_states]
    place = graph.module_info.paths.index(("Wz", "weight"))
    bad = list(values)
    bad[place] = {**values[place], "bias": jnp.zeros(5)}
    refuse(
        "The state 'Wz/weight'['bias'] has shape (5,) and dtype float64; the step was compiled for (4,)",
        graph.step_with_factors,
        X,
        old_state_vals=bad,
        error=ValueError,
    )
    bad[place] = {"weight": values[place]["weight"]}
    refuse(
        "The step was compiled for 2 leaf of state 'Wz/weight' array(s) (state 'Wz/weight'['bias'], state "
        "'Wz/weight'['weight']) and was called with 1 (state 'Wz/weight'['weight'])",
        graph.step_with_factors,
        X,
        old_state_vals=bad,
        error=ValueError,
    )


def test_terms_that_do_not_fit(graph):
    refuse(
        "The step takes a term for each of 1 hidden state(s) (carry/h) and was given 2.",
        graph.call_hidden_perturb,
        (X, EXTRA),
        [jnp.zeros(4), jnp.zeros(4)],
        old_values(graph),
        error=ValueError,
    )
    refuse(
        "The term of 'carry/h' has shape (3,) and dtype float64; the step was compiled for (4,) and float64.",
        graph.call_hidden_perturb,
        (X, EXTRA),
        [jnp.zeros(3)],
        old_values(graph),
        error=ValueError,
    )


def test_errors_come_before_anything_runs(graph):
    """Also while tracing."""
    with pytest.raises(ValueError, match="The input 0 has shape"):
        jax.eval_shape(
            lambda x: graph.step_with_factors(x, EXTRA, old_state_vals=old_values(graph)),
            jax.ShapeDtypeStruct((7,), jnp.float64),
        )

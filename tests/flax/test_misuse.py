"""Calls that a newcomer gets wrong: each error names the argument and shows the right call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import braintrace_flax as braintrace
from tests.flax import small

INPUTS, TARGETS = small.data(4)
PARAMS = small.params_of()


def optimizer(model=None, **options):
    return optax.chain(braintrace.online_grad(model or small.model(), **options), optax.sgd(0.1))


def step(window=2, loss=small.loss, **options):
    return braintrace.train_step(small.model(), optimizer(**options), window=window)(loss)


@pytest.fixture(scope="module")
def state():
    """Shapes will do: every call below fails before anything runs."""
    return jax.eval_shape(step().init, jax.random.key(0))


def refused(call, *texts, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), str(caught.value)


def found(
    params=PARAMS, carry=None, inputs=INPUTS, targets=TARGETS, loss=small.loss, credit="window", rule=None, **options
):
    carry = small.model().initial_carry() if carry is None else carry
    run = braintrace.value_and_grad(small.model(), loss, credit, rule=rule)
    return jax.eval_shape(lambda: run(params, carry, inputs, targets, **options))


@pytest.fixture(scope="module")
def window():
    """A window's gradients and what belongs to it, as shapes."""
    return found()[1:]


def update(tx, window, *arguments, **named):
    grads, online = window
    named = {"online": online, **named}
    return jax.eval_shape(lambda: tx.update(grads, tx.init(PARAMS), *arguments, **named))


# compile


def cell():
    return nn.GRUCell(3)


def test_example_inputs_forgotten():
    refused(
        lambda: braintrace.compile(cell()), "needs example inputs", "`compile(model, jnp.zeros((batch, features)))`"
    )


def test_a_class_for_a_model():
    refused(
        lambda: braintrace.compile(nn.GRUCell, jnp.zeros((2, 3))),
        "the class GRUCell",
        "`compile(GRUCell(...), example_input)`",
        error=TypeError,
    )


@pytest.mark.parametrize("missing", ["params", "carry"])
def test_a_plain_function_without_its_values(missing):
    given = {"params": PARAMS, "carry": jnp.zeros(small.UNITS)}
    del given[missing]
    refused(
        lambda: braintrace.compile(small.step, INPUTS[0], **given),
        f"needs `{missing}=`",
        "`compile(step, example_input, params=params, carry=carry)`",
    )


def test_something_else_for_a_model():
    refused(
        lambda: braintrace.compile({"w": 1}, INPUTS[0]),
        "takes a Linen, NNX or brainstate module or a function `step(params, carry, *inputs)`, got a dict",
        error=TypeError,
    )


def test_a_model_compiled_twice():
    refused(lambda: braintrace.compile(small.model(), INPUTS[0]), "compiled already", error=TypeError)


def test_an_example_without_a_batch():
    refused(lambda: braintrace.compile(cell(), jnp.zeros(())), "first axis must be the batch", "`batch_axis=None`")


# online_grad


def test_a_model_that_is_not_compiled():
    refused(
        lambda: braintrace.online_grad(cell()),
        "not compiled",
        "`online_grad(compile(model, example_input))`",
    )
    for call, name in (
        (lambda: braintrace.value_and_grad(cell(), small.loss), "value_and_grad"),
        (lambda: braintrace.check_against_bptt(cell(), {}, None, INPUTS, TARGETS), "check_against_bptt"),
    ):
        refused(call, f"`{name}` got a GRUCell that is not compiled", "`model = braintrace.compile(", error=TypeError)


def test_a_rule_that_does_not_exist():
    refused(lambda: braintrace.online_grad(small.model(), rule="rtlr"), "no rule 'rtlr'", "d_rtrl", "pp_prop")
    refused(lambda: braintrace.online_grad(small.model(), rule=3), "no rule 3", "or a rule object")


def test_a_credit_that_does_not_exist():
    text = '`credit` is "window" or "step", got \'both\'.'
    refused(lambda: braintrace.online_grad(small.model(), credit="both"), text)
    refused(lambda: braintrace.value_and_grad(small.model(), small.loss, credit="both"), text)


def test_random_feedback_needs_step_credit_and_a_window_that_knows_it():
    rule = braintrace.rules.EProp(feedback="random")
    refused(lambda: braintrace.online_grad(small.model(), rule=rule), "Random feedback", '`credit="step"`')
    tx = braintrace.online_grad(small.model(), rule=rule, credit="step")
    refused(
        lambda: update(tx, found(credit="step")[1:], PARAMS),
        "give `value_and_grad` the same one",
        "rule=EProp(kappa=0.0, feedback='random', seed=0))`",
    )


def test_step_credit_of_whole_parameters_needs_a_window_that_knows_the_rule():
    model, text = small.model(), "give `value_and_grad` the same one"
    refused(
        lambda: update(braintrace.online_grad(model, rule="rtrl", credit="step"), found(credit="step")[1:], PARAMS),
        text,
        'credit="step", rule=RTRL())`',
    )
    window = found(credit="step", rule="snap")[1:]
    refused(lambda: update(braintrace.online_grad(model, credit="step"), window, PARAMS), text, "rule=DRTRL(")
    accepted = [(braintrace.online_grad(model, rule="snap", credit="step"), window)]
    accepted += [(braintrace.online_grad(model, rule="rtrl"), found()[1:])]  # of a window's own gradient all say alike
    for tx, (grads, online) in accepted:
        jax.eval_shape(lambda g, o, tx=tx: tx.update(g, tx.init(PARAMS), PARAMS, online=o), grads, online)


@pytest.mark.parametrize("rule", ["tbptt", "bptt"])
def test_step_credit_without_traces(rule):
    text = 'keeps no traces for each step\'s signal to act on: use `credit="window"`'
    refused(lambda: braintrace.online_grad(small.model(), rule=rule, credit="step"), text)
    refused(lambda: braintrace.value_and_grad(small.model(), small.loss, credit="step", rule=rule), text)


def test_step_credit_without_a_windows_end():
    text = 'estimates what will be said of a window\'s end, where step credit does not look: use `credit="window"`'
    refused(lambda: braintrace.online_grad(small.model(), rule="dni", credit="step"), text)


def test_the_wrong_thing_for_a_window(window):
    tx, right = optimizer(), "`tx.update(grads, opt_state, params, online=window)`"
    refused(lambda: update(tx, window, online=window[1]), "needs the parameters", right)
    refused(lambda: update(tx, window, PARAMS, online=None), "needs the window (`online=`)", right)
    refused(lambda: update(tx, window, PARAMS, online=INPUTS), "`online=` is a", "not the window", right)


def test_credits_that_differ(window):
    tx = optimizer(credit="step")
    refused(
        lambda: update(tx, window, PARAMS),
        'credit="window" and `online_grad` with credit="step"',
        '`value_and_grad(model, loss, credit="step")`',
    )


def test_gradients_of_something_else(window):
    few = {name: grad for name, grad in window[0].items() if name != "w"}
    refused(lambda: update(optimizer(), (few, window[1]), PARAMS), "The gradients are not those of these `params`")


def test_traces_of_no_optimizer():
    refused(
        lambda: braintrace.reset_traces(optax.adam(0.1).init(PARAMS)), "no OnlineGradState", "is `online_grad` in this"
    )


# value_and_grad


def test_parameters_and_carries_of_another_model():
    other = {**PARAMS, "w": jnp.zeros((small.FEATURES, 7)), "bias": jnp.zeros(3)}
    del other["a"]
    refused(
        lambda: found(params=other),
        "`params` is not that of the compiled model",
        "`a` is missing",
        "`bias` is unknown",
        f"`w` has shape (2, 7) and dtype float64, expected (2, {small.UNITS}) and float64",
        "`model.init(key)`",
    )
    refused(
        lambda: found(carry=(jnp.zeros((2, 3)), jnp.zeros((2, 3)))), "`carry` is not that", "`model.initial_carry()`"
    )
    refused(lambda: found(carry=jnp.zeros((5, 3))), "has shape (5, 3)", "expected (2, 3)")


def test_the_time_axis_forgotten():
    refused(lambda: found(inputs=INPUTS[0]), "`inputs` has shape (2, 2): the time axis is missing", "`inputs[None]`")


def test_another_batch():
    refused(
        lambda: found(inputs=jnp.zeros((4, 7, 2))),
        "`inputs` has shape (4, 7, 2), expected (time, 2, 2)",
        "The batch has 7 examples, the model was compiled for 2",
    )
    refused(lambda: found(inputs=jnp.zeros((2, 4, 2))), "expected (time, 2, 2)", "`jnp.swapaxes(inputs, 0, 1)`")


def test_integers_for_floats():
    refused(
        lambda: found(inputs=jnp.ones((4, 2, 2), jnp.int32)),
        "`inputs` has dtype int32; the model was compiled for float64",
        "Cast it",
    )


def test_no_steps_at_all():
    refused(lambda: found(inputs=INPUTS[:0], targets=TARGETS[:0]), "`inputs` has [0] time steps", "at least one")


def test_targets_of_another_length():
    refused(lambda: found(targets=TARGETS[:3]), "`targets` has shape (3, 2, 2)", "4 steps as in `inputs`")
    refused(lambda: found(targets={"y": 1.0}), "`targets` at y has shape float", "repeat it over time")


def test_a_loss_that_is_no_scalar():
    refused(
        lambda: found(loss=lambda outputs, targets: (outputs - targets).mean(-1)),
        "The loss of a time step is a scalar, this one has shape (2,)",
        "take the mean or the sum over the batch",
    )
    refused(lambda: found(loss=lambda outputs, targets: None), "The loss of a time step is a scalar", "returned None")


@pytest.mark.parametrize(
    "reset", [np.zeros((4, 2)), np.zeros(4, bool), np.zeros((2, 4), bool)], ids=["floats", "one a step", "turned"]
)
def test_resets_of_another_kind(reset):
    refused(
        lambda: found(reset=reset),
        f"`reset` has shape {reset.shape} and dtype {reset.dtype}",
        "expected bools of shape (4, 2): one for each step and example",
    )


def test_masks_and_modulators_of_another_shape():
    refused(lambda: found(mask=jnp.ones((2, 4))), "`mask` has shape (2, 4); expected (4,) or (4, 2)")
    refused(
        lambda: found(modulator=jnp.ones(4), credit="step"),
        "`modulator` has shape (4,); expected (4, 2): one number for each step and example",
    )
    refused(lambda: found(modulator=jnp.ones((4, 2))), "A `modulator` acts on each step", '`credit="step"`')


def test_an_unknown_reduction():
    text = '`reduction` is "sum" or "mean", got \'none\'.'
    refused(lambda: braintrace.value_and_grad(small.model(), small.loss, reduction="none"), text)


# train_step


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_windows_that_are_no_number_of_steps(window):
    refused(lambda: step(window=window), f"`window` is a number of time steps, at least 1, or None; got {window!r}")


def test_a_window_of_no_steps_in_a_comparison():
    where = (small.model(), PARAMS, small.model().initial_carry(), INPUTS, TARGETS)
    refused(lambda: braintrace.check_against_bptt(*where, window=0), "`window` is a number of time steps, at least 1")


def test_optimizers_with_none_or_two():
    right = "`optax.chain(online_grad(model), optax.adam(1e-3))`"
    refused(lambda: braintrace.train_step(small.model(), optax.sgd(0.1)), "has no `online_grad` in it", right)
    two = optax.chain(braintrace.online_grad(small.model()), braintrace.online_grad(small.model()))
    refused(lambda: braintrace.train_step(small.model(), two), "has more than one `online_grad` in it", right)


def test_an_optimizer_behind_another():
    tx = optax.chain(optax.adam(0.1), braintrace.online_grad(small.model()))
    refused(lambda: braintrace.train_step(small.model(), tx), "not the first link", "`optax.chain(online_grad(model), ")


@pytest.mark.parametrize("model", [small.model(1), small.step, cell()], ids=["compiled", "function", "module"])
def test_an_optimizer_of_another_model(model):
    refused(
        lambda: braintrace.train_step(model, optimizer()), "`tx` was made for another model", "the same compiled model"
    )


def test_a_state_from_nowhere(state):
    right = "`state = step.init(key)`"
    refused(lambda: step().lower(PARAMS, INPUTS, TARGETS), "is the train state, got a dict", right, error=TypeError)
    refused(lambda: step().lower(INPUTS, TARGETS), "is the train state, got a", right, error=TypeError)
    foreign = state._replace(opt_state=jax.eval_shape(optax.adam(0.1).init, PARAMS))
    refused(lambda: step().lower(foreign, INPUTS, TARGETS), "`state.opt_state` is of another optimizer", right)
    narrow = jax.eval_shape(step(trace_dtype=jnp.bfloat16).init, jax.random.key(0))
    refused(lambda: step().lower(narrow, INPUTS, TARGETS), "of another optimizer", "dtype bfloat16", right)


def test_windows_that_cut_back_propagation():
    cut = step(rule="bptt")
    state = jax.eval_shape(cut.init, jax.random.key(0))
    refused(
        lambda: cut.lower(state, INPUTS, TARGETS), "`window=2` would cut them", '`window=None`, or the rule "tbptt"'
    )


def test_metrics_with_names_that_are_taken(state):
    twice = step(loss=lambda outputs, targets: (small.loss(outputs, targets), {"loss": jnp.zeros(())}))
    refused(lambda: twice.lower(state, INPUTS, TARGETS), "metrics that `train_step` has too: rename loss")


def test_a_step_checks_what_a_window_checks(state):
    refused(lambda: step().lower(state, INPUTS[0], TARGETS), "the time axis is missing")
    refused(lambda: step().lower(state, INPUTS, TARGETS[:1]), "4 steps as in `inputs`")
    refused(lambda: step().lower(state, INPUTS, TARGETS, jnp.zeros(4, bool)), "expected bools of shape (4, 2)")
    refused(lambda: step().lower(state, INPUTS, TARGETS, mask=jnp.zeros(3)), "expected (4,) or (4, 2)")
    refused(
        lambda: step().lower(state, INPUTS, TARGETS, modulator=jnp.zeros((4, 2))), "A `modulator` acts on each step"
    )
    other = state._replace(params={**state.params, "w": jnp.zeros((2, 7))})
    refused(lambda: step().lower(other, INPUTS, TARGETS), "`params` is not that of the compiled model", "`w` has shape")
    carry = state._replace(carry=jnp.zeros((2, 9)))
    refused(lambda: step().lower(carry, INPUTS, TARGETS), "`carry` is not that of the compiled model", "(2, 9)")


@pytest.mark.parametrize("dtype", [jnp.int32, bool, jnp.complex64])
def test_traces_that_are_no_real_numbers(dtype):
    refused(lambda: optimizer(trace_dtype=dtype), "`trace_dtype` is a dtype of real numbers, like jnp.bfloat16")

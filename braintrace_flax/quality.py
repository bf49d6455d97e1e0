"""How close a rule comes to back-propagation, on a user's own model and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from braintrace_core.rules import GradientComparison, Rule, compare_gradients, get_rule, past_gradient

from .checks import check_compiled, check_mask, check_reset, check_targets, check_time, leaf_paths
from .model import Model
from .window import Credit, as_present, value_and_grad, window_losses

__all__ = ["check_against_bptt"]


def check_against_bptt(
    model: Model,
    params: Any,
    carry: Any,
    inputs: Any,
    targets: Any,
    rule: str | Rule = "d_rtrl",
    window: int | None = 1,
    loss: Callable[..., Any] | None = None,
    credit: Credit = "window",
    reset: Any = None,
    mask: Any = None,
) -> GradientComparison:
    """Compare the sum of a rule's online gradients over a sequence with back-propagation through all of it.

    Main arguments:
      model, params, carry: from :func:`compile`.
      inputs, targets: a sequence, time first.
      rule: the learning rule, or its name.
      window: steps in a window; None for the whole sequence.

    Other arguments:
      loss: of one time step; None for the cross-entropy where targets are integers, else the squared error.
      credit: ``"window"`` or ``"step"``.
      reset: where new sequences start.
      mask: which steps, or which examples of them, count.

    Returns:
      For each parameter the cosine, the ratio of norms and the relative error; printing it shows a table.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from braintrace_flax import compile
    >>> model = compile(nn.SimpleCell(4), jnp.zeros((2, 3)))
    >>> inputs, targets = jnp.ones((6, 2, 3)), jnp.zeros((6, 2, 4))
    >>> table = check_against_bptt(
    ...     model, model.init(jax.random.key(0)), model.initial_carry(), inputs, targets, window=None
    ... )
    >>> round(table.overall.cosine, 3)
    1.0
    """
    check_compiled(model, "check_against_bptt")
    if window is not None and window < 1:
        raise ValueError(f"`window` is a number of time steps, at least 1, or None; got {window!r}.")
    steps = check_time(model, inputs)
    check_targets(targets, steps)
    check_reset(model, reset, steps)
    check_mask(model, mask, steps)
    length = steps if window is None else window
    chosen = get_rule(rule)
    of_step = _default_loss(targets) if loss is None else loss
    leaves = model.param_leaves(params)
    start = None if reset is None else model.initial_leaves()

    @jax.jit
    def one(params: Any, carry: Any, traces: Any, inputs: Any, targets: Any, reset: Any, mask: Any) -> Any:
        run = value_and_grad(model, of_step, credit, rule=chosen)
        (_, carry), grads, seen = run(params, carry, inputs, targets, reset, mask)
        more, traces = past_gradient(
            model.plan, chosen, model.param_leaves(params), traces, as_present(model, seen), start, credit
        )
        return carry, traces, [g + m.astype(g.dtype) for g, m in zip(jax.tree.leaves(grads), more, strict=True)]

    def all_of(params: Any, carry: Any) -> Any:
        def at(carry: Any, now: Any) -> Any:
            values, restart = now
            if restart is not None:
                carry = _restarted(model, carry, restart)
            values = values if len(model.inputs_shape) > 1 else (values,)
            return model.apply(params, carry, *values)

        _, outputs = jax.lax.scan(at, carry, (inputs, reset))
        return window_losses(of_step, outputs, targets, mask, "sum")[0]

    truth = jax.jit(jax.grad(all_of))(params, carry)
    traces = chosen.init(model.plan, model.examples)
    total = [jnp.zeros_like(leaf) for leaf in leaves]
    for first in range(0, steps, length):
        now = jax.tree.map(lambda a: a[first : first + length], (inputs, targets, reset, mask))  # noqa: B023
        carry, traces, found = one(params, carry, traces, *now)
        total = [a + b for a, b in zip(total, found, strict=True)]
    names = leaf_paths(model.params_shape)
    trained = [i for i in range(len(names)) if i not in model.frozen_leaves]
    return compare_gradients(
        {names[i]: total[i] for i in trained},
        {names[i]: jax.tree.leaves(truth)[i] for i in trained},
        f"{chosen}, {credit} credit, window of {length}, {steps} steps, against BPTT",
    )


def _default_loss(targets: Any) -> Callable[..., Any]:
    if all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(targets)):
        return lambda out, wanted: optax.softmax_cross_entropy_with_integer_labels(out, wanted).mean()
    return lambda out, wanted: jnp.mean(jnp.square(out - wanted))


def _restarted(model: Model, carry: Any, restart: Any) -> Any:
    initial = model.initial_carry()

    def choose(old: Any, new: Any, is_hidden: bool) -> Any:
        where = restart if model.batch_size is None else jnp.expand_dims(restart, tuple(range(1, old.ndim)))
        return jnp.where(where, new, old) if is_hidden else old

    return jax.tree.map(choose, carry, initial, model.step.hidden)

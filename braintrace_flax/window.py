"""The gradient of one window, and what ``online_grad`` needs to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from braintrace_core.rules import PresentGradient, Rule, get_rule, step_gradient, window_gradient

from .checks import (
    check_compiled,
    check_credit,
    check_mask,
    check_modulator,
    check_reset,
    check_targets,
    check_time,
    split_inputs,
)
from .explicit import is_explicit, mesh_of, on_any_mesh, sharding_of
from .model import Model

__all__ = ["Credit", "Reduction", "Window", "as_present", "value_and_grad", "window_losses"]

Credit = Literal["window", "step"]
Reduction = Literal["sum", "mean"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """A window as ``online_grad`` sees it: pass it on as ``tx.update(grads, state, params, online=window)``.

    Attributes:
      carry: at the window's start.
      carry_grad: the gradient of the loss with respect to it (with ``credit="window"``).
      inputs: the inputs, time first.
      reset: where new sequences start; None if nowhere.
      next_carry: after the window.
      signals: with ``credit="step"``, what each step's loss says of its own hidden states, those after the step; where
        outputs see those before it too, one more comes first, of the states before the window.
      record: what the window left behind for the rule; None, and it is run again.
      waiting: gradients that ``online_grad`` sends back to the parameters together with those of the past; None if they
        are among the ones that it is given.
      value: the loss, where gradients wait.
      shares: among how many devices the batch is divided, where gradients wait.
      reduce: sums gradients whose first axis is the shares, in the structure of the parameters.
      place: puts an operator's input where its trace is: ``place(name of the trace, input)``.
      credit: how the gradient was taken.
      rule: the rule that took part in it; None if none did.
    """

    carry: Any
    carry_grad: Any
    inputs: Any
    reset: Any = None
    next_carry: Any = None
    signals: Any = None
    record: Any = None
    waiting: Any = None
    value: Any = None
    shares: int = field(default=1, metadata={"static": True})
    reduce: Callable[[Any], Any] | None = field(default=None, metadata={"static": True})
    place: Callable[[str, Array], Array] | None = field(default=None, metadata={"static": True})
    credit: Credit = field(default="window", metadata={"static": True})
    rule: Rule | None = field(default=None, metadata={"static": True})


def value_and_grad(
    model: Model,
    loss: Callable[..., Any],
    credit: Credit = "window",
    reduction: Reduction = "sum",
    rule: str | Rule | None = None,
    wait: bool = False,
) -> Callable[..., tuple[tuple[Any, Any], Any, Window]]:
    """The loss of a window, the carry after it, and the gradients: for those who own their loop.

    Main arguments:
      model: from :func:`compile`.
      loss: ``loss(outputs, targets)`` of one time step, for the batch: a scalar, or ``(scalar, metrics)``.
      credit: ``"window"`` for the ordinary gradient of the window, to which ``online_grad`` adds what lies before it;
        ``"step"`` for each step's own signal. The same as in ``online_grad``.

    Other arguments:
      reduction: whether the window's loss is the sum or the mean over its steps.
      rule: needed by rules that change the way back (``EProp(feedback="random")``, ``BPTT(checkpoint="sqrt")``), and
        with ``credit="step"`` by those that follow whole parameters (``RTRL()``, ``SnAp()``, ``UORO()``).
      wait: leave the gradients to ``online_grad``, as ``train_step`` does: those returned are zero. On a mesh, what the
        window says and what its past says are then summed over devices once, and not one after the other.

    Returns:
      ``f(params, carry, inputs, targets, reset=None, mask=None, modulator=None) -> ((loss, carry), grads, window)``.
      Inputs and targets lead with time. ``reset``, bools ``(time, batch)``, starts new sequences. ``mask``, ``(time,)``
      or ``(time, batch)``, leaves steps out of loss and metrics. ``modulator``, ``(time, batch)``, takes the place of
      the loss's signal (three-factor learning; step credit only). If the loss has metrics, ``(loss, metrics)`` stands
      where ``loss`` does.

    >>> import jax, jax.numpy as jnp, optax
    >>> from flax import linen as nn
    >>> import braintrace_flax as braintrace
    >>> model = braintrace.compile(nn.GRUCell(4), jnp.zeros((2, 3)))
    >>> tx = optax.chain(braintrace.online_grad(model), optax.sgd(0.1))
    >>> params, carry = model.init(jax.random.key(0)), model.initial_carry()
    >>> opt_state = tx.init(params)
    >>> inputs, targets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2, 4))
    >>> loss = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)
    >>> (value, carry), grads, window = braintrace.value_and_grad(model, loss)(params, carry, inputs, targets)
    >>> updates, opt_state = tx.update(grads, opt_state, params, online=window)
    >>> params = optax.apply_updates(params, updates)
    """
    check_compiled(model, "value_and_grad")
    if reduction not in ("sum", "mean"):
        raise ValueError(f'`reduction` is "sum" or "mean", got {reduction!r}.')
    chosen = None if rule is None else get_rule(rule)
    check_credit(credit, chosen)

    def value_and_grad_of_window(
        params: Any,
        carry: Any,
        inputs: Any,
        targets: Any = None,
        reset: Any = None,
        mask: Any = None,
        modulator: Any = None,
    ) -> tuple[tuple[Any, Any], Any, Window]:
        steps = check_time(model, inputs)
        check_targets(targets, steps)
        check_reset(model, reset, steps)
        check_mask(model, mask, steps)
        check_modulator(model, modulator, steps, credit)
        given = (params, carry, inputs, targets, reset, mask, modulator)
        with mesh_of(given):
            return on_any_mesh(
                partial(of_arrays, inside=not is_explicit()),
                *given,
                results=lambda: _shardings(model, params, carry, inputs, reset, credit, chosen),
            )

    def of_arrays(
        params: Any,
        carry: Any,
        inputs: Any,
        targets: Any,
        reset: Any,
        mask: Any,
        modulator: Any,
        *,
        inside: bool,
    ) -> tuple[tuple[Any, Any], Any, Window]:
        parameters, states = model.param_leaves(params), model.state_leaves(carry)

        def of_window(window: Any) -> tuple[Array, Any]:
            return window_losses(loss, model.as_outputs(window.outputs), targets, mask, reduction)

        where = (parameters, states, model.input_leaves(split_inputs(model, inputs)), model.reset_mask(reset))
        start = model.initial_leaves() if reset is not None else None
        if credit == "window":
            present = window_gradient(model.plan, of_window, *where, start, rule=chosen, wait=wait and inside)
        else:
            modulator = model.reset_mask(modulator)
            present = step_gradient(
                model.plan, of_window, *where, start, rule=chosen, modulator=modulator, wait=wait and inside
            )
        after = model.as_carry(present.after)
        gradients = [
            jnp.zeros_like(g) if i in model.frozen_leaves else g.astype(p.dtype)
            for i, (g, p) in enumerate(zip(present.gradients, parameters, strict=True))
        ]
        value = present.value if present.aux is None else (present.value, present.aux)
        window = as_window(model, present, carry, after, inputs, reset, credit, chosen)
        if not inside:  # on an Explicit mesh it would have to be gathered
            window = replace(window, record=None)
        return (value, after), model.as_params(gradients, params), window

    return value_and_grad_of_window


def _shardings(
    model: Model, params: Any, carry: Any, inputs: Any, reset: Any, credit: Credit, rule: Rule | None
) -> Any:
    """Where the results of a window lie on an Explicit mesh: like the arguments that they belong to."""
    like = sharding_of(carry)
    signals = None
    if credit == "step":
        first = [sharding.spec[0] if sharding.spec else None for sharding in jax.tree.leaves(like)[:1]]
        signals = PartitionSpec(None, *first)
    carry_grad = None
    if credit == "window":
        leaves = [
            sharding if jnp.issubdtype(leaf.dtype, jnp.inexact) else None
            for sharding, leaf in zip(jax.tree.leaves(like), jax.tree.leaves(carry), strict=True)
        ]
        carry_grad = jax.tree.unflatten(jax.tree.structure(carry), leaves)
    window = Window(like, carry_grad, sharding_of(inputs), sharding_of(reset), like, signals, credit=credit, rule=rule)
    return (PartitionSpec(), like), sharding_of(params), window


def as_window(
    model: Model,
    present: PresentGradient,
    carry: Any,
    after: Any,
    inputs: Any,
    reset: Any,
    credit: Credit,
    rule: Rule | None,
) -> Window:
    """What a window says, in the user's structures."""
    carry_grad = None
    if credit == "window":
        leaves = present.signal if model.has_examples else [g if g is None else g[0] for g in present.signal]
        carry_grad = jax.tree.unflatten(jax.tree.structure(model.carry_shape), leaves)
    signals = present.signal if credit == "step" else None
    value = None if present.waiting is None else present.value
    return Window(
        carry,
        carry_grad,
        inputs,
        reset,
        after,
        signals,
        present.record,
        present.waiting,
        value,
        credit=credit,
        rule=rule,
    )


def as_present(model: Model, window: Window) -> PresentGradient:
    """The way back: a window as the rules see it."""
    before = model.state_leaves(window.carry)
    after = [] if window.next_carry is None else model.state_leaves(window.next_carry)
    signal: Any = window.signals
    if window.credit == "window":
        found = jax.tree.leaves(window.carry_grad, is_leaf=lambda leaf: leaf is None)
        if len(found) != len(before):
            raise ValueError("`online.carry_grad` has another structure than the carry.")
        signal = found if model.has_examples else [g if g is None else g[None] for g in found]
    inputs = model.input_leaves(split_inputs(model, window.inputs))
    reset = model.reset_mask(window.reset)
    value = jnp.zeros(()) if window.value is None else window.value
    return PresentGradient(value, None, [], before, after, signal, window.record, inputs, reset, window.waiting)


def window_losses(
    loss: Callable[..., Any], outputs: Any, targets: Any, mask: Any, reduction: Reduction
) -> tuple[Array, Any]:
    """The loss of a window from that of its steps, and the mean of their metrics; None without metrics."""

    def one_step(outputs: Any, targets: Any) -> tuple[Array, Any]:
        result = loss(outputs, targets)
        value, metrics = result if isinstance(result, tuple) else (result, None)
        if value is None:
            raise ValueError(
                "The loss of a time step is a scalar, this one returned None: does it end in `return ...`?"
            )
        if jnp.shape(value) != ():
            raise ValueError(
                f"The loss of a time step is a scalar, this one has shape {jnp.shape(value)}: take the mean or the sum "
                "over the batch."
            )
        return value, metrics

    if mask is None:
        values, metrics = jax.vmap(one_step)(outputs, targets)
        return values.sum() if reduction == "sum" else values.mean(), jax.tree.map(lambda m: m.mean(0), metrics)
    # What is left out may be NaN, and so may the gradient that it would send back.
    outputs, targets = jax.tree.map(lambda a: _where_kept(mask, a), (outputs, targets))
    if jnp.ndim(mask) == 1:
        values, metrics = jax.vmap(one_step)(outputs, targets)
    else:
        # Each example on its own, as a batch of one, so that each can be left out.
        alone = lambda tree: jax.tree.map(lambda a: a[None], tree)  # noqa: E731
        values, metrics = jax.vmap(jax.vmap(lambda o, t: one_step(alone(o), alone(t))))(outputs, targets)
    weight = mask.astype(values.dtype)
    count = jnp.maximum(weight.sum(), 1)

    def mean(value: Array) -> Array:
        value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(values.dtype)
        spread = jnp.expand_dims(weight, tuple(range(weight.ndim, value.ndim))).astype(value.dtype)
        return (_where_kept(mask, value) * spread).sum(tuple(range(weight.ndim))) / count.astype(value.dtype)

    total = mean(values)
    if reduction == "sum":
        examples = 1 if weight.ndim == 1 else weight.shape[1]
        total = total * count / examples
    return total, jax.tree.map(mean, metrics)


def _where_kept(mask: Any, value: Any) -> Array:
    """Zeros where the mask leaves out."""
    kept = jnp.expand_dims(jnp.asarray(mask, bool), tuple(range(jnp.ndim(mask), jnp.ndim(value))))
    return jnp.where(kept, value, jnp.zeros_like(value))

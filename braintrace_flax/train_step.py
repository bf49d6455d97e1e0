"""``train_step``: a loss of one time step becomes one jitted, donated function that trains over windows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from braintrace_core.rules import BPTT, QualityMeter, past_gradient

from .checks import check_mask, check_modulator, check_reset, check_state, check_targets, check_time, split_inputs
from .explicit import on_any_mesh, sharding_of
from .model import Model, strong
from .online_grad import settings_of, skipped_of
from .sharding import BATCH_AXES, Gathered, gathered, shardings
from .state import TrainState
from .trace_sharding import without
from .window import Reduction, as_present, value_and_grad, window_losses

__all__ = ["TrainStep", "buckets", "train_step"]


def train_step(
    model: Any,
    tx: optax.GradientTransformation,
    *,
    window: int | None = None,
    reduction: Reduction = "mean",
    meter: QualityMeter | None = None,
    donate: bool = True,
) -> Callable[[Callable[..., Any]], TrainStep]:
    """Decorate the loss of one time step: it becomes a function that trains.

    Main arguments:
      model: from :func:`compile`; or what ``online_grad`` compiled by itself.
      tx: an Optax chain with ``online_grad`` in front.
      window: how many time steps make a window, with one optimizer update each; None for all that a call brings.

    Other arguments:
      reduction: whether a window's loss is the mean over its steps or their sum.
      meter: compares gradients with back-propagation every now and then; its readings are among the metrics.
      donate: whether the state's memory is given to the new state; the old one cannot be used afterwards.

    >>> import jax, jax.numpy as jnp, optax
    >>> from flax import linen as nn
    >>> import braintrace_flax as braintrace
    >>> model = braintrace.compile(nn.GRUCell(8), jnp.zeros((2, 3)))
    >>> tx = optax.chain(braintrace.online_grad(model), optax.adam(1e-2))
    >>> @braintrace.train_step(model, tx, window=5)
    ... def step(outputs, targets):
    ...     return jnp.mean((outputs - targets) ** 2)
    >>> state = step.init(jax.random.key(0))
    >>> inputs, targets = jnp.ones((20, 2, 3)), jnp.zeros((20, 2, 8))
    >>> state, metrics = step(state, inputs, targets)
    >>> int(state.step), metrics["loss"].shape
    (4, (4,))
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"`window` is a number of time steps, at least 1, or None; got {window!r}.")
    settings = settings_of(jax.eval_shape(tx.init, _placeholder(model)))
    if model is not settings.model and model != settings.given:
        raise ValueError(
            "`tx` was made for another model: give `train_step` and `online_grad` the same compiled model."
        )

    def decorate(loss: Callable[..., Any]) -> TrainStep:
        return TrainStep(settings.model, tx, loss, window, reduction, meter, donate)

    return decorate


class TrainStep:
    """``step(state, inputs, targets, reset=None, mask=None, modulator=None) -> (state, metrics)``.

    Inputs and targets lead with time. ``reset``, bools ``(time, batch)``, starts new sequences: it clears carry and
    traces of those rows. ``mask``, ``(time,)`` or ``(time, batch)``, leaves steps out of loss and metrics.
    ``modulator``, ``(time, batch)``, is the third factor of three-factor rules. Metrics are arrays with one entry a
    window: ``loss``, ``skipped`` (whether the window was not finite and left out), and those that the loss returns.

    Attributes:
      model, tx, loss: as given.
      window: steps in a window.
      settings: the rule and the credit of its ``online_grad``.
      shardings: of the state, if it is on a mesh; else None.
    """

    shardings: TrainState | None = None
    _gathered: Any = None
    _shares: Mapping[str, int] = {}
    _inputs: Mapping[str, NamedSharding] = {}

    def __init__(
        self,
        model: Model,
        tx: optax.GradientTransformation,
        loss: Callable[..., Any],
        window: int | None,
        reduction: Reduction,
        meter: QualityMeter | None,
        donate: bool,
    ):
        self.model, self.tx, self.loss, self.window, self.meter = model, tx, loss, window, meter
        self._update = optax.with_extra_args_support(tx).update
        settings = self.settings = settings_of(jax.eval_shape(tx.init, model.params_shape))
        self._credit, self._rule = settings.credit, settings.rule
        self._value_and_grad = value_and_grad(model, loss, settings.credit, reduction, settings.rule, wait=True)
        self._reduction: Reduction = reduction
        self.__doc__ = loss.__doc__ or type(self).__doc__
        self.__name__ = getattr(loss, "__name__", "step")
        self._donated = (0,) if donate else ()
        self._init = self._make_state
        self.jitted = jax.jit(self.run, donate_argnums=self._donated)

    def sharded(self, mesh: Mesh, rules: Any = (), batch_axes: Sequence[str] = BATCH_AXES) -> TrainStep:
        """The same step on a mesh: its state is made where it belongs, and stays there.

        Arguments as in :func:`shardings`.
        """
        placed = shardings(self, mesh, rules, batch_axes)
        step = copy.copy(self)
        made = jax.jit(self._make_state, out_shardings=placed)
        step._init = made if self.meter is None else step._make_state_with_meter
        whole = NamedSharding(mesh, PartitionSpec())
        results = placed._replace(key=None), whole  # a call leaves the key outside
        step.jitted = jax.jit(step.run, donate_argnums=self._donated, out_shardings=results)
        step.shardings = placed
        step._gathered = gathered(self.model, placed.params, batch_axes)
        if self.model.has_examples:
            step._shares = {axis: mesh.shape[axis] for axis in batch_axes if mesh.shape.get(axis, 1) > 1}
        if any(mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in batch_axes):
            traces = optax.tree.get(placed.opt_state, "OnlineGradState").traces
            step._inputs = {name: sharding for name, sharding in traces.items() if name.endswith(".x")}
        return step

    def init(self, key: Any, params: Any = None, example: tuple[Any, ...] | None = None) -> TrainState:
        """The state before training.

        Args:
          key: for parameters, random carries and dropout.
          params: parameters to start from; None for the model's own.
          example: with a quality meter, ``(inputs, targets)`` like those of a call (and ``reset``, ``mask``, if calls
            have them); arrays or shapes.
        """
        return self._init(key, params, example)

    def _make_state(self, key: Any, params: Any, example: Any) -> TrainState:
        for_params, for_carry, rest = jax.random.split(key, 3)
        params = self.model.init(for_params) if params is None else strong(jax.tree.map(jnp.array, params))
        carry = self.model.initial_carry(for_carry)
        meter = None if self.meter is None else self.meter.init(self._meter_shapes(carry, example))
        opt_state = jax.tree.map(jnp.copy, self.tx.init(params))  # some hold arrays of the user's: a noise's key
        return TrainState(jnp.zeros((), jnp.int32), params, carry, opt_state, rest, meter)

    def _make_state_with_meter(self, key: Any, params: Any, example: Any) -> TrainState:
        """The state on a mesh: what the meter keeps of windows lies like their batch."""
        assert self.shardings is not None
        shapes = jax.eval_shape(self._make_state, key, params, example).meter
        placed = self.shardings._replace(meter=self._meter_shardings(shapes))
        return jax.jit(self._make_state, out_shardings=placed)(key, params, example)

    def __call__(
        self,
        state: TrainState,
        inputs: Any,
        targets: Any = None,
        reset: Any = None,
        mask: Any = None,
        modulator: Any = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        """Train over the time steps of ``inputs``."""
        key = getattr(state, "key", None)
        if isinstance(state, TrainState):  # the user's key stays outside: a typed one costs as much as many arrays
            state = state._replace(key=None)
        state, metrics = self.jitted(state, inputs, targets, reset, mask, modulator)
        return state._replace(key=key), metrics

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The jitted step lowered for arguments like these (arrays or shapes)."""
        return self.jitted.lower(*args, **kwargs)

    def run(
        self,
        state: TrainState,
        inputs: Any,
        targets: Any = None,
        reset: Any = None,
        mask: Any = None,
        modulator: Any = None,
    ) -> tuple[TrainState, dict[str, Array]]:
        """The same as calling it, without ``jit``: to be used inside a function of one's own."""
        if not isinstance(state, TrainState):
            raise TypeError(
                f"The first argument is the train state, got a {type(state).__name__}: `state = step.init(key)`, then "
                "`state, metrics = step(state, inputs, targets)`."
            )
        check_state(state.opt_state, jax.eval_shape(self.tx.init, state.params))
        steps = check_time(self.model, inputs)
        check_targets(targets, steps)
        check_reset(self.model, reset, steps)
        check_mask(self.model, mask, steps)
        check_modulator(self.model, modulator, steps, self._credit)
        over = (inputs, targets, reset, mask, modulator)
        return on_any_mesh(self._windows, state, over, results=lambda: (sharding_of(state), PartitionSpec()))

    def _windows(self, state: TrainState, over: Any) -> tuple[TrainState, dict[str, Array]]:
        steps = jax.tree.leaves(over[0])[0].shape[0]
        length = min(self.window or steps, steps)
        if isinstance(self._rule, BPTT) and length < steps:
            raise ValueError(
                f"BPTT goes through all {steps} time steps, `window={self.window}` would cut them: use `window=None`, "
                'or the rule "tbptt".'
            )
        whole = steps // length * length
        if self.meter is not None and (whole < steps or length != self.window):
            raise ValueError(
                f"With a quality meter all windows are of one length: {steps} time steps are no multiple of "
                f"`window={self.window}`."
            )
        first = jax.tree.map(lambda a: a[:whole].reshape(-1, length, *a.shape[1:]), over)
        if whole == length:
            state, metrics = self._one_window(state, jax.tree.map(lambda a: a[0], first))
            metrics = jax.tree.map(lambda m: m[None], metrics)
        else:
            state, metrics = lax.scan(self._one_window, state, first)
        if whole < steps:
            state, last = self._one_window(state, jax.tree.map(lambda a: a[whole:], over))
            metrics = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), metrics, last)
        if self.meter is not None and self.shardings is not None:
            inside = not jax.sharding.get_abstract_mesh().empty
            where = self._meter_shardings(state.meter)
            placed = jax.tree.map(lambda sharding: sharding.spec if inside else sharding, where)
            state = state._replace(meter=lax.with_sharding_constraint(state.meter, placed))
        return state, metrics

    def _one_window(self, state: TrainState, over: Any) -> tuple[TrainState, dict[str, Array]]:
        inputs, targets, reset, mask, modulator = over
        (value, carry), grads, window = self._value_and_grad(
            self._whole(state.params), state.carry, inputs, targets, reset, mask, modulator
        )
        if self._shares:
            window = replace(window, shares=math.prod(self._shares.values()), reduce=self._reduce)
        if self._inputs:
            window = replace(window, place=self._place)
        updates, opt_state = self._update(grads, state.opt_state, state.params, online=window)
        params = optax.apply_updates(state.params, updates)
        skipped = skipped_of(opt_state) != skipped_of(state.opt_state)

        # Parameters stay where they are: momentum and decay would move them even where updates are zero.
        params, carry = jax.tree.map(
            lambda new, old: jnp.where(skipped, old, new), (params, carry), (state.params, state.carry)
        )
        value, more = value if isinstance(value, tuple) else (value, {})
        metrics = {"loss": value, "skipped": skipped}
        more = more if isinstance(more, dict) else {"metrics": more}
        if taken := metrics.keys() & more.keys():
            raise ValueError(f"The loss returns metrics that `train_step` has too: rename {', '.join(sorted(taken))}.")
        metrics.update(more)
        meter = state.meter
        if self.meter is not None:
            meter, quality = self._read_meter(state, over, grads, window)
            metrics.update(quality)
        return TrainState(state.step + 1, params, carry, opt_state, state.key, meter), metrics

    def _whole(self, params: Any) -> Any:
        """Parameters as a window uses them: what is divided over the axes of the batch is gathered, once a window."""
        if self._gathered is None:
            return params
        inside = not jax.sharding.get_abstract_mesh().empty  # then a spec is enough, whatever kind of mesh it is

        def gather(leaf: Array, how: Gathered | None) -> Array:
            if how is None:
                return leaf
            to = how.sharding.spec if inside else how.sharding
            short = lax.with_sharding_constraint(leaf.astype(how.dtype), to)
            return lax.optimization_barrier(short).astype(leaf.dtype)  # or it may move into the loop over time

        return jax.tree.map(gather, params, self._gathered)

    def _place(self, name: str, x: Array) -> Array:
        """An operator's input, divided as its trace is: products with it need that anyway, and no trace is sent."""
        if name not in self._inputs:
            return x
        sharding = self._inputs[name]
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(free, free, *without(sharding.spec[1:], (), x.ndim - 2))
        inside = not jax.sharding.get_abstract_mesh().empty
        return lax.with_sharding_constraint(x, spec if inside else NamedSharding(sharding.mesh, spec))

    def _reduce(self, parts: Any) -> Any:
        """The sum over the shares of the batch, each gradient divided like its parameter.

        Written out, so that there is one exchange for each axis of the mesh: where an axis divides the parameter, each
        device gets its part of the sum (a reduce-scatter), and over the others the parts are summed.
        """
        assert self.shardings is not None
        axes = tuple(self._shares)
        mesh = jax.tree.leaves(self.shardings.params)[0].mesh
        given = jax.tree.map(
            lambda leaf, sharding: PartitionSpec(axes, *without(sharding.spec, axes, leaf.ndim - 1)),
            parts,
            self.shardings.params,
        )
        divided = jax.tree.map(lambda sharding, spec: _divided(sharding.spec, spec[1:]), self.shardings.params, given)

        def sum_up(parts: Any) -> Any:
            return jax.tree.map(lambda leaf, spec: _sum_of_shares(leaf[0], spec, axes), parts, divided)

        inside = not jax.sharding.get_abstract_mesh().empty  # the mesh in use may have other kinds of axes
        return jax.shard_map(sum_up, mesh=None if inside else mesh, in_specs=(given,), out_specs=divided)(parts)

    def _meter_shapes(self, carry: Any, example: tuple[Any, ...] | None) -> Any:
        if self.window is None or example is None:
            raise ValueError(
                "A quality meter needs a fixed `window`, and an example of a call to know its shapes: "
                "`step.init(key, example=(inputs, targets))`."
            )
        inputs, targets, reset, mask = (*example, None, None)[:4]
        length = self.window
        one = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((length, *a.shape[1:]), a.dtype), (inputs, targets, reset, mask)
        )
        return jax.eval_shape(self._meter_item, carry, *one)

    def _meter_shardings(self, ring: Any) -> Any:
        """Where a meter's ring lies: along the batch like the carry, ``(windows, batch, ...)``, and like the data."""
        assert self.shardings is not None
        mesh, axes = self.shardings.step.mesh, tuple(self._shares) or None

        def divided(leaf: Any, *spec: Any) -> NamedSharding:
            named = without(spec[: leaf.ndim], (), leaf.ndim)
            while named and named[-1] is None and AxisType.Explicit not in mesh.axis_types:
                named = named[:-1]  # as JAX spells what the compiler gives it
            return NamedSharding(mesh, PartitionSpec(*named))

        states, *data = ring.items
        carry = jax.tree.leaves(self.shardings.carry)
        lead = (None,) if self.model.has_examples else (None, None)  # windows, and a batch of one
        like_carry = [divided(leaf, *lead, *placed.spec) for leaf, placed in zip(states, carry, strict=True)]
        like_data = jax.tree.map(lambda leaf: divided(leaf, None, None, axes), data)
        return ring._replace(recorded=self.shardings.step, items=(like_carry, *like_data))

    def _meter_item(self, carry: Any, inputs: Any, targets: Any, reset: Any, mask: Any) -> Any:
        model = self.model
        leaves = model.input_leaves(split_inputs(model, inputs))
        return model.state_leaves(carry), leaves, (targets, mask), model.reset_mask(reset)

    def _read_meter(self, state: TrainState, over: Any, grads: Any, window: Any) -> tuple[Any, dict[str, Array]]:
        assert self.meter is not None
        inputs, targets, reset, mask, _ = over
        model, settings = self.model, settings_of(state.opt_state)
        ring = self.meter.record(state.meter, self._meter_item(state.carry, inputs, targets, reset, mask))
        parameters = model.param_leaves(state.params)
        start = None if reset is None else model.initial_leaves()

        def online() -> list[Array]:
            traces = optax.tree.get(state.opt_state, "OnlineGradState").traces
            more, _ = past_gradient(
                model.plan, settings.rule, parameters, traces, as_present(model, window), start, settings.credit
            )
            return [g + m for g, m in zip(jax.tree.leaves(grads), more, strict=True)]

        def loss(result: Any, wanted: Any) -> Array:
            outputs = model.as_outputs(result.outputs)
            return window_losses(self.loss, outputs, wanted[0], wanted[1], self._reduction)[0]

        quality = self.meter.measure(ring, model.plan, loss, parameters, online, start)
        return ring, {"gradient_cosine": quality.cosine, "gradient_norm_ratio": quality.norm_ratio}


def buckets(length: int, largest: int = 64) -> list[int]:
    """Lengths, powers of two, that add up to ``length``: a stream in ragged pieces then compiles only a few of them.

    >>> buckets(13)
    [8, 4, 1]
    >>> buckets(150)
    [64, 64, 16, 4, 2]
    """
    if length < 0 or largest < 1:
        raise ValueError(f"`buckets` needs length >= 0 and largest >= 1, got {length} and {largest}.")
    pieces, size = [], 1 << (largest.bit_length() - 1)
    while length:
        if size <= length:
            pieces.append(size)
            length -= size
        else:
            size //= 2
    return pieces


def _placeholder(model: Any) -> Any:
    return model.params_shape if isinstance(model, Model) else {}


def _divided(spec: PartitionSpec, whole: Sequence[Any]) -> PartitionSpec:
    """How the sum of a gradient is divided: like its parameter, but not over axes of the batch before others."""
    entries = []
    for i, other in enumerate(whole):
        own = spec[i] if i < len(spec) else None
        names, others = (() if part is None else part if isinstance(part, tuple) else (part,) for part in (own, other))
        entries.append(own if names[: len(others)] == others else other)
    return PartitionSpec(*entries)


def _sum_of_shares(own: Array, spec: PartitionSpec, axes: tuple[str, ...]) -> Array:
    """On one device, its part of the sum over all devices of these axes."""
    if jnp.iscomplexobj(own):  # a TPU gathers complex sums
        return lax.complex(*(_sum_of_shares(part, spec, axes) for part in (jnp.real(own), jnp.imag(own))))
    rest = list(axes)
    for dimension, names in enumerate(spec):
        over = tuple(name for name in (names if isinstance(names, tuple) else (names,)) if name in axes)
        if over:
            own = lax.psum_scatter(own, over, scatter_dimension=dimension, tiled=True)
            rest = [axis for axis in rest if axis not in over]
    return lax.psum(own, tuple(rest)) if rest else own

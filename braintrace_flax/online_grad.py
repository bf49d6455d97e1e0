"""``online_grad``: the ordinary gradient of a window in, the online gradient out; the traces live in its state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from braintrace_core.ops.in_place import on_one_device
from braintrace_core.rules import TBPTT, Rule, Traces, get_rule, past_gradient

from .checks import check_credit
from .explicit import on_any_mesh, sharding_of
from .model import Model, compile
from .window import Credit, Window, as_present

__all__ = ["OnlineGradState", "is_online_state", "online_grad", "reset_traces", "settings_of", "skipped_of"]

_SMALL = 2**11
_RIGHT_CALL = "`tx.update(grads, opt_state, params, online=window)`, where `window` comes from `value_and_grad`"

# States of what must not stand around it.
_NOT_AROUND = {
    "ApplyIfFiniteState": "apply_if_finite",
    "ConditionallyTransformState": "conditionally_transform",
    "ConditionallyMaskState": "conditionally_mask",
    "MaskedState": "masked",
    "MultiStepsState": "MultiSteps",
    "PartitionState": "partition",
}


@jax.tree_util.register_static
class Settings:
    """How the traces of a state are to be read: a leaf of no size.

    Attributes:
      rule, credit: as given to :func:`online_grad`.
      model: compiled.
      given: the model as it was given; the same, if it was compiled.
    """

    def __init__(self, rule: Rule, credit: Credit, model: Model, given: Any):
        self.rule, self.credit, self.model, self.given = rule, credit, model, given

    def _key(self) -> Any:
        return self.rule, self.credit, id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{self.rule!r}, credit={self.credit!r}"


class OnlineGradState(NamedTuple):
    """The state of :func:`online_grad`.

    Attributes:
      traces: eligibility traces by name, ``path/of/param@relation...``; the batch is the first axis of each.
      skipped: how many windows were left out because they were not finite.
      broken: whether the traces themselves have become infinite, and start anew with the next window.
      settings: the rule; not an array.
    """

    traces: Traces
    skipped: Array
    broken: Array
    settings: Settings

    def __repr__(self) -> str:
        if not isinstance(self.traces, dict) or not all(hasattr(trace, "dtype") for trace in self.traces.values()):
            return f"OnlineGradState(traces={self.traces}, skipped={self.skipped})"  # of shardings, or the like
        size = sum(trace.size * trace.dtype.itemsize for trace in self.traces.values())
        names = "".join(f"\n  {name}: {trace.dtype}{list(trace.shape)}" for name, trace in self.traces.items())
        return f"OnlineGradState({self.settings}, {len(self.traces)} traces, {size / 2**20:.2f} MiB{names})"


def online_grad(
    model: Any,
    *example_inputs: Any,
    rule: str | Rule = "d_rtrl",
    credit: Credit = "window",
    trace_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Turn the gradients of a window into online gradients; the first link of an Optax chain.

    Main arguments:
      model: from :func:`compile`; or a model to compile, with ``example_inputs``.
      rule: the learning rule, or its name.
      credit: ``"window"`` or ``"step"``, as in :func:`value_and_grad`.

    Other arguments:
      trace_dtype: the dtype to keep traces in; None for that of the parameters, also where the model computes in a
        shorter one.

    The update needs the parameters and the window: ``tx.update(grads, state, params, online=window)``. A window that is
    not finite gives updates of zero, leaves the traces as they were, and is counted in ``state.skipped``.

    It goes first: what stands before it would change the window's gradient and not the past's, and what stands around
    it may keep windows from it. :func:`train_step` refuses such an optimizer; in a loop of one's own, only
    ``optax.masked`` and ``optax.partition`` around it are noticed.

    >>> import jax, jax.numpy as jnp, optax
    >>> from flax import linen as nn
    >>> import braintrace_flax as braintrace
    >>> model = braintrace.compile(nn.SimpleCell(4), jnp.zeros((2, 3)))
    >>> tx = optax.chain(braintrace.online_grad(model, rule="pp_prop"), optax.adam(1e-3))
    >>> state = tx.init(model.init(jax.random.key(0)))
    >>> sorted(optax.tree.get(state, "OnlineGradState").traces)[:2]
    ['params/h/kernel@1.f.0', 'params/h/kernel@1.x']
    """
    compiled = _compiled(model, example_inputs)
    chosen = get_rule(rule)
    check_credit(credit, chosen)
    if trace_dtype is not None and not jnp.issubdtype(trace_dtype, jnp.floating):
        raise ValueError(f"`trace_dtype` is a dtype of real numbers, like jnp.bfloat16; got {trace_dtype!r}.")
    settings = Settings(chosen, credit, compiled, model)
    stored = _dtype_of_params(compiled) if trace_dtype is None else trace_dtype

    def init(params: Any) -> OnlineGradState:
        del params  # shapes come from the compiled graph: Optax calls this with placeholders too
        traces = chosen.init(compiled.plan, compiled.examples, stored)
        return OnlineGradState(traces, jnp.zeros((), jnp.int32), jnp.zeros((), bool), settings)

    def update(
        updates: Any, state: OnlineGradState, params: Any = None, *, online: Any = None, **extra: Any
    ) -> tuple[Any, OnlineGradState]:
        del extra
        _check_call(updates, params, online, settings)
        parameters, gradients = compiled.param_leaves(params), jax.tree.leaves(updates)
        if [g.shape for g in gradients] != [p.shape for p in parameters]:
            raise ValueError(f"The gradients are not those of these `params`: call {_RIGHT_CALL}.")
        return on_any_mesh(with_past, updates, state, params, online, results=lambda: sharding_of((updates, state)))

    def with_past(updates: Any, state: OnlineGradState, params: Any, online: Window) -> tuple[Any, OnlineGradState]:
        parameters, gradients = compiled.param_leaves(params), jax.tree.leaves(updates)
        present = as_present(compiled, online)
        start = None if online.reset is None else compiled.initial_leaves()
        traces = state.traces
        if not chosen.minds_windows:
            traces = {n: jnp.where(state.broken, _cleared(n, trace), trace) for n, trace in traces.items()}
        # Gradients that wait are summed over devices with those of the past: there is no looking at them alone.
        given = present.value if present.waiting is not None else gradients
        signal = None if isinstance(chosen, TBPTT) else present.signal  # nobody asks for it: it need not be computed
        fine = _all_finite([given, signal, present.after, present.inputs])
        care = {"fine": fine, "anew": state.broken} if chosen.minds_windows else {}

        def reduce(parts: list[Array]) -> list[Array]:
            assert online.reduce is not None
            return jax.tree.leaves(online.reduce(compiled.as_params(parts, updates)))

        more, advanced = past_gradient(
            compiled.plan,
            chosen,
            parameters,
            traces,
            present,
            start,
            credit,
            shares=online.shares,
            reduce=None if online.reduce is None else reduce,
            place=online.place,
            **care,
        )
        if not chosen.minds_windows:
            advanced = {name: jnp.where(fine, advanced[name], trace) for name, trace in traces.items()}
        total = [
            jnp.zeros_like(g) if i in compiled.frozen_leaves else g + m.astype(g.dtype)
            for i, (g, m) in enumerate(zip(gradients, more, strict=True))
        ]
        # Where only the whole is not finite, the traces are broken. They start anew with the next window: to decide it
        # now would keep two copies of them.
        seen_all = isinstance(chosen, TBPTT) and present.waiting is None
        keep = fine if seen_all else fine & _all_finite(total)
        new = [
            jnp.where(keep, gradient, jnp.zeros_like(gradient)).astype(p.dtype)
            for gradient, p in zip(total, parameters, strict=True)
        ]
        skipped = state.skipped + jnp.where(keep, 0, 1).astype(jnp.int32)
        return compiled.as_params(new, updates), OnlineGradState(advanced, skipped, fine & ~keep, state.settings)

    return optax.GradientTransformationExtraArgs(init, update)


def reset_traces(opt_state: Any) -> Any:
    """The optimizer state with all traces cleared: the past no longer counts.

    >>> import jax, jax.numpy as jnp, optax
    >>> from flax import linen as nn
    >>> import braintrace_flax as braintrace
    >>> tx = optax.chain(braintrace.online_grad(nn.SimpleCell(4), jnp.zeros((2, 3))), optax.adam(1e-3))
    >>> opt_state = tx.init(nn.SimpleCell(4).init(jax.random.key(0), jnp.zeros((2, 4)), jnp.zeros((2, 3)))["params"])
    >>> opt_state = braintrace.reset_traces(opt_state)
    """

    def clear(node: Any) -> Any:
        if not isinstance(node, OnlineGradState):
            return node
        cleared = {name: _cleared(name, trace) for name, trace in node.traces.items()}
        return node._replace(traces=cleared, broken=jnp.zeros_like(node.broken))

    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_online_state) if is_online_state(node)]
    if not found:
        raise ValueError("`reset_traces` found no OnlineGradState: is `online_grad` in this optimizer's chain?")
    return jax.tree.map(clear, opt_state, is_leaf=is_online_state)


def settings_of(opt_state: Any) -> Settings:
    """The rule and the credit of the ``online_grad`` whose state this is; shapes will do."""
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_online_state) if is_online_state(node)]
    if len(found) != 1:
        count = "no" if not found else "more than one"
        raise ValueError(
            f"The optimizer has {count} `online_grad` in it. Write `optax.chain(online_grad(model), optax.adam(1e-3))`."
        )
    _check_place(opt_state)
    return found[0].settings


def skipped_of(opt_state: Any) -> Array:
    """How many windows were left out."""
    return optax.tree.get(opt_state, "OnlineGradState").skipped


def _check_place(node: Any) -> None:
    """Raise if something stands before ``online_grad``, or around it where it must not."""
    if is_online_state(node) or not isinstance(node, tuple):
        return
    place = next((i for i, part in enumerate(node) if _holds_state(part)), None)
    if place is None:
        return
    name = type(node).__name__
    if name in _NOT_AROUND:
        raise ValueError(
            f"`online_grad` stands inside `optax.{_NOT_AROUND[name]}`, which keeps some windows or parameters from it. "
            f"Put it first: `optax.chain(online_grad(model), optax.{_NOT_AROUND[name]}(...))`."
        )
    if type(node) is tuple and place > 0:
        raise ValueError(
            "`online_grad` is not the first link of the chain, and needs the gradients as they come. Write "
            "`optax.chain(online_grad(model), optax.adam(1e-3))`."
        )
    _check_place(node[place])


def _holds_state(node: Any) -> bool:
    return any(map(is_online_state, jax.tree.leaves(node, is_leaf=is_online_state)))


def is_online_state(node: Any) -> bool:
    """Whether ``node`` is the state of :func:`online_grad`."""
    return isinstance(node, OnlineGradState)


def _compiled(model: Any, example_inputs: tuple[Any, ...]) -> Model:
    if isinstance(model, Model):
        if example_inputs:
            raise ValueError("`online_grad` got a compiled model and example inputs: the inputs belong to `compile`.")
        return model
    if not example_inputs:
        raise ValueError(
            "`online_grad` got a model that is not compiled. Write `online_grad(compile(model, example_input))`, or "
            "`online_grad(model, example_input)`."
        )
    return compile(model, *example_inputs)


def _check_call(updates: Any, params: Any, online: Any, settings: Settings) -> None:
    if params is None:
        raise ValueError(f"`online_grad` needs the parameters: call {_RIGHT_CALL}.")
    if online is None:
        raise ValueError(f"`online_grad` needs the window (`online=`): call {_RIGHT_CALL}.")
    if not isinstance(online, Window):
        raise ValueError(f"`online=` is a {type(online).__name__}, not the window: call {_RIGHT_CALL}.")
    if online.credit != settings.credit:
        raise ValueError(
            f'The window was made with credit="{online.credit}" and `online_grad` with credit="{settings.credit}": '
            f'write `value_and_grad(model, loss, credit="{settings.credit}")`.'
        )
    asked = settings.credit == "step" and any(map(_changes_signals, (online.rule, settings.rule)))
    if asked and online.rule != settings.rule:
        raise ValueError(
            "The rule takes part in the gradient of the window: give `value_and_grad` the same one, "
            f'`value_and_grad(model, loss, credit="{settings.credit}", rule={settings.rule})`.'
        )
    masked = [leaf for leaf in jax.tree.leaves(updates, is_leaf=_is_masked) if _is_masked(leaf)]
    if masked:
        raise ValueError(
            "`online_grad` was given masked gradients: it stands inside `optax.masked` or `optax.partition`, where it "
            "cannot see all parameters. Put it first: `optax.chain(online_grad(model), optax.masked(...))`; or freeze "
            "parameters with `compile(..., frozen=[...])`."
        )


def _changes_signals(rule: Rule | None) -> bool:
    """Whether a rule has a say in what each step's loss says."""
    return rule is not None and (rule.feedback_seed is not None or rule.follows_parameters)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _dtype_of_params(model: Model) -> Any:
    """The real dtype of all parameters; None if they have several, so that each trace has its own weight's."""
    leaves = jax.tree.leaves(model.params_shape)
    found = {jnp.finfo(leaf.dtype).dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    return found.pop() if len(found) == 1 else None


def _cleared(name: str, trace: Array) -> Array:
    """What a trace starts from; random keys and a synthesiser's parameters go on as they are."""
    return trace if name == "key" or name.startswith("synthesiser.") else jnp.zeros_like(trace)


def _all_finite(tree: Any) -> Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if on_one_device():  # a small array costs a call, not time: together they are one
        leaves = [leaf if leaf.size <= _SMALL else _probe(leaf) for leaf in leaves]
        small = [leaf for leaf in leaves if leaf.size <= _SMALL]
        leaves = [leaf for leaf in leaves if leaf.size > _SMALL]
        for dtype in dict.fromkeys(leaf.dtype for leaf in small):
            leaves.append(jnp.concatenate([leaf.ravel() for leaf in small if leaf.dtype == dtype]))
    fine = [jnp.isfinite(leaf).all() for leaf in leaves]
    return jnp.stack(fine).all() if fine else jnp.ones((), bool)


def _probe(leaf: Array) -> Array:
    """An array that is finite where a larger one is: times zero, what is not finite is not a number.

    A product with a vector of zeros reads a matrix several times faster than XLA's CPU backend looks at its numbers.
    """
    if leaf.ndim < 2 or leaf.shape[-1] > _SMALL:
        return leaf

    def product(leaf: Array) -> Array:
        zeros = lax.optimization_barrier(jnp.zeros(leaf.shape[-1], leaf.dtype))
        return leaf.reshape(-1, leaf.shape[-1]) @ zeros

    def any_other(leaf: Array) -> Array:
        return jnp.where(jnp.isfinite(leaf).all(-1), 0.0, jnp.nan).astype(leaf.dtype).ravel()

    return lax.platform_dependent(leaf, cpu=product, default=any_other)

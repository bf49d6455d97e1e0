"""Exact rules: RTRL, and its unbiased rank-one estimate UORO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..compiler.graph import ETraceGraph
from ..ops.dtypes import accumulation_dtype, common_dtype, storage_dtype
from .factors import Signal, WindowFactors
from .influence import HiddenVector, parameter_variables, step_map
from .plan import RulePlan
from .rule import OperandGradients, Rule, Traces, as_plan, times

__all__ = ["RTRL", "UORO"]


@dataclass(frozen=True)
class RTRL(Rule):
    """Real-time recurrent learning: the influence of every parameter on every hidden state.

        E_t = J_t E_{t-1} + d h_t / d theta

    Exact for every model and window. Memory for each example is the number of hidden values times that of parameters:
    for small networks, and as the yardstick of all other rules.
    """

    @property
    def follows_parameters(self) -> bool:
        return True

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        size = HiddenVector(plan).size
        return {
            name: jnp.zeros((batch_size, size, *v.aval.shape), storage_dtype(dtype, v.aval.dtype))
            for name, v in _names(plan).items()
        }

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        plan = factors.plan
        vector = HiddenVector(plan)
        run, now = step_map(vector, factors)
        frontier = factors.frontier_values()
        theta = [frontier[v] for v in parameter_variables(plan)]

        def example(influence: list[Array], at: Any) -> list[Array]:
            _, states, reset = at
            z = vector.of_states(dict(zip(plan.program.state_invars, states, strict=True)), after=False)
            _, pull_back = jax.vjp(lambda z, theta: run(z, theta, at), z, theta)
            through, direct = jax.vmap(pull_back)(jnp.eye(vector.size, dtype=z.dtype))
            if reset is not None:
                through = jnp.where(reset, jnp.zeros_like(through), through)
            return [
                jnp.tensordot(through.astype(e.dtype), e, 1) + d.astype(e.dtype)
                for e, d in zip(influence, direct, strict=True)
            ]

        def step(influence: list[Array], at: Any) -> tuple[list[Array], None]:
            return jax.vmap(example)(influence, at), None

        names = _names(plan)
        wide = [traces[n].astype(accumulation_dtype(traces[n].dtype, v.aval.dtype)) for n, v in names.items()]
        new = dict(zip(names, lax.scan(step, wide, now)[0], strict=True))
        return {name: new[name].astype(value.dtype) for name, value in traces.items()}

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        weights = HiddenVector(signal.plan).of_signal(signal)
        return {name: _contract(weights, traces[name]).astype(v.aval.dtype) for name, v in _names(signal.plan).items()}


@dataclass(frozen=True)
class UORO(Rule):
    """Unbiased online recurrent optimisation (Tallec and Ollivier, 2017): the influence as one random rank-one product.

    Unbiased for every model, with noise; memory for each example is that of the hidden states and the parameters.

    Attributes:
      seed: of the random signs; each example draws its own.
    """

    seed: int = 0

    @property
    def follows_parameters(self) -> bool:
        return True

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        vector = HiddenVector(plan)
        keys = jax.random.split(jax.random.key(self.seed, impl="threefry2x32"), batch_size)
        return {
            "key": jax.random.key_data(keys),
            "hidden": jnp.zeros((batch_size, vector.size), dtype or vector.dtype),
            **{
                name: jnp.zeros((batch_size, *v.aval.shape), storage_dtype(dtype, v.aval.dtype))
                for name, v in _names(plan).items()
            },
        }

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        plan = factors.plan
        vector = HiddenVector(plan)
        run, now = step_map(vector, factors)
        frontier = factors.frontier_values()
        theta = [frontier[v] for v in parameter_variables(plan)]
        names = list(_names(plan))

        def example(old: Traces, at: Any) -> Traces:
            _, states, reset = at
            key, draw = jax.random.split(jax.random.wrap_key_data(old["key"], impl="threefry2x32"))
            z = vector.of_states(dict(zip(plan.program.state_invars, states, strict=True)), after=False)
            hidden = old["hidden"].astype(z.dtype)
            if reset is not None:
                hidden = jnp.where(reset, jnp.zeros_like(hidden), hidden)
            _, pull_back = jax.vjp(lambda z, theta: run(z, theta, at), z, theta)
            # Forward differentiation as the transpose of backward: it keeps derivative rules that only exist backward.
            _, push = jax.vjp(lambda c: pull_back(c)[0], jnp.zeros_like(z))
            (through,) = push(hidden)
            signs = jax.random.rademacher(draw, (vector.size,), z.dtype)
            direct = pull_back(signs)[1]
            past = [old[name].astype(d.dtype) for name, d in zip(names, direct, strict=True)]
            if reset is not None:
                past = [jnp.where(reset, jnp.zeros_like(p), p) for p in past]
            keep, add = _balance(_norm(past), _norm([through])), _balance(_norm(direct), _norm([signs]))
            new = {"key": jax.random.key_data(key), "hidden": keep * through + add * signs}
            new.update(
                {
                    n: p / keep.astype(p.dtype) + d / add.astype(d.dtype)
                    for n, p, d in zip(names, past, direct, strict=True)
                }
            )
            return {name: new[name].astype(value.dtype) for name, value in old.items()}

        def step(old: Traces, at: Any) -> tuple[Traces, None]:
            return jax.vmap(example)(old, at), None

        wide = {n: v if n == "key" else v.astype(accumulation_dtype(v.dtype)) for n, v in traces.items()}
        new = lax.scan(step, wide, now)[0]
        return {name: new[name].astype(value.dtype) for name, value in traces.items()}

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        weights = times(HiddenVector(signal.plan).of_signal(signal), traces["hidden"]).sum(-1)
        return {
            name: _contract(weights[:, None], traces[name][:, None]).astype(v.aval.dtype)
            for name, v in _names(signal.plan).items()
        }


def _names(plan: RulePlan) -> dict[str, Any]:
    """The variables that the rules follow, by names that do not change from process to process."""
    frontier = plan.program.schedule.frontier
    return {f"parameter{frontier.index(v)}": v for v in parameter_variables(plan)}


def _contract(weights: Array, trace: Array) -> Array:
    """``sum_b sum_h weights[b, h] trace[b, h, ...]``."""
    dtype = common_dtype(weights.dtype, trace.dtype)
    return jnp.tensordot(weights.astype(dtype), trace.astype(dtype), 2)


def _norm(values: list[Array]) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.real(v * jnp.conj(v))) for v in values))


def _balance(first: Array, second: Array) -> Array:
    """The factor that gives both sides of a product the same norm; one where a side is zero."""
    ratio = jnp.sqrt(first / jnp.where(second > 0, second, 1))
    return jnp.where((first > 0) & (second > 0), ratio, jnp.ones_like(ratio))

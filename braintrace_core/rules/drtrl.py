"""D-RTRL: the trace of each parameter, followed unit by unit.

    eps_t = D_t eps_{t-1} + df_t (x) x_t

With the parameters fixed over a window this telescopes, so the trace is read and written once a window:

    eps_k = P eps_0 + sum_u x_u (x) (Q_u df_u),    P = D_k ... D_1,    Q_u = D_k ... D_{u+1}

Only components that feed the next step are stored (an LSTM keeps its cell's, a dense vanilla network none): the stored
trace is that before the last step, and the last step's own factors wait until a signal or the next window comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from ..compiler.graph import ETraceGraph
from ..ops.dtypes import storage_dtype
from ..ops.in_place import after, unless_silent
from ..ops.trace_rules import EmbeddingTrace, TraceRule
from .factors import Pair, Signal, WindowFactors
from .operators import operator_gradient
from .plan import GroupPlan, Link, RulePlan
from .rule import OperandGradients, Rule, Traces, as_plan, times, total
from .touched import contract_rows, has_rows, init_rows, roll_rows

__all__ = ["DRTRL", "carry_back"]


@dataclass(frozen=True)
class DRTRL(Rule):
    """Diagonal real-time recurrent learning: exact where the recurrence is unit by unit.

    Memory for each example: size of the weight times the number of recurrent states of a unit.

    Attributes:
      rows: how many rows of an embedding's table an example can have traces of; None for all. Exact as long as it looks
        up no more of them in a sequence; traces of those that were looked up longest ago are lost then, and counted in
        the trace ``"...rows.lost"``.
    """

    minds_windows: ClassVar[bool] = True

    rows: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.rows is not None and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1):
            raise ValueError(f"`rows` is how many rows to follow, at least 1, or None; got {self.rows!r}.")

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        traces: Traces = {}
        for link, operands in zip(plan.links, plan.abstract_operands(), strict=True):
            y = link.operator.y.aval
            for name, rule in link.traces(operands).rules.items():
                if isinstance(rule, EmbeddingTrace) and link.stored and self.rows and self.rows < rule.rows:
                    traces |= init_rows(link.name, rule, self.rows, batch_size, link.stored, dtype)
                    continue
                for a in link.stored:
                    traces[f"{link.name}.{name}.{a}"] = jnp.zeros(
                        (batch_size, *rule.shape), storage_dtype(dtype, rule.dtype)
                    )
            for a in link.moved:
                traces[f"{link.name}.df.{a}"] = jnp.zeros((batch_size, *y.shape), y.dtype)
            if link.operator.x is not None:
                x = link.operator.x.aval
                traces[f"{link.name}.x"] = jnp.zeros((batch_size, *x.shape), x.dtype)
        for g, group in enumerate(plan.groups):
            for a, b in group.entries:
                traces[f"group{g}.D.{a}.{b}"] = jnp.zeros((batch_size, *group.varshape), group.dtypes[a])
        return traces

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        plan, steps = factors.plan, factors.sizes[0]
        large = self._large(traces, plan)
        traces = {name: trace if name in large else _unless(factors.anew, trace) for name, trace in traces.items()}
        new: Traces = {}
        carried = []
        for g, group in enumerate(plan.groups):
            between = {(a, b): _behind(traces[f"group{g}.D.{a}.{b}"], factors.D[g][a, b]) for a, b in group.entries}
            carried.append(_products(group, between, steps))
            new.update({f"group{g}.D.{a}.{b}": factors.D[g][a, b][-1] for a, b in group.entries})
        for i, link in enumerate(plan.links):
            across, to_end = carried[link.group]
            df = {a: _behind(traces[f"{link.name}.df.{a}"], factors.df[i][a]) for a in link.moved}
            new.update({f"{link.name}.df.{a}": factors.df[i][a][-1] for a in link.moved})
            x = None
            if link.operator.x is not None:
                x = _behind(traces[f"{link.name}.x"], factors.x[i])
                new[f"{link.name}.x"] = factors.x[i][-1]
            new.update(_roll(link, factors, i, traces, x, df, across, to_end))
        return {name: new[name] if name in large else _if(factors.fine, new[name], old) for name, old in traces.items()}

    @staticmethod
    def _large(traces: Traces, plan: RulePlan) -> set[str]:
        """The names of the stored traces, except those of touched rows."""
        operands = plan.abstract_operands()
        return {
            name
            for i, link in enumerate(plan.links)
            for key in link.traces(operands[i]).rules
            for a in link.stored
            if (name := f"{link.name}.{key}.{a}") in traces
        }

    def gradient(self, traces: Traces, signal: Signal) -> OperandGradients:
        found: OperandGradients = {}
        for i in range(len(signal.plan.links)):
            found.update(_link_gradient(traces, signal, i))
        return found

    def gradient_and_advance(
        self, traces: Traces, signal: Signal, factors: WindowFactors
    ) -> tuple[OperandGradients, Traces]:
        return self._around(traces, signal, factors)

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        return self.step_gradient_and_advance(traces, factors, signals)[0]

    def step_gradient_and_advance(
        self, traces: Traces, factors: WindowFactors, signals: Signal
    ) -> tuple[OperandGradients, Traces]:
        plan = factors.plan
        credits, before = zip(
            *(carry_back(group, factors.D[g], signals.groups[g]) for g, group in enumerate(plan.groups)), strict=True
        )
        # What reaches the window's start came through D: it is on components that recur.
        found, new = self._around(traces, Signal(tuple(before), factors.operands, plan), factors, recurrent=True)
        for i, link in enumerate(plan.links):
            credit = credits[link.group]
            at_result = total([times(link.at_operator(credit[a]), factors.df[i][a]) for a in link.moved])
            inside = operator_gradient(link.operator, factors.operands[i], factors.x[i], at_result)
            for key, value in inside.items():
                name = f"{link.name}.{key}"
                found[name] = found[name] + value if name in found else value
        return found, new

    def _around(
        self, traces: Traces, signal: Signal, factors: WindowFactors, recurrent: bool = False
    ) -> tuple[OperandGradients, Traces]:
        """The gradient for a signal at the window's start, and the traces after the window.

        Each stored trace is read for the gradient either before it is written or after, never from a copy. After a
        window of one step the stored trace, which lags by one, is that of the window's start: where a signal is on
        stored components only, it is all that the signal needs.

        Args:
          recurrent: whether the signal is on recurrent components alone.
        """
        plan = signal.plan
        found: dict[int, OperandGradients] = {}
        for i, link in enumerate(plan.links):
            if not (factors.sizes[0] == 1 and link.stored and (recurrent or link.stored == link.reached)):
                found[i] = _link_gradient(traces, signal, i, recurrent)
        ready = dict(traces)
        for g, group in enumerate(plan.groups):
            read = [value for i, of in found.items() if plan.links[i].group == g for value in of.values()]
            for a, b in group.entries:
                ready[f"group{g}.D.{a}.{b}"] = after(read, traces[f"group{g}.D.{a}.{b}"])
        new = self.advance(ready, factors)
        for i, link in enumerate(plan.links):
            if i not in found:
                now = {a: signal.groups[link.group][a] for a in link.stored}
                contracted = _contract(link, new, now, signal.operands[i], apart=len(link.stored) > 1)
                found[i] = {f"{link.name}.{key}": value for key, value in contracted.items()}
        return {key: _unless(factors.anew, v) for i in range(len(plan.links)) for key, v in found[i].items()}, new


def _link_gradient(traces: Traces, signal: Signal, i: int, recurrent: bool = False) -> OperandGradients:
    """What a signal says about the operands of one link; it may be on recurrent components alone."""
    link = signal.plan.links[i]
    group, now, operands = signal.plan.groups[link.group], signal.groups[link.group], signal.operands[i]
    # One step back: to the stored trace through the waiting D, and to the operator through the waiting df.
    at_trace = {
        b: total([now[a] * traces[f"group{link.group}.D.{a}.{b}"] for a, c in group.entries if c == b])
        for b in link.stored
    }
    moved = [a for a in link.moved if a in group.recurrent or not recurrent]
    gradients: dict[str, Array] = {}
    if moved:
        at_result = total([times(link.at_operator(now[a]), traces[f"{link.name}.df.{a}"]) for a in moved])
        x = traces.get(f"{link.name}.x")
        gradients = operator_gradient(link.operator, operands, None if x is None else x[None], at_result[None])
    if link.stored:
        for key, value in _contract(link, traces, at_trace, operands, apart=True).items():
            gradients[key] = gradients[key] + value.astype(gradients[key].dtype) if key in gradients else value
    return {f"{link.name}.{key}": value for key, value in gradients.items()}


def _contract(
    link: Link, traces: Traces, signal: Mapping[int, Array], operands: Sequence[Any], apart: bool
) -> dict[str, Array]:
    """Stored traces of a link contracted with a signal for each stored component, by operand.

    ``apart`` keeps the compiler from merging the reading with what follows.
    """
    of_traces = link.traces(operands)
    at_operator = {b: link.at_operator(signal[b]) for b in link.stored}

    def read(rule: TraceRule, trace: Array, signal: Array) -> Array:
        return unless_silent(rule.contract, trace, signal) if apart else rule.contract(trace, signal)

    contracted = {}
    for name, rule in of_traces.rules.items():
        if isinstance(rule, EmbeddingTrace) and has_rows(traces, link.name):
            contracted[name] = contract_rows(link.name, rule, traces, at_operator)
        else:
            contracted[name] = total(
                [read(rule, traces[f"{link.name}.{name}.{b}"], at_operator[b]) for b in link.stored]
            )
    found = of_traces.to_operands(contracted)
    return {key: value for key, value in found.items() if key in link.operator.operands}


def carry_back(
    group: GroupPlan, between: Mapping[Pair, Array], signals: Sequence[Array]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Each step's signal with those of later steps of the window, carried back to it unit by unit.

        R_t = s_t + R_{t+1} D_{t+1}

    Args:
      group: the group.
      between: ``D`` of the window.
      signals: for each component, ``(time, batch, *varshape)``.

    Returns:
      ``R`` for each component, and the credit ``R_1 D_1`` that reaches the states before the window.
    """
    count = group.count

    def back(credit: tuple[Array, ...], d: Mapping[Pair, Array]) -> tuple[Array, ...]:
        return tuple(
            total([credit[a] * d[a, b] for a, c in group.entries if c == b], like=credit[b]) for b in range(count)
        )

    def step(later: tuple[Array, ...], now: Any) -> Any:
        signal, d = now
        credit = tuple(s + r for s, r in zip(signal, later, strict=True))
        return back(credit, d), credit

    zero = tuple(jnp.zeros_like(s[0]) for s in signals)
    if signals[0].shape[0] == 1:
        first = tuple(s[0] for s in signals)
        return tuple(signals), back(first, {pair: d[0] for pair, d in between.items()})
    before, credits = lax.scan(step, zero, (tuple(signals), dict(between)), reverse=True)
    return credits, before


def _behind(waiting: Array, window: Array) -> Array:
    """A window that lags by one step: what waited first, its own last step left out."""
    return waiting[None] if window.shape[0] == 1 else jnp.concatenate([waiting[None], window[:-1]])


def _products(
    group: GroupPlan, between: Mapping[Pair, Array], steps: int
) -> tuple[dict[Pair, Array], dict[Pair, Array | None]]:
    """``P = D_k ... D_1`` and, for each step, ``Q_u = D_k ... D_{u+1}``, as entries between components.

    None in ``Q`` stands for one (the identity of a single step).
    """
    rows = group.recurrent
    if not rows:
        return {}, {}
    if steps == 1:
        return {(a, b): d[0] for (a, b), d in between.items() if a in rows}, {(a, a): None for a in rows}
    pattern = [(a, c) for a, c in group.closure if a in rows]
    like = next(iter(between.values()))[0]
    start = {(a, c): jnp.ones_like(like) if a == c else jnp.zeros_like(like) for a, c in pattern}

    def step(later: dict[Pair, Array], d: Mapping[Pair, Array]) -> Any:
        return {
            (a, c): total([later[a, b] * d[b, c] for b, e in group.entries if e == c and (a, b) in later], like=like)
            for a, c in pattern
        }, later

    across, to_end = lax.scan(step, start, dict(between), reverse=True)
    return across, to_end


def _roll(
    link: Link,
    factors: WindowFactors,
    i: int,
    traces: Traces,
    x: Any,
    df: Mapping[int, Array],
    across: Mapping[Pair, Array],
    to_end: Mapping[Pair, Array | None],
) -> Traces:
    """The stored traces of link ``i`` after a window (lagging by one step).

    A window that does not count decays nothing and adds nothing: the choice is made on small arrays.
    """
    if not link.stored:
        return {}
    new: Traces = {}
    if factors.fine is not None:
        like = next(iter(across.values()))
        across = {(a, a): jnp.zeros_like(like) for a in link.stored} | dict(across)
        across = {(a, b): _if(factors.fine, p, jnp.full_like(p, a == b)) for (a, b), p in across.items()}
        x = None if x is None else _if(factors.fine, x, jnp.zeros_like(x))
    cotangents = {}
    for a in link.stored:
        moved = [df[c] if q is None else times(link.at_operator(q), df[c]) for c, q in _row(a, link.moved, to_end)]
        if moved:
            cotangents[a] = _if(factors.fine, moves := total(moved), jnp.zeros_like(moves))
    for name, rule in link.traces(factors.operands[i]).rules.items():

        def decayed(a: int, old: Mapping[int, Array], rule: TraceRule = rule) -> Array | None:
            terms = [times(rule.align(link.at_operator(p)), old[b]) for b, p in _row(a, link.stored, across)]
            return total(terms) if terms else None

        if isinstance(rule, EmbeddingTrace) and has_rows(traces, link.name):
            new.update(roll_rows(link.name, rule, traces, x, decayed, cotangents, link.stored))
            continue
        for a in link.stored:
            stored = traces[f"{link.name}.{name}.{a}"]
            kept = decayed(a, {b: _unless(factors.anew, traces[f"{link.name}.{name}.{b}"]) for b in link.stored})
            if a not in cotangents:
                found = jnp.zeros_like(stored) if kept is None else kept
            else:
                found = rule.instant(x, cotangents[a]) if kept is None else rule.add(kept, x, cotangents[a])
            new[f"{link.name}.{name}.{a}"] = found.astype(stored.dtype)
    return new


def _if(flag: Any, value: Array, other: Array) -> Array:
    """``value`` if the flag is up or there is none, else the other."""
    return value if flag is None else jnp.where(flag, value, other)


def _unless(flag: Any, value: Array) -> Array:
    """``value``, or zero if there is a flag and it is up."""
    return value if flag is None else jnp.where(flag, jnp.zeros_like(value), value)


def _row(a: int, columns: Sequence[int], entries: Mapping[Pair, Any]) -> list[tuple[int, Any]]:
    """The entries of row ``a`` in these columns that are not zero by structure."""
    return [(c, entries[a, c]) for c in columns if (a, c) in entries]

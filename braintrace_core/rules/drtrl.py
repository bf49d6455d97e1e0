"""D-RTRL: the trace of each parameter, followed unit by unit.

    eps_t = D_t eps_{t-1} + df_t (x) x_t

With the parameters fixed over a window this telescopes, so the trace is read and written once a window:

    eps_k = P eps_0 + sum_u x_u (x) (Q_u df_u),    P = D_k ... D_1,    Q_u = D_k ... D_{u+1}

Only components that feed the next step are stored (an LSTM keeps its cell's, a dense vanilla network none): the stored
trace is that before the last step, and the last step's own factors wait until a signal or the next window comes. Of
twins (``twins.py``) one is stored, and what is stored of two states that feed each other lies along axes that turn with
them (``frames.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..compiler.graph import ETraceGraph
from ..ops.dtypes import storage_dtype
from ..ops.in_place import after, concatenated, is_worth_turns, made_once, unless_silent
from ..ops.trace_rules import EinsumTrace, EmbeddingTrace, TraceRule
from .carrying import Carried, carry_back, carry_on
from .factors import Pair, Signal, WindowFactors
from .frames import along, are_interlocked, axis_of, frames_of, init_axis
from .operators import operator_gradient
from .plan import Link, RulePlan
from .rolling import Roll, unless
from .rule import OperandGradients, Rule, Traces, as_plan, times, total
from .touched import contract_rows, has_rows, init_rows, roll_rows
from .twins import Twin, twins_of

__all__ = ["DRTRL"]


@dataclass(frozen=True)
class DRTRL(Rule):
    """Diagonal real-time recurrent learning: exact where the recurrence is unit by unit.

    Memory for each example: size of the weight times the number of recurrent states of a unit.

    Attributes:
      rows: how many rows of an embedding's table an example can have traces of; None for all. Exact as long as it looks
        up no more of them in a sequence; traces of those that were looked up longest ago are lost then, and counted in
        the trace ``"...rows.lost"``.
    """

    rows: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.rows is not None and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1):
            raise ValueError(f"`rows` is how many rows to follow, at least 1, or None; got {self.rows!r}.")

    @property
    def minds_windows(self) -> bool:
        return self._advances_so

    def init(self, graph: ETraceGraph | RulePlan, batch_size: int, dtype: Any = None) -> Traces:
        plan = as_plan(graph)
        traces: Traces = {}
        twins = self._twins(plan)
        for i, (link, operands) in enumerate(zip(plan.links, plan.abstract_operands(), strict=True)):
            y = link.operator.y.aval
            for name, rule in link.traces(operands).rules.items() if i not in twins else ():
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
                traces[plan.input_name(link)] = jnp.zeros((batch_size, *x.shape), x.dtype)
        for g, (group, pairs) in enumerate(zip(plan.groups, frames_of(plan), strict=True)):
            for a, b in group.entries:
                traces[f"group{g}.D.{a}.{b}"] = jnp.zeros((batch_size, *group.varshape), group.dtypes[a])
            traces |= init_axis(g, group, pairs, batch_size)
        return traces

    def advance(self, traces: Traces, factors: WindowFactors) -> Traces:
        return self._advance(traces, factors, {})[0]

    def _advance(
        self, traces: Traces, factors: WindowFactors, signals: Mapping[int, Mapping[int, Array]]
    ) -> tuple[Traces, dict[int, dict[str, Array]]]:
        """The traces after the window, and what those before it say of signals, link -> name -> gradient.

        The traces of a link are read and then written, those of the next link after that: what has been read is still
        in the cache when it is written.

        Args:
          signals: for each link whose traces are to be read, a signal at the components that are stored of them.
        """
        plan, twins = factors.plan, self._twins(factors.plan)
        large = self._large(traces, plan)
        traces = {name: trace if name in large else unless(factors.anew, trace) for name, trace in traces.items()}
        new: Traces = {}
        read: dict[int, dict[str, Array]] = {}
        written: list[Array] = []
        carried = []
        for g, (group, pairs) in enumerate(zip(plan.groups, frames_of(plan), strict=True)):
            between = {(a, b): _behind(traces[f"group{g}.D.{a}.{b}"], factors.D[g][a, b]) for a, b in group.entries}
            carried.append(carry_on(group, between, factors.one_D(g), pairs, axis_of(traces, g, pairs)))
            new.update({f"group{g}.D.{a}.{b}": factors.D[g][a, b][-1] for a, b in group.entries})
            new.update({f"group{g}.axis.{a}": value for a, value in carried[g].axis.items()})
        for i, link in enumerate(plan.links):
            df = {a: _behind(traces[f"{link.name}.df.{a}"], factors.df[i][a]) for a in link.moved}
            new.update({f"{link.name}.df.{a}": factors.df[i][a][-1] for a in link.moved})
            x = None
            if link.operator.x is not None:
                x = _behind(traces[plan.input_name(link)], factors.x[i])
                new[plan.input_name(link)] = factors.x[i][-1]
            if link.stored and i not in twins:
                readers = [k for k in signals if k == i or (k in twins and twins[k].holder == i)]
                now = {k: {a: after(written, signal) for a, signal in signals[k].items()} for k in readers}
                rolled, found = _roll(link, factors, i, traces, x, df, carried[link.group], now)
                written = [*rolled.values()]
                new.update(rolled)
                read.update(found)
        chosen = {name: of if name in large else _if(factors.fine, of, traces[name]) for name, of in new.items()}
        return {**traces, **chosen}, read

    @property
    def _advances_so(self) -> bool:
        """Whether traces advance as here.

        A rule made of this one may have another ``advance``, which faster ways to the same would not follow.
        """
        return type(self).advance is DRTRL.advance

    def _twins(self, plan: RulePlan) -> Mapping[int, Twin]:
        """The links whose traces another one holds; a rule made of this one may treat the two differently."""
        return twins_of(plan) if self._advances_so else {}

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
        twins = self._twins(signal.plan)
        for i in range(len(signal.plan.links)):
            found.update(_link_gradient(traces, signal, i, twins.get(i)))
        return found

    def gradient_and_advance(
        self, traces: Traces, signal: Signal, factors: WindowFactors
    ) -> tuple[OperandGradients, Traces]:
        if not self._advances_so:
            return super().gradient_and_advance(traces, signal, factors)
        found, new, waiting = self._around(traces, signal, factors)
        for i, steps in waiting.items():
            link = signal.plan.links[i]
            _add(found, link, _steps_gradient(link, signal.operands[i], steps))
        return found, new

    def step_gradient(self, traces: Traces, factors: WindowFactors, signals: Signal) -> OperandGradients:
        if not self._advances_so:
            return super().step_gradient(traces, factors, signals)
        return self.step_gradient_and_advance(traces, factors, signals)[0]

    def step_gradient_and_advance(
        self, traces: Traces, factors: WindowFactors, signals: Signal, start: Signal | None = None
    ) -> tuple[OperandGradients, Traces]:
        if not self._advances_so:
            return super().step_gradient_and_advance(traces, factors, signals, start)
        plan = factors.plan
        credits, before = zip(
            *(
                carry_back(group, factors.D[g], signals.groups[g], factors.one_D(g))
                for g, group in enumerate(plan.groups)
            ),
            strict=True,
        )
        # What reaches the window's start from later came through D: it is on components that recur.
        at_start = before if start is None else jax.tree.map(jnp.add, before, start.groups)
        found, new, waiting = self._around(
            traces, Signal(at_start, factors.operands, plan), factors, recurrent=start is None
        )
        for i, link in enumerate(plan.links):
            credit = credits[link.group]
            at_results = total([times(link.at_operator(credit[a]), factors.df[i][a]) for a in link.moved])
            before_it = waiting.get(i, _Steps([], []))  # the step that waits is one more of the same product
            steps = _Steps([*before_it.inputs, factors.x[i]], [*before_it.results, at_results])
            _add(found, link, _steps_gradient(link, factors.operands[i], steps))
        return found, new

    def _around(
        self, traces: Traces, signal: Signal, factors: WindowFactors, recurrent: bool = False
    ) -> tuple[OperandGradients, Traces, dict[int, _Steps]]:
        """What stored traces say of a signal at the window's start, and the traces after the window.

        Each stored trace is read for the gradient before it is written, while it is, or after, never from a copy. After
        a window of one step the stored trace, which lags by one, is that of the window's start: where a signal is on
        stored components only, it is all that the signal needs.

        Args:
          recurrent: whether the signal is on recurrent components alone.

        Returns:
          gradients, traces, and for some links the step that waits, which the gradients lack.
        """
        plan, steps, twins = signal.plan, factors.sizes[0], self._twins(signal.plan)
        signals = {i: _at_traces(traces, signal, i, twins.get(i)) for i, link in enumerate(plan.links) if link.stored}
        holders = {i: _holder(plan, i, twins.get(i)) for i in signals}
        later = [
            i
            for i, holder in holders.items()
            if steps == 1 and (recurrent or plan.links[i].stored == plan.links[i].reached)
            if not _in_turn(plan, holder, traces, signal.operands[i], steps)
        ]
        new, read = self._advance(traces, factors, {i: of for i, of in signals.items() if i not in later})
        found: OperandGradients = {}
        waiting: dict[int, _Steps] = {}
        made = [_made_once(now, [new[n] for n in self._large(new, plan)]) for now in signal.groups] if later else []
        for i, link in enumerate(plan.links):
            operands = signal.operands[i]
            if i in later:
                now = _held(plan, new, i, dict(enumerate(made[link.group])), twins.get(i))
                apart = len(link.stored) > 1 and factors.sizes[1] > 1  # of one example, reading is a part of adding
                read[i] = _read(holders[i], new, now, operands, apart)
            else:
                step = _waiting_step(traces, signal, i, recurrent)
                waiting[i] = jax.tree.map(partial(unless, factors.anew), step)  # what is forgotten may not be finite
            if link.stored:
                of_link = _to_operands(link, operands, read[i])
                found.update({f"{link.name}.{key}": unless(factors.anew, value) for key, value in of_link.items()})
        return found, new, waiting


def _made_once(signal: tuple[Array, ...], traces: Sequence[Array]) -> tuple[Array, ...]:
    """A signal that is not made again for each row of the traces that are read with it.

    Of one example only: with more, reading takes longer than making it.
    """
    return tuple(made_once(of, traces) for of in signal) if signal[0].shape[0] == 1 else signal


def _link_gradient(traces: Traces, signal: Signal, i: int, twin: Twin | None) -> OperandGradients:
    """What a signal says about the operands of one link."""
    link, operands = signal.plan.links[i], signal.operands[i]
    found: OperandGradients = {}
    if link.stored:
        holder = _holder(signal.plan, i, twin)
        read = _read(holder, traces, _at_traces(traces, signal, i, twin), operands, apart=True)
        _add(found, link, _to_operands(link, operands, read))
    _add(found, link, _steps_gradient(link, operands, _waiting_step(traces, signal, i)))
    return found


def _holder(plan: RulePlan, i: int, twin: Twin | None) -> Link:
    """The link that holds the traces of link ``i``."""
    return plan.links[i if twin is None else twin.holder]


def _held(plan: RulePlan, traces: Traces, i: int, signal: Mapping[int, Array], twin: Twin | None) -> dict[int, Array]:
    """A signal for the components of link ``i``, as it acts on what is stored by the link that holds its traces."""
    holder = _holder(plan, i, twin)
    held = {b: signal[b] for b in holder.stored} if twin is None else twin.at_holder(signal, holder.stored)
    pairs = frames_of(plan)[holder.group]
    return along(pairs, axis_of(traces, holder.group, pairs), held)


def _at_traces(traces: Traces, signal: Signal, i: int, twin: Twin | None) -> dict[int, Array]:
    """A signal one step back, where a link's traces are stored: they are reached through the waiting ``D``."""
    link = signal.plan.links[i]
    group, now = signal.plan.groups[link.group], signal.groups[link.group]
    before = {
        b: total([now[a] * traces[f"group{link.group}.D.{a}.{b}"] for a, c in group.entries if c == b])
        for b in link.stored
    }
    return _held(signal.plan, traces, i, before, twin)


class _Steps(NamedTuple):
    """Steps of a link, in pieces ``(time, batch, ...)``: its operator's inputs, and gradients of its results."""

    inputs: list[Any]
    results: list[Array]


def _waiting_step(traces: Traces, signal: Signal, i: int, recurrent: bool = False) -> _Steps:
    """The step of link ``i`` that waits, with what a signal says of its result through ``df``; none if that is nothing.

    Args:
      recurrent: whether the signal is on recurrent components alone.
    """
    link = signal.plan.links[i]
    group, now = signal.plan.groups[link.group], signal.groups[link.group]
    moved = [a for a in link.moved if a in group.recurrent or not recurrent]
    if not moved:
        return _Steps([], [])
    at_result = total([times(link.at_operator(now[a]), traces[f"{link.name}.df.{a}"]) for a in moved])
    x = None if link.operator.x is None else traces[signal.plan.input_name(link)][None]
    return _Steps([x], [at_result[None]])


def _steps_gradient(link: Link, operands: Sequence[Any], steps: _Steps) -> dict[str, Array]:
    """The gradient of a link's operands from some steps, one product for all of them."""
    if not steps.results:
        return {}
    x = None if link.operator.x is None else concatenated(steps.inputs)
    return operator_gradient(link.operator, operands, x, jnp.concatenate(steps.results))


def _add(found: OperandGradients, link: Link, gradients: Mapping[str, Array]) -> None:
    """Add gradients of a link's operands, by operand, to what was found; the sum has their dtype."""
    for key, value in gradients.items():
        name = f"{link.name}.{key}"
        found[name] = found[name].astype(value.dtype) + value if name in found else value


def _read(
    link: Link,
    traces: Traces,
    signal: Mapping[int, Array],
    operands: Sequence[Any],
    apart: bool,
    but: Collection[str] = (),
) -> dict[str, Array]:
    """Stored traces of a link, except some, contracted with a signal for each stored component.

    ``apart`` keeps the compiler from merging the reading with what follows.
    """
    at_operator = {b: link.at_operator(signal[b]) for b in link.stored}

    def read(rule: TraceRule, trace: Array, signal: Array) -> Array:
        return unless_silent(rule.contract, trace, signal) if apart else rule.contract(trace, signal)

    contracted = {}
    for name, rule in link.traces(operands).rules.items():
        if name in but:
            continue
        if isinstance(rule, EmbeddingTrace) and has_rows(traces, link.name):
            contracted[name] = contract_rows(link.name, rule, traces, at_operator)
        else:
            contracted[name] = total(
                [read(rule, traces[f"{link.name}.{name}.{b}"], at_operator[b]) for b in link.stored]
            )
    return contracted


def _to_operands(link: Link, operands: Sequence[Any], contracted: Mapping[str, Array]) -> dict[str, Array]:
    """Gradients by operand, from those by trace."""
    found = link.traces(operands).to_operands(contracted)
    return {key: value for key, value in found.items() if key in link.operator.operands}


def _in_turn(plan: RulePlan, link: Link, traces: Traces, operands: Sequence[Any], steps: int) -> set[str]:
    """The names of those traces of a link that are best read while they are written, example by example."""
    return {
        name
        for name, rule in link.traces(operands).rules.items()
        if isinstance(rule, EinsumTrace) and rule.x
        if is_worth_turns([traces[f"{link.name}.{name}.{a}"] for a in link.stored], steps, are_interlocked(plan, link))
    }


def _behind(waiting: Array, window: Array) -> Array:
    """A window that lags by one step: what waited first, its own last step left out."""
    return waiting[None] if window.shape[0] == 1 else jnp.concatenate([waiting[None], window[:-1]])


def _roll(
    link: Link,
    factors: WindowFactors,
    i: int,
    traces: Traces,
    x: Any,
    df: Mapping[int, Array],
    carried: Carried,
    signals: Mapping[int, Mapping[int, Array]],
) -> tuple[Traces, dict[int, dict[str, Array]]]:
    """The stored traces of link ``i`` after a window (lagging by one step).

    Also, for signals at the stored components, what those before the window say of each, by name. A window that does
    not count decays nothing and adds nothing: the choice is made on small arrays.
    """
    new: Traces = {}
    operands = factors.operands[i]
    turns = _in_turn(factors.plan, link, traces, operands, factors.sizes[0]) if signals else set()
    read = {k: _read(link, traces, signal, operands, apart=True, but=turns) for k, signal in signals.items()}
    already = [value for of in read.values() for value in of.values()]
    across = {pair: after(already, p) for pair, p in carried.across.items()}
    if factors.fine is not None:
        like = next(iter(across.values()))
        across = {(a, a): jnp.zeros_like(like) for a in link.stored} | dict(across)
        across = {(a, b): _if(factors.fine, p, jnp.full_like(p, a == b)) for (a, b), p in across.items()}
        x = None if x is None else _if(factors.fine, x, jnp.zeros_like(x))
    decays = {(a, b): link.at_operator(p) for a in link.stored for b, p in _row(a, link.stored, across)}
    if len(decays) > 1 and not turns:  # or all that they are made of would be read again with each row of a trace
        stored = [f"{link.name}.{name}.{a}" for name in link.traces(operands).rules for a in link.stored]
        large = [traces[name] for name in stored if name in traces]
        decays = {pair: made_once(decay, large) for pair, decay in decays.items()}
    cotangents = {}
    for a in link.stored:
        to_end = _row(a, link.moved, carried.to_end)
        if moved := [df[c] if q is None else times(link.at_operator(q), df[c]) for c, q in to_end]:
            cotangents[a] = total(moved)
    axis = {a: link.at_operator(of)[None] for a, of in carried.axis.items()}
    cotangents = along(carried.pairs, axis, cotangents)
    cotangents = {a: _if(factors.fine, of, jnp.zeros_like(of)) for a, of in cotangents.items()}
    roll = Roll(link.stored, decays, x, cotangents, factors.anew)
    for name, rule in link.traces(operands).rules.items():
        if isinstance(rule, EmbeddingTrace) and has_rows(traces, link.name):
            new.update(roll_rows(link.name, rule, traces, x, partial(roll.decayed, rule), cotangents, link.stored))
            continue
        old = {a: traces[f"{link.name}.{name}.{a}"] for a in link.stored}
        if name in turns:
            at_operator = [{a: link.at_operator(of[a]) for a in link.stored} for of in signals.values()]
            rolled, found = roll.new_and_read(rule, old, at_operator)
            for k, value in zip(signals, found, strict=True):
                read[k][name] = value
        else:
            rolled = roll.new(rule, old)
        new.update({f"{link.name}.{name}.{a}": trace for a, trace in rolled.items()})
    return new, read


def _if(flag: Any, value: Array, other: Array) -> Array:
    """``value`` if the flag is up or there is none, else the other."""
    return value if flag is None else jnp.where(flag, value, other)


def _row(a: int, columns: Sequence[int], entries: Mapping[Pair, Any]) -> list[tuple[int, Any]]:
    """The entries of row ``a`` in these columns that are not zero by structure."""
    return [(c, entries[a, c]) for c in columns if (a, c) in entries]

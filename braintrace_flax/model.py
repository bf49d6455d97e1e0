"""Model: a compiled step, whatever framework it came from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from braintrace_core import CompilationError, ETraceGraph, compile_step_graph
from braintrace_core.rules import RulePlan

from .adapters import Step, adapt
from .adapters.step import shape_of
from .checks import check_tree, leaf_paths
from .reach import parameters_without_gradient

__all__ = ["Model", "compile", "strong"]

_ONE_BATCH = (
    "compiled for the batch as a whole (no row of it can be reset alone): its examples act on each other, or the step\n"
    "takes no single one. If they are meant to be independent, look for an axis that broadcasts against the batch."
)
# Up to this many numbers, a step is run on random values to see whether the batch couples.
_SMALL_ENOUGH_TO_RUN = 2**26


@dataclass(frozen=True, eq=False)
class Model:
    """One step of a recurrent model, compiled: what :func:`compile` returns.

    Attributes:
      graph: which parameter acts on which hidden state.
      step: the model as pure functions, for one example (for the batch, if ``is_batched``).
      batch_size: the number of examples that run side by side; None for a single stream.
      is_batched: whether the graph holds the whole batch, since its examples are coupled.
      params_shape, carry_shape, inputs_shape, output_shape: pytrees of shapes, without time, with the batch.
      frozen: names of parameters that are not trained.
    """

    graph: ETraceGraph
    step: Step
    batch_size: int | None
    is_batched: bool
    params_shape: Any
    carry_shape: Any
    inputs_shape: tuple[Any, ...]
    output_shape: Any
    frozen: tuple[str, ...] = ()

    def init(self, key: Any) -> Any:
        """Parameters. Those of an NNX or brainstate module are its own, copied."""
        return strong(self.step.init(key))

    def initial_carry(self, key: Any = None) -> Any:
        """The carry before the first step, for the whole batch.

        Args:
          key: for carries that are drawn at random and for dropout; None stands for ``jax.random.key(0)``.
        """
        key = jax.random.key(0) if key is None else key
        if self.batch_size is None or self.is_batched:
            return strong(self.step.initial_carry(key))
        keys = jax.random.split(key, self.batch_size)
        return strong(jax.vmap(self.step.initial_carry)(keys))

    def apply(self, params: Any, carry: Any, *inputs: Any) -> tuple[Any, Any]:
        """One step of the batch: ``(carry, out)``."""
        if self.batch_size is None or self.is_batched:
            return self.step.run(params, carry, *inputs)
        return jax.vmap(lambda c, *x: self.step.run(params, c, *x))(carry, *inputs)

    def report(self) -> str:
        """A table for people: hidden groups, relations, and how each parameter learns; what no trace follows last."""
        names, leaves = leaf_paths(self.carry_shape), jax.tree.leaves(self.carry_shape)
        beside = [
            name
            for name, leaf, is_hidden in zip(names, leaves, jax.tree.leaves(self.step.hidden), strict=True)
            if not is_hidden and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ]
        notes = [_ONE_BATCH] if self.is_batched else []
        if beside:
            notes.append(f"carried along, no hidden state (no gradient goes through): {', '.join(beside)}")
        return "\n".join([self.graph.report(), *notes])

    def draw(self, path: Any = None) -> str:
        """The same as a picture, in SVG; also written to ``path`` if it is given."""
        return self.graph.draw(path)

    @cached_property
    def plan(self) -> RulePlan:
        """The graph as learning rules see it."""
        return RulePlan.of(self.graph, frozen=self.frozen_leaves)

    @cached_property
    def frozen_leaves(self) -> frozenset[int]:
        """Which leaves of the parameters are not trained."""
        return frozenset(_matching(self.frozen, leaf_paths(self.params_shape)))

    @property
    def examples(self) -> int:
        """The number of independent examples that the graph runs side by side."""
        return 1 if self.batch_size is None or self.is_batched else self.batch_size

    # Between the user's trees and the flat leaves that the rules see: ``(examples, ...)``, ``(time, examples, ...)``.

    def param_leaves(self, params: Any) -> list[Any]:
        """The parameters' leaves; an error names those that are not of this model."""
        return check_tree("params", params, self.params_shape)

    def as_params(self, leaves: Sequence[Any], like: Any) -> Any:
        """Leaves in the structure of ``like``."""
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def state_leaves(self, carry: Any) -> list[Any]:
        """The carry's leaves, examples first."""
        leaves = check_tree("carry", carry, self.carry_shape)
        return leaves if self.has_examples else [leaf[None] for leaf in leaves]

    def as_carry(self, leaves: Sequence[Any]) -> Any:
        """The carry from its leaves."""
        leaves = leaves if self.has_examples else [leaf[0] for leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(self.carry_shape), leaves)

    def input_leaves(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The leaves of a window's inputs, time and examples first."""
        leaves = jax.tree.leaves(inputs)
        return leaves if self.has_examples else [leaf[:, None] for leaf in leaves]

    def as_outputs(self, leaves: Sequence[Any]) -> Any:
        """The outputs of a window, ``(time, batch, ...)``, from their leaves."""
        leaves = leaves if self.has_examples else [leaf[:, 0] for leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(self.output_shape), leaves)

    def reset_mask(self, reset: Any) -> Any:
        """Where new sequences start, as the rules see it."""
        return reset if reset is None or self.has_examples else reset[:, None]

    def initial_leaves(self) -> list[Any]:
        """For each leaf of the carry, what a new sequence starts from; None for what goes on."""
        leaves = self.state_leaves(self.initial_carry())
        hidden = jax.tree.leaves(self.step.hidden)
        return [leaf if is_hidden else None for leaf, is_hidden in zip(leaves, hidden, strict=True)]

    @property
    def has_examples(self) -> bool:
        """Whether arrays have an axis of independent examples."""
        return self.batch_size is not None and not self.is_batched

    def __repr__(self) -> str:
        count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.params_shape))
        batch = "a single stream" if self.batch_size is None else f"batch of {self.batch_size}"
        batch += ", as a whole" if self.is_batched else ""
        return f"Model({self.step.names}, {count:,} parameters, {batch})"


def compile(
    model: Any,
    *example_inputs: Any,
    params: Any = None,
    carry: Any = None,
    batch_axis: int | None = 0,
    frozen: str | Sequence[str] = (),
) -> Model:
    """Compile one step of a model for online learning.

    Main arguments:
      model: a Linen, NNX or brainstate module, or a function ``step(params, carry, *inputs) -> (carry, out)``.
      *example_inputs: one time step of a batch; arrays or shapes, their first axis is the batch.

    Other arguments:
      params: the parameters, for a plain function: arrays, shapes, or ``init(key)``. For modules: instead of their own.
      carry: the initial carry, for a plain function and for modules without ``initialize_carry``; of the batch, or of
        one example.
      batch_axis: 0; or None for a single stream, without a batch axis.
      frozen: names of parameters that are not trained, or parts of paths (``"encoder"``); no traces are kept for them.

    Returns:
      The compiled model. ``print(model.report())`` shows what it found. Whether a batch's examples act on each other
      (a mean over the batch) is seen by running a step on random numbers; models of more than 64 million of them are
      taken for such that do not, unless their shapes say otherwise.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> model = compile(nn.GRUCell(8), jnp.zeros((2, 3)))
    >>> model
    Model(Linen module GRUCell, 296 parameters, batch of 2)
    >>> params, carry = model.init(jax.random.key(0)), model.initial_carry()
    >>> carry, out = model.apply(params, carry, jnp.ones((2, 3)))
    >>> out.shape
    (2, 8)
    """
    if isinstance(model, Model):
        raise TypeError("This model is compiled already: pass it on as it is.")
    if not example_inputs:
        raise ValueError(
            "`compile` needs example inputs of one time step: `compile(model, jnp.zeros((batch, features)))`."
        )
    if batch_axis not in (0, None):
        raise ValueError(f"`batch_axis` is 0, or None for a single stream; got {batch_axis!r}.")
    frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
    inputs = jax.tree.map(shape_of, tuple(example_inputs))
    if batch_axis is None:
        step = adapt(model, inputs, params, carry)
        return _finish(step, inputs, None, False, frozen, step.shapes(*inputs))
    batch_size = _batch_size(inputs)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), inputs)
    one_carry, batch_carry = _both_carries(model, one, params, carry, batch_size)
    per_example, error = _try(model, one, params, one_carry)
    whole, _ = _try(model, inputs, params, batch_carry)
    if whole is not None and not _keeps_its_shapes(whole, inputs):
        whole = None  # states of one example were broadcast against the batch
    if per_example is not None and (whole is None or _agree(per_example, whole, one, inputs, batch_size)):
        if carry is not None and batch_carry is carry:
            per_example = _with_carry(per_example, carry)
        return _finish(per_example, one, batch_size, False, frozen, per_example.shapes(*one))
    if whole is None:
        assert error is not None
        raise error
    return _finish(whole, inputs, batch_size, True, frozen, whole.shapes(*inputs))


def _finish(
    step: Step, inputs: Any, batch_size: int | None, is_batched: bool, frozen: Sequence[str], shapes: Any
) -> Model:
    params, carry, _, out = shapes
    graph = compile_step_graph(step.run, params, carry, *inputs, hidden=step.hidden)
    names = leaf_paths(params)
    not_trained = _matching(frozen, names)
    unused = [name for name in frozen if not _matching([name], names)]
    if unused:
        raise ValueError(f"`frozen` names no parameter: {', '.join(unused)}. There are {', '.join(names)}.")
    lost = [names[i] for i in parameters_without_gradient(graph) if i not in not_trained]
    if lost:
        raise CompilationError(
            f"No gradient can ever reach {', '.join(lost)}: the step's outputs do not depend on it, or only through "
            f"what has no derivative (`stop_gradient`, rounding). Use it, or say that it is meant: "
            f"`compile(..., frozen={lost!r})`."
        )
    several = batch_size is not None and not is_batched

    def widen(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype) if several else leaf, tree
        )

    return Model(graph, step, batch_size, is_batched, params, widen(carry), widen(inputs), widen(out), tuple(frozen))


def _batch_size(inputs: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    for keys, leaf in leaves:
        if not leaf.shape:
            raise ValueError(
                f"Example input {jax.tree_util.keystr(keys)} is a scalar: its first axis must be the batch. For a "
                "single stream without a batch pass `batch_axis=None`."
            )
    sizes = {leaf.shape[0] for _, leaf in leaves}
    if len(sizes) != 1:
        raise ValueError(
            f"The example inputs have first axes of sizes {sorted(sizes)}: the first axis of each must be the batch."
        )
    return sizes.pop()


def _both_carries(model: Any, one: Any, params: Any, carry: Any, batch_size: int) -> tuple[Any, Any]:
    """A given carry for one example and for the batch, whichever it was given for."""
    if carry is None:
        return None, None
    shapes = [shape_of(leaf).shape for leaf in jax.tree.leaves(carry)]
    if shapes and all(shape[:1] == (batch_size,) for shape in shapes):
        first = jax.tree.map(_index, carry)
        # As many units as examples: the step itself tells which of the two it is.
        as_batch, as_one = (_try(model, one, params, each)[0] for each in (first, carry))
        fits = [step is not None and _keeps_its_shapes(step, one) for step in (as_batch, as_one)]
        if fits != [False, True]:
            return first, carry
    return carry, jax.tree.map(lambda leaf: _repeat(leaf, batch_size), carry)


def _index(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf[0]


def _repeat(leaf: Any, count: int) -> Any:
    shape = shape_of(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((count, *shape.shape), shape.dtype)
    return jnp.broadcast_to(jnp.asarray(leaf), (count, *shape.shape))


def _with_carry(step: Step, carry: Any) -> Step:
    """The same with an initial carry that may differ between examples."""
    values = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else a, carry)
    if all(bool((leaf == leaf[:1]).all()) for leaf in map(jnp.asarray, jax.tree.leaves(values))):
        return step
    raise ValueError(
        "The examples' initial carries differ from one another. Give the carry of one example to `compile`, and start "
        "from your own by setting it in the train state."
    )


def _try(model: Any, inputs: Any, params: Any, carry: Any) -> tuple[Step | None, Exception | None]:
    """The step for inputs like these, or the error that it raises."""
    try:
        step = adapt(model, inputs, params, carry)
        step.shapes(*inputs)
    except Exception as error:  # whatever a model raises: if no form of it runs, this is shown
        return None, error
    return step, None


def _keeps_its_shapes(step: Step, inputs: Any) -> bool:
    _, before, after, _ = step.shapes(*inputs)
    return [shape for shape, _ in _shapes(before)] == [shape for shape, _ in _shapes(after)]


def _agree(one: Step, whole: Step, one_inputs: Any, inputs: Any, batch_size: int) -> bool:
    """Whether the step of a batch is that of each example."""
    params, carry, _, _ = one.shapes(*one_inputs)
    each = jax.eval_shape(
        lambda p, c, *x: jax.vmap(lambda c, *x: one.run(p, c, *x))(c, *x),
        params,
        jax.tree.map(lambda a: jax.ShapeDtypeStruct((batch_size, *a.shape), a.dtype), carry),
        *inputs,
    )
    whole_params, whole_carry, *together = whole.shapes(*inputs)
    if _shapes(params) != _shapes(whole_params) or _shapes(each[1]) != _shapes(together[1]):
        return False
    hidden = [jax.tree.leaves(step.hidden) for step in (one, whole)]
    for mine, theirs, is_hidden in zip(_shapes(each[0]), _shapes(together[0]), hidden[1], strict=False):
        is_random = one.random and not is_hidden and not jnp.issubdtype(theirs[1], jnp.inexact)
        if mine != theirs and not is_random:  # keys and their counts: one for each example, or one for the batch
            return False
    if len(_shapes(each[0])) != len(_shapes(together[0])):
        return False
    sizes = sum(int(np.prod(shape)) for shape, _ in (*_shapes(whole_params), *_shapes(whole_carry)))
    if sizes > _SMALL_ENOUGH_TO_RUN:
        return True
    with jax.ensure_compile_time_eval():  # `compile` may be called while something else is traced
        return _agree_on_numbers(one, whole, *_random_values(whole, whole_params, inputs))


def _shapes(tree: Any) -> list[tuple[Any, Any]]:
    return [(tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree)]


def _random_values(whole: Step, params: Any, inputs: Any) -> tuple[Any, Any, Any]:
    """Parameters, a carry and inputs, drawn; keys and counts are those that the model starts from."""
    draws = np.random.default_rng(0).normal(size=65_537)  # repeated: to draw millions would take seconds

    def random(leaf: Any, fan_in: int = 1) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        return jnp.asarray(np.resize(min(0.5, fan_in**-0.5) * draws, leaf.shape)).astype(leaf.dtype)

    params = jax.tree.map(lambda leaf: random(leaf, max(1, int(np.prod(leaf.shape[:-1])))), params)
    carry = jax.jit(whole.initial_carry)(jax.random.key(0))
    inputs = jax.tree.map(lambda leaf: abs(random(leaf)), inputs)  # some models take logarithms
    return params, jax.tree.map(random, carry), inputs


def _agree_on_numbers(one: Step, whole: Step, params: Any, carry: Any, inputs: Any) -> bool:
    """Whether the first example leaves the others alone, and each example for itself comes to the same."""

    def other(leaf: Any) -> Any:
        return leaf.at[0].set(0.9 - leaf[0]) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    run = jax.jit(whole.run)
    together = _inexact(run(params, carry, *inputs))
    changed = _inexact(run(params, *jax.tree.map(other, (carry, *inputs))))
    if not all(_close(a[1:], b[1:], 8 * _precision(a)) for a, b in zip(changed, together, strict=True)):
        return False
    if one.random:  # each example would draw for itself
        return True
    each = _inexact(jax.jit(jax.vmap(one.run, in_axes=(None, 0, *([0] * len(inputs)))))(params, carry, *inputs))
    return all(_close(a, b, 20 * _precision(a) ** 0.5) for a, b in zip(each, together, strict=True))


def _precision(array: Any) -> float:
    return float(jnp.finfo(array.dtype).eps)


def _inexact(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _close(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two arrays are the same up to rounding; what is no number in both (a logarithm) tells nothing."""
    scale = float(jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0.0), initial=1e-6))
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b)) | (jnp.abs(a - b) <= tolerance * scale)
    return bool(same.all())


def strong(tree: Any) -> Any:
    """The same without weak types, which would make everything compile twice."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if _is_weak(leaf) else leaf, tree)


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(jax.typeof(leaf), "weak_type", False))


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[int]:
    """Indices of the names that one of the patterns is, or is some whole parts of."""
    return [
        i
        for i, name in enumerate(names)
        if any(re.search(rf"(^|/){re.escape(pattern.strip('/'))}(/|$)", name) for pattern in patterns)
    ]

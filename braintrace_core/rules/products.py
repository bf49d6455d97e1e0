"""Products inside the loop over time, as small as they can be.

- ``concatenate([x, h]) @ w`` is ``x @ w[:n] + h @ w[n:]``, and the first product needs no state: it is made for all
  steps of a window at once, and for all products that see the same input as one. The loop is left with the second,
  forward and on the way back. A product that alone sees its input stays whole where cutting its weight in two takes
  longer than it spares: where there is no way back and only a few steps, and where all cores would share the whole,
  and what is left is for one.
- On the way back errors meet the weights transposed, which are laid out so once a window, not at each of its steps.
- More than two narrow products of one input are one where that is wide enough for all cores, which each alone is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from .._compat import JaxprEqn, Var
from ..compiler.schedule import Operator, Part
from ..ops import etp_mm_p, etp_mv_p
from ..ops.bias import add_bias
from ..ops.in_place import on_one_device

__all__ = ["LoopProduct", "known_shares", "loop_products", "results_in_loop"]


@dataclass(frozen=True, eq=False)
class LoopProduct:
    """A product with parameters inside the loop over time.

    Attributes:
      operator: the operator.
      known: the pieces of its input that need no state, if there are others beside them.
      ahead, left: the places of those pieces in its input, and of the others.
    """

    operator: Operator
    known: tuple[Var, ...] = ()
    ahead: tuple[slice, ...] = ()
    left: tuple[slice, ...] = (slice(None),)

    def known_rows(self, operands: Sequence[Any]) -> Array:
        """The rows of its weight that known pieces meet."""
        return _joined([operands[1][place] for place in self.ahead], 0)

    def share(self, rows: Array, windowed: Mapping[Var, Any]) -> Array:
        """The product of the known pieces of every step with these rows, ``(time, batch, ...)``."""
        eqn = self.operator.eqn

        def one(pieces: list[Any]) -> Any:
            return eqn.primitive.bind(_joined(pieces, -1), rows, **{**eqn.params, "has_bias": False})

        return jax.vmap(jax.vmap(one))([windowed[v] for v in self.known])

    def left_operands(self, operands: Sequence[Any]) -> list[Any]:
        """The rows of its weight that are left to the loop; and its bias, unless known pieces have had it."""
        _, weight, *bias = operands
        return [_joined([weight[place] for place in self.left], 0), *([] if self.known else bias)]

    def left_input(self, x: Any) -> Any:
        """The pieces of its input that are left to the loop."""
        return _joined([x[..., place] for place in self.left], -1)

    def in_the_loop(self, left: Sequence[Any], steps: int = 1) -> Callable[[Any], Array]:
        """What is left of its result, from what is left of its input, for a loop of so many steps.

        Args:
          left: from :meth:`left_operands`; or those of several products of the same input, side by side.
          steps: how many.
        """
        eqn, (rows, *bias) = self.operator.eqn, left
        params = {**eqn.params, "has_bias": bool(bias)}
        product: Callable[..., Array] = partial(eqn.primitive.bind, **params)
        if steps >= _STEPS_WORTH_A_COPY:
            product = _with_way_back(product, rows, params["precision"], params["preferred_element_type"])
        return lambda x: product(x, rows, *bias)


def results_in_loop(
    products: Mapping[int, LoopProduct], operands: Mapping[int, Sequence[Any]], sizes: tuple[int, int]
) -> dict[int, Callable[[Any], dict[int, Array]]]:
    """For each product, what makes its result in the loop, and those of the other products of its input, of the input.

    Args:
      products: by operator.
      operands: of these operators.
      sizes: how many steps the loop has, and examples.
    """
    steps, batch = sizes
    left = {i: product.left_operands(operands[i]) for i, product in products.items()}
    alike: dict[Any, list[int]] = {}
    for i, product in products.items():
        eqn, (rows, *bias) = product.operator.eqn, left[i]
        kinds = {**eqn.params, "has_bias": bool(bias)}
        alike.setdefault((product.operator.x, eqn.primitive, *kinds.items(), rows.dtype), []).append(i)
    found: dict[int, Callable[[Any], dict[int, Array]]] = {}
    for members in alike.values():
        together = _is_worth_joining([left[i][0].size for i in members], batch)
        groups = [
            _joined_results(products[some[0]], {i: left[i] for i in some}, steps)
            for some in ([members] if together else [[i] for i in members])
        ]
        found.update(dict.fromkeys(members, partial(_results, products[members[0]], groups)))
    return found


def _results(product: LoopProduct, groups: Sequence[Callable[[Any], dict[int, Array]]], x: Any) -> dict[int, Array]:
    """The results of products of one input, any of which is ``product``; errors meet before they go back to it."""
    left = product.left_input(x)
    return {i: result for results in groups for i, result in results(left).items()}


def _joined_results(
    product: LoopProduct, left: Mapping[int, Sequence[Any]], steps: int
) -> Callable[[Any], dict[int, Array]]:
    """The results of products of one input, made as one, of what is left of it; ``product`` is any of them."""
    run = product.in_the_loop([_joined(of, -1) for of in zip(*left.values(), strict=True)], steps)
    ends = np.cumsum([rows.shape[-1] for rows, *_ in left.values()])

    def results(left_input: Any) -> dict[int, Array]:
        return dict(zip(left, jnp.split(run(left_input), ends[:-1], axis=-1), strict=True))

    return results


def _is_worth_joining(sizes: Sequence[int], batch: int) -> bool:
    """Whether products of a batch with weights of these sizes are each for one core, and together worth several.

    Two need not be joined for that: each has a core, and the errors that go back need not be written side by side.
    """
    are_for_one_core = all(size <= _MOST_ON_ONE_CORE for size in sizes)
    return len(sizes) > 2 and are_for_one_core and _is_for_several_cores(sum(sizes), batch)


def _is_for_several_cores(size: int, batch: int) -> bool:
    """Whether the product of a batch with a weight of this size is divided among cores, and worth it."""
    return size > _MOST_ON_ONE_CORE and batch * size >= _WORTH_SEVERAL_CORES


def known_shares(
    products: Mapping[int, LoopProduct], operands: Mapping[int, Sequence[Any]], windowed: Mapping[Var, Any]
) -> dict[int, Array]:
    """What products make of the known pieces of their inputs, ``(time, batch, ...)``, bias included.

    Of the same pieces they are one product: several narrow ones take longer.

    Args:
      products: by operator.
      operands: of these operators.
      windowed: values of every step.
    """
    alike: dict[Any, list[int]] = {}
    for i, product in products.items():
        if product.known:
            eqn, weight = product.operator.eqn, operands[i][1]
            kinds = {**eqn.params, "has_bias": False}
            alike.setdefault((product.known, eqn.primitive, *kinds.items(), weight.dtype), []).append(i)
    found: dict[int, Array] = {}
    for members in alike.values():
        rows = [products[i].known_rows(operands[i]) for i in members]
        shares = products[members[0]].share(_joined(rows, -1), windowed)
        ends = np.cumsum([of.shape[-1] for of in rows])
        for i, share in zip(members, jnp.split(shares, ends[:-1], axis=-1), strict=True):
            bias = operands[i][2] if len(operands[i]) > 2 else None
            found[i] = add_bias(share, bias, (share.ndim - 1,))
    return found


def loop_products(
    operators: Sequence[Operator],
    part: Part,
    known: Collection[Var],
    sizes: tuple[int, int],
    goes_back: bool = True,
) -> dict[int, LoopProduct]:
    """The products in a part that is run step by step, by operator, where ``known`` variables need no state of it.

    None on several devices: a weight's rows may be divided among them.

    Args:
      operators, part: those of a step, and the part.
      known: what need not be asked of the loop.
      sizes: how many steps the loop has, and examples.
      goes_back: whether errors pass through the loop.
    """
    if sizes[0] == 1 or not on_one_device():
        return {}
    makers = {v: eqn for eqn in part.eqns for v in eqn.outvars}
    found = {i: of for i, of in enumerate(operators) if of.y in makers and _is_product(of)}
    products = {i: _split(of, makers.get(of.x), known) for i, of in found.items()}
    seen = Counter(product.known for product in products.values())
    for i, product in products.items():
        if seen[product.known] == 1 and not _is_worth_cutting(product, sizes, goes_back):
            products[i] = LoopProduct(product.operator)
    return products


def _is_worth_cutting(product: LoopProduct, sizes: tuple[int, int], goes_back: bool) -> bool:
    """Whether a product is better made in two that no other one shares known pieces with.

    Not for a few steps that no errors go back through; nor if all cores would share the whole, and what is left to the
    loop is for one.
    """
    if not goes_back and sizes[0] <= _STEPS_WORTH_NO_CUT and math.prod(sizes) <= _ROWS_WORTH_NO_CUT:
        return False
    rows, columns = product.operator.eqn.invars[1].aval.shape
    left = sum(len(range(rows)[place]) for place in product.left)
    return _is_for_several_cores(left * columns, sizes[1]) or not _is_for_several_cores(rows * columns, sizes[1])


def _is_product(operator: Operator) -> bool:
    """Whether the operator is a product of its input with parameters."""
    eqn = operator.eqn
    is_plain = eqn.primitive in (etp_mv_p, etp_mm_p) and not eqn.params.get("vmapped")
    return is_plain and operator.x is not None and len(operator.operands) == len(eqn.invars) - 1


def _split(operator: Operator, joining: JaxprEqn | None, known: Collection[Var]) -> LoopProduct:
    """The product in two, if ``joining`` put known pieces of its input and others side by side.

    Not in short types, where a sum of two results is not as good as one.
    """
    if (
        joining is None
        or joining.primitive is not lax.concatenate_p
        or joining.params["dimension"] != operator.x.aval.ndim - 1
        or operator.y.aval.dtype.itemsize < 4
    ):
        return LoopProduct(operator)
    ends = np.cumsum([piece.aval.shape[-1] for piece in joining.invars]).tolist()
    places = list(zip(joining.invars, map(slice, [0, *ends], ends), strict=True))
    ahead = [(v, place) for v, place in places if isinstance(v, Var) and v in known]
    left = [place for v, place in places if not (isinstance(v, Var) and v in known)]
    if not ahead or not left:
        return LoopProduct(operator)
    return LoopProduct(operator, tuple(v for v, _ in ahead), tuple(place for _, place in ahead), tuple(left))


def _with_way_back(
    product: Callable[..., Array], weight: Array, precision: Any, preferred_element_type: Any
) -> Callable[..., Array]:
    """``product(x, weight, ...)``, whose errors go back to ``x`` through a transposed copy of the weight."""
    transposed = lax.platform_dependent(
        weight, cpu=lambda weight: lax.optimization_barrier(weight.T), default=lambda weight: weight.T
    )

    @jax.custom_jvp
    def by_copy(transposed: Array, x: Array, *operands: Array) -> Array:
        return product(x, *operands)

    def jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (transposed, x, *_), (_, moved, *others) = primals, tangents
        if all(isinstance(tangent, SymbolicZero) for tangent in others):
            contract = (((x.ndim - 1,), (1,)), ((), ()))
            kinds = {"precision": precision, "preferred_element_type": preferred_element_type}
            return product(*primals[1:]), lax.dot_general(moved, transposed, contract, **kinds)
        moves = [
            jnp.zeros_like(primal) if isinstance(tangent, SymbolicZero) else tangent
            for primal, tangent in zip(primals[1:], tangents[1:], strict=True)
        ]
        return jax.jvp(product, tuple(primals[1:]), tuple(moves))

    by_copy.defjvp(jvp, symbolic_zeros=True)
    return partial(by_copy, transposed)


def _joined(pieces: Sequence[Any], axis: int) -> Any:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis)


_MOST_ON_ONE_CORE = 1 << 16  # numbers of a weight; larger ones XLA's CPU products divide among cores
_WORTH_SEVERAL_CORES = 1 << 22  # multiplications; of fewer, waking the other cores takes longer than it spares
_STEPS_WORTH_A_COPY = 4  # for fewer, laying out a copy takes longer than it spares
_STEPS_WORTH_NO_CUT, _ROWS_WORTH_NO_CUT = 8, 128  # as many steps, and examples of all: cutting a weight takes longer

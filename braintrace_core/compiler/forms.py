"""Forms: which of the values that some equations make are equal, or equal but for a constant factor.

The form of a value is a number times something that is not looked into, or a number alone. Two values with the same
form are the same whatever goes into the equations. The other way round does not hold: what cannot be seen to be equal
gets another form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._compat import JaxprEqn, Literal, Var, is_traced, open_jaxpr
from ..ops.dtypes import common_dtype

__all__ = ["ZERO", "Form", "comparable_params", "forms_of", "scaled"]


class Form(NamedTuple):
    """``number * value``.

    Attributes:
      number: the same for all elements.
      value: what stands for the rest; None for one.
    """

    number: complex
    value: int | None = None


ZERO = Form(0)


def scaled(form: Form, number: complex) -> Form:
    """The form of a number times a value."""
    return Form(form.number * number, form.value) if form.number * number else ZERO


def forms_of(jaxpr: Any) -> list[Form]:
    """The form of each result of a jaxpr."""
    return _Forms().of(jaxpr)


class _Forms:
    """Forms while equations are read; what is not looked into is numbered in the order in which it is met."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.forms: dict[Var, Form] = {}

    def of(self, jaxpr: Any) -> list[Form]:
        jaxpr, consts = open_jaxpr(jaxpr)
        for v in jaxpr.invars:
            self.forms[v] = self.new(v)
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            self.forms[v] = self.constant(value)
        for eqn in jaxpr.eqns:
            for k, v in enumerate(eqn.outvars):
                self.forms[v] = self.result(eqn, k)
        return [self.read(v) for v in jaxpr.outvars]

    def read(self, atom: Any) -> Form:
        return self.constant(atom.val) if isinstance(atom, Literal) else self.forms[atom]

    def constant(self, value: Any) -> Form:
        """The form of a known value: a number if all its elements are."""
        is_number = not is_traced(value) and getattr(value, "dtype", np.dtype(float)).kind in "fciu"
        numbers = np.unique(np.asarray(value)) if is_number else np.empty(0)
        return Form(complex(numbers[0])) if len(numbers) == 1 else self.new(id(value))

    def new(self, key: Any, number: complex = 1) -> Form:
        return Form(number, self.numbers.setdefault(key, len(self.numbers)))

    def result(self, eqn: JaxprEqn, k: int) -> Form:
        """The form of the ``k``-th result of an equation."""
        name, operands = eqn.primitive.name, [self.read(v) for v in eqn.invars]
        if name == "neg":
            return scaled(operands[0], -1)
        if name == "mul":
            return self.product(*operands)
        if name in ("add", "add_any"):
            return self.sum(*operands)
        if name == "sub":
            return self.sum(operands[0], scaled(operands[1], -1))
        if name in ("real", "imag"):
            return self.part(name, operands[0])
        if name in _MOVES and (moved := self.moved(eqn, operands[0])):
            return moved
        return self.new((name, k, comparable_params(eqn), *operands))

    def moved(self, eqn: JaxprEqn, form: Form) -> Form | None:
        """The form of a value that was moved or cast; None if it is not seen in it."""
        before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        if before != after and (form.number not in _UNITS or common_dtype(before, after) != after):
            return None
        if form.value is None:
            return form
        return self.new((eqn.primitive.name, comparable_params(eqn), form.value), form.number)

    def product(self, a: Form, b: Form) -> Form:
        number = a.number * b.number
        if not number:
            return ZERO
        if a.value is None or b.value is None:
            return Form(number, b.value if a.value is None else a.value)
        return self.new(("mul", *sorted((a.value, b.value))), number)

    def sum(self, a: Form, b: Form) -> Form:
        if ZERO in (a, b):
            return b if a == ZERO else a
        if a.value == b.value:
            return scaled(Form(1, a.value), a.number + b.number)
        a, b = sorted((a, b), key=lambda form: -1 if form.value is None else form.value)
        return self.new(("add", a.value, b.value, b.number / a.number), a.number)

    def part(self, name: str, form: Form) -> Form:
        """The real or imaginary part, where the number is real or imaginary."""
        number = form.number
        if form.value is None:
            return scaled(Form(1), number.real if name == "real" else number.imag)
        if number.imag == 0:
            return self.new((name, form.value), number.real)
        if number.real == 0:  # i (a + bi) = -b + ai
            other, sign = ("imag", -1) if name == "real" else ("real", 1)
            return self.new((other, form.value), sign * number.imag)
        return self.new((name, form))


_MOVES = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"})
_UNITS = (0, 1, -1, 1j, -1j)  # numbers that no cast changes


def comparable_params(eqn: JaxprEqn) -> Any:
    """An equation's parameters, to be compared with another's; something of its own where that does not do."""
    params = tuple(sorted(eqn.params.items()))
    try:
        hash(params)
    except TypeError:
        return id(eqn)
    return id(eqn) if eqn.effects else params

"""Lift: ordinary operations on parameters become operators, so that unmodified models can be trained.

Where a value made of parameters alone meets data, the equation is replaced by the operator that means the same:
``dot_general`` by ``matmul`` or ``einsum``, ``conv_general_dilated`` by ``conv``, a gather of rows by ``embedding``. A
bias that is added to the result right away joins the operator. Any other meeting (bias, scale, decay) marks the
parameter's side with ``element_wise`` and leaves the equation as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, bind_equation, open_jaxpr
from ..ops import etp_conv_p, etp_einsum_p, etp_elemwise_p, etp_embedding_p, etp_mm_p, etp_mv_p, is_etp
from .control_flow import CONTROL_FLOW
from .dependence import ParameterDependence
from .diagnostics import DiagnosticKind, Path, Recorder, spell
from .primitive_kinds import ELEMENTWISE

__all__ = ["lift_operators"]

_ADDITIONS = frozenset({"add", "add_any"})
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def lift_operators(
    closed: ClosedJaxpr, parameters: Mapping[int, Path], hidden_outputs: Collection[int], recorder: Recorder
) -> ClosedJaxpr:
    """``closed`` with ordinary operations on parameters replaced by operators.

    Args:
      closed: a flat jaxpr (calls inlined).
      parameters: index of each input that is a parameter -> its path.
      hidden_outputs: indices of the outputs that are hidden states: one made of parameters alone is marked too.
      recorder: told of every lifted operator.
    """
    jaxpr, consts = open_jaxpr(closed)
    paths = {jaxpr.invars[i]: path for i, path in parameters.items()}
    lifter = _Lifter(jaxpr, ParameterDependence(jaxpr, paths), paths, hidden_outputs, recorder)
    if not lifter.has_work():
        return closed
    return jax.make_jaxpr(lambda *args: lifter.run(consts, args))(*(v.aval for v in jaxpr.invars))


class _Lifter:
    def __init__(
        self,
        jaxpr: Any,
        depends: ParameterDependence,
        paths: dict[Var, Path],
        hidden_outputs: Collection[int],
        recorder: Recorder,
    ):
        self.jaxpr = jaxpr
        self.depends = depends
        self.paths = paths
        self.hidden_outputs = hidden_outputs
        self.recorder = recorder
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.order = {v: i for i, v in enumerate(jaxpr.invars)}
        self.bias_of = self.find_biases()

    def has_work(self) -> bool:
        """Whether anything is left to lift: a model written with operators throughout is as it should be."""
        return any(self.is_trainable(self.jaxpr.outvars[i]) for i in self.hidden_outputs) or any(
            self.operator_for(eqn) is not None or self.is_frontier(eqn) for eqn in self.jaxpr.eqns
        )

    def run(self, consts: Any, args: Any) -> list[Any]:
        self.env: dict[Var, Any] = dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), (*consts, *args), strict=True))
        self.marked: dict[tuple[Var, tuple[int, ...]], Any] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.outvars and eqn.outvars[0] in self.bias_of:
                continue  # computed together with its bias, where the bias is added
            self.env.update(zip(eqn.outvars, self.equation(eqn), strict=True))
        return [
            self.mark(v, v.aval.shape, "assignment") if i in self.hidden_outputs else self.read(v)
            for i, v in enumerate(self.jaxpr.outvars)
        ]

    def read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self.env[atom]

    def equation(self, eqn: JaxprEqn) -> list[Any]:
        for operand in eqn.invars:
            if isinstance(operand, Var) and operand in self.bias_of:
                return [self.operator(self.producer[operand], bias=self.bias_of[operand])]
        if self.operator_for(eqn) is not None:
            return [self.operator(eqn, bias=None)]
        if self.is_frontier(eqn):
            return bind_equation(eqn, [self.mark(v, _acting_shape(v, eqn), eqn.primitive.name) for v in eqn.invars])
        return bind_equation(eqn, [self.read(v) for v in eqn.invars])

    def is_frontier(self, eqn: JaxprEqn) -> bool:
        """Whether parameters meet data here and nothing has marked them yet."""
        if is_etp(eqn.primitive) or eqn.primitive.name in CONTROL_FLOW:
            return False
        return any(map(self.depends.is_data, eqn.invars)) and any(map(self.is_trainable, eqn.invars))

    def is_trainable(self, atom: Any) -> bool:
        return self.depends.is_parameter(atom) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)

    def operator_for(self, eqn: JaxprEqn) -> Primitive | None:
        """The mixing operator that this equation stands for, if it is one."""
        name = eqn.primitive.name
        if name == "dot_general":
            x, weight = _operands(eqn, self.is_trainable)
            if weight is not None and self.depends.is_data(x):
                return _dot_operator(eqn, x)
        elif name == "conv_general_dilated":
            x, kernel = eqn.invars
            if self.is_trainable(kernel) and self.depends.is_data(x):
                return etp_conv_p
        elif (name == "gather" and _takes_rows(eqn)) or (name == "dynamic_slice" and _takes_one_row(eqn)):
            weight, index, *_ = eqn.invars
            if self.is_trainable(weight) and self.depends.is_data(index):
                return etp_embedding_p
        return None

    def operator(self, eqn: JaxprEqn, bias: Var | None) -> Any:
        """Bind the operator that ``eqn`` stands for, with its bias if there is one."""
        primitive = self.operator_for(eqn)
        assert primitive is not None
        behind = [*eqn.invars, *([] if bias is None else [bias])]
        self.record(primitive, eqn.primitive.name, behind)
        extra = [] if bias is None else [self.env[bias]]
        if primitive is etp_conv_p:
            x, kernel = map(self.read, eqn.invars)
            params = {k: v for k, v in eqn.params.items() if k in _CONV_PARAMS}
            return primitive.bind(x, kernel, *extra, has_bias=bias is not None, batched=True, **params)
        if primitive is etp_embedding_p:
            weight, index, *_ = map(self.read, eqn.invars)
            if eqn.primitive.name == "dynamic_slice":
                return primitive.bind(lax.expand_dims(index, (0,)), weight, mode="clip")
            return primitive.bind(lax.squeeze(index, (index.ndim - 1,)), weight, mode=_take_mode(eqn))
        lhs, rhs = map(self.read, eqn.invars)
        return _bind_dot(primitive, eqn, lhs, rhs, extra, weight_last=self.is_trainable(eqn.invars[1]))

    def mark(self, atom: Any, shape: tuple[int, ...], was: str) -> Any:
        """The value of ``atom``; if it is made of parameters, marked, and in the ``shape`` in which it acts."""
        if not self.is_trainable(atom):
            return self.read(atom)
        if (atom, shape) not in self.marked:
            self.record(etp_elemwise_p, was, [atom])
            value = self.env[atom]
            if shape != value.shape:
                dims = tuple(range(len(shape) - value.ndim, len(shape)))
                value = lax.broadcast_in_dim(value, shape, dims)
            self.marked[atom, shape] = etp_elemwise_p.bind(value)
        return self.marked[atom, shape]

    def record(self, primitive: Primitive, was: str, behind: list[Any]) -> None:
        weights = [
            self.paths[v] for atom in behind for v in sorted(self.depends.parameters(atom), key=self.order.__getitem__)
        ]
        self.recorder.info(
            DiagnosticKind.OPERATOR_LIFTED,
            f"`{was}` with {', '.join(repr(spell(p)) for p in dict.fromkeys(weights))} became `{primitive.name}`.",
            primitive=primitive,
            weight_path=weights[0],
            weight_paths=tuple(dict.fromkeys(weights)),
        )

    def find_biases(self) -> dict[Var, Var]:
        """Result of an operator -> the bias that is added to it and to nothing else."""
        uses = Counter(v for eqn in self.jaxpr.eqns for v in eqn.invars if isinstance(v, Var))
        uses.update(v for v in self.jaxpr.outvars if isinstance(v, Var))
        found: dict[Var, Var] = {}
        for eqn in self.jaxpr.eqns:
            if eqn.primitive.name not in _ADDITIONS:
                continue
            y, bias = _operands(eqn, self.is_trainable)
            source = self.producer.get(y) if isinstance(y, Var) else None
            if bias is None or source is None or uses[y] != 1 or eqn.outvars[0].aval.shape != y.aval.shape:
                continue
            operator = self.operator_for(source)
            if operator in (etp_mm_p, etp_mv_p, etp_conv_p):
                axis = source.params["dimension_numbers"].out_spec[1] if operator is etp_conv_p else y.aval.ndim - 1
                vector = self.as_vector(bias, y.aval.shape, axis)
                if vector is not None:
                    found[y] = vector
        return found

    def as_vector(self, atom: Var, shape: tuple[int, ...], axis: int) -> Var | None:
        """The vector along ``axis`` of which ``atom`` is a broadcast to ``shape``, if it is one."""
        if tuple(atom.aval.shape) == tuple(shape) == (shape[axis],):
            return atom
        wanted = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        eqn = self.producer.get(atom)
        if eqn is None or not isinstance(eqn.invars[0], Var):
            return None
        (operand, *_), name = eqn.invars, eqn.primitive.name
        is_vector = operand.aval.shape == (shape[axis],)
        if name == "broadcast_in_dim" and is_vector and eqn.params["broadcast_dimensions"] == (axis,):
            return operand
        if name == "reshape" and is_vector and atom.aval.shape == wanted:
            return operand
        if name == "broadcast_in_dim" and operand.aval.shape == wanted:
            return self.as_vector(operand, shape, axis)
        return None


_CONV_PARAMS = frozenset(
    {
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "dimension_numbers",
        "feature_group_count",
        "batch_group_count",
        "precision",
        "preferred_element_type",
    }
)


def _operands(eqn: JaxprEqn, is_trainable: Any) -> tuple[Any, Any]:
    """The two operands of an equation as (other, trainable); (None, None) unless exactly one is trainable."""
    a, b = eqn.invars
    if is_trainable(a) == is_trainable(b):
        return None, None
    return (b, a) if is_trainable(a) else (a, b)


def _dot_operator(eqn: JaxprEqn, x: Any) -> Primitive:
    """``matmul`` if the product contracts the last axis of ``x`` with one axis of a matrix; ``einsum`` otherwise."""
    (lhs_contract, rhs_contract), (lhs_batch, _) = eqn.params["dimension_numbers"]
    x_first = eqn.invars[0] is x
    weight = eqn.invars[1] if x_first else eqn.invars[0]
    x_contract = lhs_contract if x_first else rhs_contract
    plain = not lhs_batch and tuple(x_contract) == (x.aval.ndim - 1,) and weight.aval.ndim == 2
    # With the weight on the left the result ends with the axes of x, which is a matmul's order only for a vector x.
    if plain and (x_first or x.aval.ndim == 1):
        return etp_mv_p if x.aval.ndim == 1 else etp_mm_p
    return etp_einsum_p


def _bind_dot(primitive: Primitive, eqn: JaxprEqn, lhs: Any, rhs: Any, bias: list[Any], weight_last: bool) -> Any:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    precision, dtype = eqn.params["precision"], eqn.params["preferred_element_type"]
    numerics = {"precision": precision, "preferred_element_type": dtype}
    x, weight = (lhs, rhs) if weight_last else (rhs, lhs)
    if primitive is not etp_einsum_p:
        contracted = (rhs_contract if weight_last else lhs_contract)[0]
        if contracted == 1:
            weight = lax.transpose(weight, (1, 0))
        return primitive.bind(x, weight, *bias, has_bias=bool(bias), **numerics)
    letters = iter(_LETTERS)
    left, right = [""] * lhs.ndim, [""] * rhs.ndim
    for i, j in (*zip(lhs_batch, rhs_batch, strict=True), *zip(lhs_contract, rhs_contract, strict=True)):
        left[i] = right[j] = next(letters)
    left = [letter or next(letters) for letter in left]
    right = [letter or next(letters) for letter in right]
    shared = [left[i] for i in (*lhs_batch, *lhs_contract)]
    free = [letter for letter in (*left, *right) if letter not in shared]
    out = "".join([*(left[i] for i in lhs_batch), *free])
    spelled = ("".join(left), "".join(right)) if weight_last else ("".join(right), "".join(left))
    return primitive.bind(x, weight, equation=f"{spelled[0]},{spelled[1]}->{out}", **numerics)


def _takes_rows(eqn: JaxprEqn) -> bool:
    """Whether a gather picks whole rows along the first axis, as ``table[indices]`` does."""
    dims, sizes, fill = (eqn.params[name] for name in ("dimension_numbers", "slice_sizes", "fill_value"))
    table, indices = (v.aval for v in eqn.invars)
    out_ndim = eqn.outvars[0].aval.ndim
    return (
        (fill is None or np.isnan(fill))  # what `embedding` gives for indices out of range
        and tuple(dims.collapsed_slice_dims) == (0,)
        and tuple(dims.start_index_map) == (0,)
        and not dims.operand_batching_dims
        and tuple(sizes) == (1, *table.shape[1:])
        and tuple(dims.offset_dims) == tuple(range(indices.ndim - 1, out_ndim))
    )


def _takes_one_row(eqn: JaxprEqn) -> bool:
    """Whether a dynamic slice picks one whole row along the first axis, as ``table[index]`` does for a scalar."""
    # Starts along the other axes do not matter: a slice of full length is clamped to start at zero.
    return tuple(eqn.params["slice_sizes"]) == (1, *eqn.invars[0].aval.shape[1:])


def _take_mode(eqn: JaxprEqn) -> str:
    return {"CLIP": "clip", "FILL_OR_DROP": "fill", "PROMISE_IN_BOUNDS": "promise_in_bounds"}[eqn.params["mode"].name]


def _acting_shape(atom: Any, eqn: JaxprEqn) -> tuple[int, ...]:
    """The shape in which ``atom`` acts: larger than its own if it is broadcast (a scalar, or axes of size one)."""
    shape, out = tuple(atom.aval.shape), tuple(eqn.outvars[0].aval.shape)
    if eqn.primitive.name not in ELEMENTWISE:
        return shape
    fits = len(shape) == len(out) and all(n in (1, m) for n, m in zip(shape, out, strict=True))
    return out if fits or not shape else shape

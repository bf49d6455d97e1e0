"""Every operator, next to the plain operation that it stands for: the tests of this folder run over this table."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace_core import ops
from braintrace_core._compat import is_jaxpr, open_jaxpr


class Case(NamedTuple):
    """``shapes`` has the shape of each float operand, and the values of each integer one."""

    name: str
    operator: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    shapes: tuple[Any, ...]
    primitive: ops.ETPPrimitive
    trainable: dict[str, int]

    def operands(self, dtype: Any) -> list[jax.Array]:
        """Random operands, the same in every call."""
        rng = np.random.default_rng(0)
        return [_draw(rng, shape, dtype) for shape in self.shapes]

    @property
    def float_operands(self) -> list[int]:
        return [i for i, shape in enumerate(self.shapes) if isinstance(shape, tuple)]

    def of_floats(self, function: Callable[..., Any], operands: list[jax.Array]) -> Callable[..., Any]:
        """``function`` of its float operands alone, at the integers among ``operands``."""

        def of_floats(*floats: jax.Array) -> Any:
            values = list(operands)
            for i, value in zip(self.float_operands, floats, strict=True):
                values[i] = value
            return function(*values)

        return of_floats

    def floats(self, operands: list[jax.Array]) -> list[jax.Array]:
        return [operands[i] for i in self.float_operands]


def _draw(rng: np.random.Generator, shape: Any, dtype: Any) -> jax.Array:
    if not isinstance(shape, tuple):
        return jnp.asarray(shape)
    values = rng.normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.normal(size=shape)
    return jnp.asarray(values, dtype)


ROWS, COLS = np.array([0, 2, 1, 2, 2]), np.array([3, 0, 1, 1, 0])  # the last adds to the second


def _sparse(x: Any, weight: Any, rows: Any, cols: Any, bias: Any = None) -> jax.Array:
    return ops.sparse_matmul(x, weight, structure=(rows, cols, (3, 4)), bias=bias)


def _dense_of_sparse(x: Any, weight: Any, rows: Any, cols: Any) -> jax.Array:
    return x @ jnp.zeros((3, 4), weight.dtype).at[rows, cols].add(weight)


def _einsum(equation: str) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    return lambda x, w: ops.einsum(equation, x, w), lambda x, w: jnp.einsum(equation, x, w)


def _conv(
    spatial: int, *, batched: bool = True, layout: Any = None, **options: Any
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    dims = ("DHW"[3 - spatial :]) if layout is None else None
    numbers = layout or (f"N{dims}C", f"{dims}IO", f"N{dims}C")

    def plain(x: Any, kernel: Any, *bias: Any) -> jax.Array:
        geometry = {"window_strides": (1,) * spatial, "padding": "SAME", **options}
        geometry["window_strides"] = geometry.pop("strides", geometry["window_strides"])
        y = lax.conv_general_dilated(x if batched else x[None], kernel, dimension_numbers=numbers, **geometry)
        feature_axis = numbers[2].index("C")
        for b in bias:
            y = y + b.reshape([-1 if axis == feature_axis else 1 for axis in range(y.ndim)])
        return y if batched else y[0]

    def operator(x: Any, kernel: Any, bias: Any = None) -> jax.Array:
        return ops.conv(x, kernel, bias, dimension_numbers=layout, **options)

    return operator, plain


W, W2, W4 = {"weight": 1}, {"weight": 1, "bias": 2}, {"weight": 1, "bias": 4}
NCHW = ("NCHW", "OIHW", "NCHW")
CASES = [
    Case("matmul", ops.matmul, lambda x, w: x @ w, ((3,), (3, 4)), ops.etp_mv_p, W),
    Case("matmul-bias", ops.matmul, lambda x, w, b: x @ w + b, ((3,), (3, 4), (4,)), ops.etp_mv_p, W2),
    Case(
        "matmul-batch", ops.matmul, lambda x, w, b: x @ w + b[None, None], ((2, 5, 3), (3, 4), (4,)), ops.etp_mm_p, W2
    ),
    Case("element_wise", ops.element_wise, lambda w: w, ((3, 2),), ops.etp_elemwise_p, {"weight": 0}),
    Case(
        "grouped",
        ops.grouped_matmul,
        lambda x, w: jnp.einsum("gi,gio->go", x, w),
        ((2, 3), (2, 3, 4)),
        ops.etp_grouped_mv_p,
        W,
    ),
    Case(
        "grouped-batch",
        ops.grouped_matmul,
        lambda x, w, b: jnp.einsum("bgi,gio->bgo", x, w) + b[None],
        ((4, 2, 3), (2, 3, 4), (2, 4)),
        ops.etp_grouped_mm_p,
        W2,
    ),
    Case("einsum", *_einsum("bi,io->bo"), ((2, 3), (3, 4)), ops.etp_einsum_p, W),
    Case("einsum-heads", *_einsum("hbi,iho->obh"), ((2, 5, 3), (3, 2, 4)), ops.etp_einsum_p, W),
    Case("einsum-outer", *_einsum("a,bc->cab"), ((2,), (3, 4)), ops.etp_einsum_p, W),
    Case("embedding", ops.embedding, lambda i, w: w[i], (np.int32(2), (4, 3)), ops.etp_embedding_p, W),
    Case(
        "embedding-batch",
        ops.embedding,
        lambda i, w: w[i],
        (np.array([[0, 3, -1], [1, 3, 2]]), (4, 3, 2)),
        ops.etp_embedding_p,
        W,
    ),
    Case("conv", *_conv(1, batched=False), ((6, 2), (3, 2, 4)), ops.etp_conv_p, W),
    Case("conv-batch", *_conv(1, strides=(2,), rhs_dilation=(2,)), ((2, 7, 2), (3, 2, 4), (4,)), ops.etp_conv_p, W2),
    Case(
        "conv-2d-groups",
        *_conv(2, layout=NCHW, feature_group_count=2, padding="VALID"),
        ((2, 4, 5, 4), (6, 2, 3, 2), (6,)),
        ops.etp_conv_p,
        W2,
    ),
    Case(
        "conv-2d-transposed",
        *_conv(2, batched=False, lhs_dilation=(2, 1), padding=((1, 2), (0, 1))),
        ((3, 4, 2), (2, 2, 2, 3), (3,)),
        ops.etp_conv_p,
        W2,
    ),
    Case("conv-batch-groups", *_conv(1, batch_group_count=2), ((4, 5, 2), (3, 2, 4)), ops.etp_conv_p, W),
    Case("conv-3d", *_conv(3, padding="SAME_LOWER"), ((1, 3, 2, 3, 1), (2, 2, 2, 1, 2)), ops.etp_conv_p, W),
    Case("sparse", _sparse, _dense_of_sparse, ((3,), (5,), ROWS, COLS), ops.etp_sp_mv_p, W),
    Case(
        "sparse-batch",
        _sparse,
        lambda x, w, r, c, b: _dense_of_sparse(x, w, r, c) + b[None, None],
        ((2, 2, 3), (5,), ROWS, COLS, (4,)),
        ops.etp_sp_mm_p,
        W4,
    ),
    Case(
        "lora",
        lambda x, b, a: ops.lora_matmul(x, b, a, alpha=0.5),
        lambda x, b, a: 0.5 * (x @ b) @ a,
        ((3,), (3, 2), (2, 4)),
        ops.etp_lora_mv_p,
        {"lora_b": 1, "lora_a": 2},
    ),
    Case(
        "lora-batch",
        ops.lora_matmul,
        lambda x, b, a, bias: x @ b @ a + bias[None],
        ((4, 3), (3, 2), (2, 4), (4,)),
        ops.etp_lora_mm_p,
        {"lora_b": 1, "lora_a": 2, "bias": 3},
    ),
]


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Each program runs once here, so nearly all the time is XLA's."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(params=CASES, ids=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    """Every operator in turn, or those whose names a test gives with ``indirect=True``."""
    if isinstance(request.param, str):
        return next(case for case in CASES if case.name == request.param)
    return request.param


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for value in eqn.params.values():
            if is_jaxpr(value):
                yield from _equations(value)


@pytest.fixture
def marks() -> Callable[..., list[Any]]:
    """``marks(function, *operands)``: the equations of the function's jaxpr that mark an operation."""

    def marks(function: Callable[..., Any], *operands: Any) -> list[Any]:
        return [eqn for eqn in _equations(jax.make_jaxpr(function)(*operands)) if ops.is_etp(eqn.primitive)]

    return marks

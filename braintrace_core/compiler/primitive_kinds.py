"""JAX primitives by how they move information between elements."""

__all__ = ["ACCUMULATING", "CUMULATIVE", "ELEMENTWISE", "FLAT", "INDEXED", "MOVES", "REDUCTIONS"]

# One element of the result depends on the same element of each operand (or on a scalar operand).
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac
    imag integer_pow layout_constraint lgamma log log1p log2 logistic max mesh_cast min mul name neg one_minus_square
    pcast polygamma polynomial pow pvary random_gamma_grad real reduce_precision regularized_incomplete_beta rem
    reshard rsqrt select_n sharding_constraint sin sinh sqrt square sub tan tanh zeta
    """.split()
)

# Results that do not change with a small change of the operands: no credit passes.
FLAT = frozenset(
    """
    and argmax argmin ceil clz eq eq_to floor ge gt iota is_finite le le_to lt lt_to ne nextafter not or
    population_count random_bits random_fold_in random_seed random_split random_unwrap random_wrap reduce_and reduce_or
    reduce_xor rng_bit_generator rng_uniform round shift_left shift_right_arithmetic shift_right_logical sign
    stop_gradient threefry2x32 xor
    """.split()
)

# Elements are moved, repeated or dropped, never combined.
MOVES = frozenset(
    "broadcast_in_dim concatenate pad reshape rev slice split squeeze stack tile transpose unstack".split()
)

# The same at indices that are operands -> the operands that hold elements; all others are indices.
INDEXED = {"dynamic_slice": (0,), "dynamic_update_slice": (0, 1), "gather": (0,), "scatter": (0, 2)}

# Operands: a value, indices, and updates that are combined with the value there.
ACCUMULATING = frozenset("scatter-add scatter-max scatter-min scatter-mul scatter-sub".split())

REDUCTIONS = frozenset("reduce_max reduce_min reduce_prod reduce_sum".split())

CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())

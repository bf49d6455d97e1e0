"""JAX primitives by how they move information between elements."""

__all__ = ["CUMULATIVE", "ELEMENTWISE", "FLAT", "MOVES", "REDUCTIONS"]

# One element of the result depends on the same element of each operand (or on a scalar operand).
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp complex conj convert_element_type copy copy_p cos
    cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac imag integer_pow is_finite lgamma log
    log1p logistic max min mul neg nextafter optimization_barrier polygamma pow real reduce_precision rem
    rsqrt select_n sin sinh sqrt square sub tan tanh regularized_incomplete_beta bessel_i0e bessel_i1e
    random_gamma_grad erf_inv pvary stop_gradient
    """.split()
)

# Results that do not change with a small change of the operands: no credit passes.
FLAT = frozenset(
    """
    and argmax argmin ceil clz eq eq_to floor ge gt is_finite le le_to lt lt_to ne nextafter not or population_count
    rng_bit_generator rng_uniform round shift_left shift_right_arithmetic shift_right_logical sign stop_gradient xor
    random_bits random_wrap random_unwrap random_seed random_split random_fold_in iota threefry2x32
    reduce_and reduce_or reduce_xor
    """.split()
)

# Elements are moved, repeated or dropped, never combined.
MOVES = frozenset("broadcast_in_dim reshape squeeze expand_dims transpose rev slice split concatenate pad".split())

REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod".split())

CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())

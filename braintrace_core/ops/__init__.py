"""Operators: each marks ``y = op(x, theta)`` so that the compiler can find it, and is otherwise the plain operation."""

from .conv import conv, etp_conv_p
from .dense import etp_mm_p, etp_mv_p, matmul
from .einsum import einsum, etp_einsum_p
from .element_wise import element_wise, etp_elemwise_p
from .embedding import embedding, etp_embedding_p
from .grouped import etp_grouped_mm_p, etp_grouped_mv_p, grouped_matmul
from .lora import etp_lora_mm_p, etp_lora_mv_p, lora_matmul
from .primitive import ETPPrimitive, is_boundary, is_etp, register_primitive
from .sparse import etp_sp_mm_p, etp_sp_mv_p, sparse_matmul

__all__ = [
    "ETPPrimitive",
    "conv",
    "einsum",
    "element_wise",
    "embedding",
    "etp_conv_p",
    "etp_einsum_p",
    "etp_elemwise_p",
    "etp_embedding_p",
    "etp_grouped_mm_p",
    "etp_grouped_mv_p",
    "etp_lora_mm_p",
    "etp_lora_mv_p",
    "etp_mm_p",
    "etp_mv_p",
    "etp_sp_mm_p",
    "etp_sp_mv_p",
    "grouped_matmul",
    "is_boundary",
    "is_etp",
    "lora_matmul",
    "matmul",
    "register_primitive",
    "sparse_matmul",
]

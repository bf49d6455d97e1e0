"""What the compiler has to say: records of what it did, what it left out, and why.

A :class:`Recorder` belongs to one compilation; the passes add to it, and the finished graph holds its records.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .._compat import Primitive

__all__ = ["CompilationRecord", "DiagnosticKind", "DiagnosticLevel", "Path", "Recorder", "spell"]

Path = tuple[str, ...]


class DiagnosticKind(enum.Enum):
    """What a record is about."""

    RELATION_INCLUDED = "relation_included"
    RELATION_PARTIAL_PATH = "relation_partial_path"
    RELATION_EXCLUDED_WEIGHT_TO_WEIGHT = "relation_excluded_weight_to_weight"
    RELATION_EXCLUDED_NON_TEMPORAL = "relation_excluded_non_temporal"
    RELATION_EXCLUDED_NO_PARAMSTATE = "relation_excluded_no_paramstate"
    RELATION_EXCLUDED_SHAPE_MISMATCH = "relation_excluded_shape_mismatch"
    TRAINABLE_INVAR_NOT_PARAMSTATE = "trainable_invar_not_paramstate"
    PYTREE_WEIGHT_LEAF_AMBIGUOUS = "pytree_weight_leaf_ambiguous"
    MULTI_OUTPUT_PRIMITIVE_DETECTED = "multi_output_primitive_detected"
    PRIMITIVE_INSIDE_CONTROL_FLOW = "primitive_inside_control_flow"
    PRIMITIVE_INSIDE_NESTED_JIT = "primitive_inside_nested_jit"
    CONTROL_FLOW_UNROLLED = "control_flow_unrolled"
    CUSTOM_DERIVATIVE_INLINED = "custom_derivative_inlined"
    OPERATOR_LIFTED = "operator_lifted"
    HIDDEN_GROUP_MERGED = "hidden_group_merged"
    HIDDEN_COUPLING_DROPPED = "hidden_coupling_dropped"
    FACTOR_APPROXIMATED = "factor_approximated"
    FACTOR_COLOURED = "factor_coloured"
    PARAMETER_UNUSED = "parameter_unused"
    PARAMETER_WITHOUT_OPERATOR = "parameter_without_operator"


class DiagnosticLevel(enum.Enum):
    """How much a record should worry its reader."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class CompilationRecord:
    """One thing that the compiler did or could not do.

    Attributes:
      kind, level: what it is about, and how serious it is.
      message: a sentence for people: what, why and, where something is lost, the remedy.
      primitive: name of the operator concerned, if any.
      weight_path: path of the parameter concerned, if any; of the first, if there are several.
      hidden_paths: paths of the hidden states concerned.
      context: further facts by name; ``weight_paths`` are all the parameters concerned.
    """

    kind: DiagnosticKind
    level: DiagnosticLevel
    message: str
    primitive: str | None = None
    weight_path: Path | None = None
    hidden_paths: tuple[Path, ...] = ()
    context: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        """All parameters concerned."""
        first = () if self.weight_path is None else (self.weight_path,)
        return tuple(dict.fromkeys((*first, *self.context.get("weight_paths", ()))))

    def concerns(self, weight_path: Path) -> bool:
        """Whether the record is about this parameter, among others."""
        return weight_path in self.weight_paths

    def __str__(self) -> str:
        return f"[{self.level.value}] {self.kind.value}: {self.message}"


class Recorder:
    """Collects the records of one compilation, in the order in which they are made."""

    def __init__(self) -> None:
        self._records: list[CompilationRecord] = []

    @property
    def records(self) -> tuple[CompilationRecord, ...]:
        """All records so far."""
        return tuple(self._records)

    def info(self, kind: DiagnosticKind, message: str, **about: Any) -> None:
        """Add a record of something that is as it should be."""
        self._add(kind, DiagnosticLevel.INFO, message, **about)

    def warn(self, kind: DiagnosticKind, message: str, **about: Any) -> None:
        """Add a record of something that is lost or approximated."""
        self._add(kind, DiagnosticLevel.WARNING, message, **about)

    def _add(
        self,
        kind: DiagnosticKind,
        level: DiagnosticLevel,
        message: str,
        primitive: Primitive | None = None,
        weight_path: Path | None = None,
        hidden_paths: Sequence[Path] = (),
        **context: Any,
    ) -> None:
        self._records.append(
            CompilationRecord(
                kind,
                level,
                message,
                primitive.name if primitive is not None else None,
                weight_path,
                tuple(hidden_paths),
                MappingProxyType(context),
            )
        )


def spell(path: Path | None) -> str:
    """A path as people write it: ``cell/kernel``."""
    return "/".join(path) if path else "<none>"

"""The compiler: one step of a model in, a graph of parameters and hidden states out. One file a pass."""

from .control_flow import ControlFlowPolicy
from .diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel
from .factors import FactorPlan, Factors
from .graph import ETraceGraph, compile_etrace_graph, compile_step_graph
from .hidden_group import HiddenGroup, find_hidden_groups_from_minfo, find_hidden_groups_from_module
from .module_info import ModuleInfo
from .paths import PathClassification
from .perturbation import (
    HiddenPerturbation,
    add_hidden_perturbation_from_minfo,
    add_hidden_perturbation_in_module,
)
from .relations import (
    HiddenParamOpRelation,
    find_hidden_param_op_relations_from_jaxpr,
    find_hidden_param_op_relations_from_minfo,
    find_hidden_param_op_relations_from_module,
)
from .tracing import extract_module_info, extract_step_info

__all__ = [
    "CompilationRecord",
    "ControlFlowPolicy",
    "DiagnosticKind",
    "DiagnosticLevel",
    "ETraceGraph",
    "FactorPlan",
    "Factors",
    "HiddenGroup",
    "HiddenParamOpRelation",
    "HiddenPerturbation",
    "ModuleInfo",
    "PathClassification",
    "add_hidden_perturbation_from_minfo",
    "add_hidden_perturbation_in_module",
    "compile_etrace_graph",
    "compile_step_graph",
    "extract_module_info",
    "extract_step_info",
    "find_hidden_groups_from_minfo",
    "find_hidden_groups_from_module",
    "find_hidden_param_op_relations_from_jaxpr",
    "find_hidden_param_op_relations_from_minfo",
    "find_hidden_param_op_relations_from_module",
]

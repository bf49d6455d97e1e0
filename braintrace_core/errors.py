"""Errors that a model can cause at compile time."""

__all__ = ["CompilationError", "NotSupportedError"]


class CompilationError(Exception):
    """The model cannot be trained online as it stands. The message gives the reason and the remedy."""


class NotSupportedError(CompilationError):
    """The model uses something outside what eligibility traces are defined for."""

"""The names known at this import path; the code lives in `trl.reporting.profiling`."""

from trl.reporting.profiling import profiling_context, profiling_decorator

__all__ = ["profiling_context", "profiling_decorator"]

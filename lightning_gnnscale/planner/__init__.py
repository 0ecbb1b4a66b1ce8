"""How many parts, what fits where, and why."""

from ..memory import format_bytes, parse_bytes
from .host_memory import predict_host_peak, predict_training
from .plan import Plan, csc_bytes, plan

__all__ = ["Plan", "csc_bytes", "format_bytes", "parse_bytes", "plan", "predict_host_peak", "predict_training"]

"""Load, recompute, or both ends at once, worked out from figures alone: what a store asks, without a store."""

from kvtier.planner import Choice, Link, LoadPlan, Prefill, Stretch, plan_load

__all__ = ["Choice", "Link", "LoadPlan", "Prefill", "Stretch", "plan_load"]

"""`--plan`: the memory and time of a run, computed from the model's config and the flags before anything is loaded."""

from proxsparse.plan.page import text

__all__ = ["text"]

"""`--plan`: what a run will hold and cost, from the model's config and the flags, before anything is loaded."""

from proxsparse.plan.page import text

__all__ = ["text"]

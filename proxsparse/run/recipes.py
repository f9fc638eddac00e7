"""Recipes: flags for a model, in YAML files in proxsparse/recipes."""

from pathlib import Path

from proxsparse.errors import InputError

RECIPES = Path(__file__).parent.parent / "recipes"
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
DEFAULT_RECIPE = "demo"


def recipe_path(name: str) -> Path:
    """The file of a recipe. Raises InputError, listing the recipes, for an unknown name."""
    if name not in RECIPE_NAMES:
        raise InputError(f"--recipe {name}: no such recipe; choose from {', '.join(RECIPE_NAMES)}")
    return RECIPES / f"{name}.yaml"

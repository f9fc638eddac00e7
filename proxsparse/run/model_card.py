"""README.md of a run: the model card of the pruned model."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from proxsparse.patterns import MIXED
from proxsparse.run import sections
from proxsparse.run.sections import cost_text, number, page, perplexity_text, settings_text, shortened, top_text

# How the model tree of the Hub lists the result below its base model. It knows adapter, finetune, merge and quantized.
# Frozen weights under a mask, also packed, are a smaller form of the same model, as quantized weights are; new values
# are a finetune. docs: hub/model-cards#specifying-a-base-model
FROZEN, UPDATED = "quantized", "finetune"

USAGE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
```"""

LICENCE = "The licence and the limitations of the pretrained model apply."


def card_text(result: dict) -> str:
    """The model card of a pruned model. `result`: the content of its result.json."""
    base, pattern, method = result.get("base_model") or result["model"], result["pattern"], result["method"]
    already, left, updated = result.get("already_pruned"), result.get("not_selected"), result.get("updated")
    given = "those of the given model" if already else "the pretrained ones"
    name, others = f"with {method}", f"All other parameters are {given}."
    how = f"The mask was chosen by `{method}` ({result.get('paper')})."
    if method == "finetune" or result["config"].get("finetune"):
        held = "trained while the mask was held."
        name = "and fine-tuned" if method == "finetune" else f"{name} and fine-tuned"
        how = f"It is {result['model']}, {held}" if method == "finetune" else f"{how} Then the model was {held}"
        others = f"Norms and biases were trained too; all other parameters are {given}."
    kept_share = f"{pattern.replace(':', ' of every ')} consecutive weights kept"
    if pattern == MIXED:
        pattern, kept_share = ", ".join(sorted({*result["patterns"].values()})), sections.counted(result["patterns"])
    kept = "differ from the pretrained ones" if updated else f"are {given}, unchanged"
    before = [f"pruned before the run: {already}"] * bool(already)
    before += [f"{number(left)} of these layers were not selected and are unchanged"] * bool(left)
    kept += f" ({'; '.join(before)})" * bool(before)
    steps = f"{number(result['steps'])} steps, {number(result['tokens'])} tokens. " if "steps" in result else ""
    text = (
        f"{base} with {kept_share} in {number(result['layers'])} linear layers.\n{how} The kept weights {kept}; the "
        f"other weights\nof these layers are +0.0. {others} {LICENCE}\n{cost_text(result)}."
    )
    measured = "## Held-out perplexity", perplexity_text(result["perplexity"])
    made = f"```sh\n{result['command']}\n```\n\n{steps}{settings_text(result)}"
    relation = UPDATED if updated else FROZEN
    return card(base, pattern, relation, f" {name}", [top_text(result), text, *measured], made, result["masks_sha256"])


def card(base: str, pattern: str, relation: str, title: str, text: list[str], made: str, digest: str) -> str:
    """A model card. `title`: the end of its title; `text`: its first paragraphs; `made`: the command."""
    return page(
        front_matter(base, pattern, relation),
        f"# {Path(base).name}, pruned to {pattern}{title}",
        *text,
        *("## How to use it", USAGE),
        *("## How it was made", made),
        f"SHA-256 of the masks (names and packed bits): `{digest}`",
    )


def front_matter(model: str, pattern: str, relation: str) -> str:
    """What the hub reads at the top of a model card; it names the pretrained model if that is one of the hub."""
    on_hub = re.fullmatch(r"\w[\w.-]{,95}/[\w.-]{1,96}", model, re.ASCII) and not Path(model).exists()  # owner/name
    head = {"base_model": model, "base_model_relation": relation} if on_hub else {}
    head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = [*pattern.split(", "), "semi-structured-sparsity", "pruned", "proxsparse"]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def applied_card_text(
    base: str, made_for: str, pattern: str, layers: int, masks_sha256: str, notes: Sequence[str] = ()
) -> str:
    """The model card of `proxsparse apply`: the pretrained model `base` under masks that name `made_for` as theirs.

    `notes`: what differs from the pretrained model besides the masks, see `models.loading.Source`.
    """
    base, made_for = shortened(base), shortened(made_for)
    other = f" The masks were made for {made_for}." if made_for not in ("", base) else ""
    text = (
        f"{base} under the masks of a run of proxsparse: {pattern} in {number(layers)} linear layers.{other} The kept "
        "weights\nare the pretrained ones, unchanged; the other weights of these layers are +0.0. All other parameters "
        f"are the\npretrained ones. {LICENCE}"
    )
    warnings = [f"> **Warning:** {note}" for note in notes]
    made = f"`proxsparse apply {base} masks.safetensors --output_dir DIR`"
    return card(base, pattern, FROZEN, "", [*warnings, text], made, masks_sha256)

"""README.md of a run: the model card of the pruned model."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from proxsparse.io.atomic import write_file
from proxsparse.patterns import MIXED
from proxsparse.run.sections import (
    number,
    page,
    perplexity_text,
    settings_text,
    shortened,
    shortened_command,
    top_text,
)

# How the model tree of the Hub lists the result below its base model. It knows adapter, finetune, merge and quantized.
# Frozen weights under a mask, also packed, are a smaller form of the same model, as quantized weights are; new values
# are a finetune; masks alone need the base model, as an adapter does. docs: hub/model-cards#specifying-a-base-model
FROZEN, UPDATED, MASKS_ALONE = "quantized", "finetune", "adapter"

SEAL = b"\n<!-- written by proxsparse; it is not replaced once its text is changed; sha256 %s -->\n"

APPLY_MASKS = """\
masks.safetensors has one tensor per layer: `numpy.packbits(mask, axis=-1, bitorder="little")`, uint8
[out_features, ceil(in_features / 8)]; bit 1 is a kept weight. To apply the masks to the pretrained `model`:

```python
import numpy, torch
from safetensors.numpy import load_file

for name, bits in load_file("masks.safetensors").items():
    weight = model.get_submodule(name).weight
    mask = numpy.unpackbits(bits, axis=-1, bitorder="little", count=weight.shape[-1]).astype(bool)
    weight.data = torch.where(torch.from_numpy(mask).to(weight.device), weight.data, 0.0)
```"""

USAGE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
```"""

LICENCE = "The licence and the limitations of the pretrained model apply."


def write_card(run_dir: Path, result: dict) -> None:
    """Writes the model card README.md of a run without training steps. `result` as in `card_text`."""
    write_file(run_dir / "README.md", sealed(card_text(result).encode(errors="replace")))


def sealed(card: bytes) -> bytes:
    """The card with its SHA-256 in a comment, which Markdown does not show, as its last line; see `is_edited`."""
    return card + SEAL % hashlib.sha256(card).hexdigest().encode()


def is_edited(path: Path) -> bool:
    """Whether README.md is there, and not as `sealed` made it: a person has added to it or changed it."""
    text = path.read_bytes() if path.is_file() else b""
    card, _, _seal = text.rpartition(SEAL.partition(b"%s")[0])
    return text not in (b"", sealed(card))


def card_text(result: dict) -> str:
    """The model card of a pruned model. `result`: the content of its result.json."""
    base, pattern, method = shortened(result.get("base_model") or result["model"]), result["pattern"], result["method"]
    already, updated, trained = result.get("already_pruned"), result.get("updated"), result["config"].get("train")
    given = "those of the given model" if already else "the pretrained ones"
    name, others = f"with {method}", f"All other parameters are {given}."
    how = f"The mask was chosen by `{method}` ({result.get('paper')})."
    if method == "proxsparse":
        name, how = "with ProxSparse", "The mask was learned by ProxSparse (ICML 2025)."
    if method == "finetune":
        name = "and fine-tuned"
        how = f"It is {shortened(result['model'])}, trained while the mask was held (`--train {trained}`)."
        others = f"Norms and biases were trained too; all other parameters are {given}."
    kept_share = f"{pattern.replace(':', ' of every ')} consecutive weights kept"
    if pattern == MIXED:
        counts = Counter(result["patterns"].values())
        pattern = ", ".join(sorted(counts))
        kept_share = ", ".join(f"{each} in {number(count)} layers" for each, count in sorted(counts.items()))
    kept = "have new values" if updated else f"are {given}, unchanged"
    if method == "finetune" and trained == "norms":
        kept = "were not trained"
    if already:
        kept += f" ({number(already)} of these layers were {pattern} before the run)"
    steps = f"{number(result['steps'])} steps, {number(result['tokens'])} tokens. " if "steps" in result else ""
    return page(
        front_matter(base, pattern, UPDATED if updated else FROZEN),
        f"# {Path(base).name}, pruned to {pattern} {name}",
        top_text(result),
        f"{base} with {kept_share} in {number(result['layers'])} linear layers.\n{how} The kept weights {kept}; the "
        f"other weights\nof these layers are +0.0. {others} {LICENCE}",
        "## Held-out perplexity",
        perplexity_text(result["perplexity"]),
        "## How to use it",
        USAGE,
        "## How it was made",
        f"{command_text(result)}{steps}{settings_text(result)}",
        sha256_text(result["masks_sha256"]),
    )


def sha256_text(digest: str) -> str:
    """The last line of a card."""
    return f"SHA-256 of the masks (names and packed bits): `{digest}`"


def command_text(result: dict) -> str:
    """The command of the run as a block of code."""
    command = shortened_command(str(result.get("command", "")))
    return f"```sh\n{command}\n```\n\n" if command else ""


def front_matter(model: str, pattern: str, relation: str) -> str:
    """What the hub reads at the top of a model card; it names the pretrained model if that is one of the hub."""
    on_hub = re.fullmatch(r"\w[\w.-]{,95}/[\w.-]{1,96}", model, re.ASCII) and not Path(model).exists()  # owner/name
    head = {"base_model": model, "base_model_relation": relation} if on_hub else {}
    library = "proxsparse" if relation == MASKS_ALONE else "transformers"
    head |= {"library_name": library, "pipeline_tag": "text-generation"}
    head["tags"] = [pattern, "semi-structured-sparsity", "pruned", "proxsparse"]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---"


def applied_card_text(
    base: str, made_for: str, pattern: str, layers: int, masks_sha256: str, notes: Sequence[str] = ()
) -> str:
    """The model card of `proxsparse apply`: the pretrained model `base` under masks that name `made_for` as theirs.

    `notes`: what differs from the pretrained model besides the masks, see `models.loading.Source`.
    """
    base, made_for = shortened(base), shortened(made_for)
    other = f" The masks were made for {made_for}." if made_for not in ("", base) else ""
    return page(
        front_matter(base, pattern, FROZEN),
        f"# {Path(base).name}, pruned to {pattern}",
        *(f"> **Warning:** {note}" for note in notes),
        f"{base} under the masks of a run of proxsparse: {pattern} in {number(layers)} linear layers.{other} The kept "
        "weights\nare the pretrained ones, unchanged; the other weights of these layers are +0.0. All other parameters "
        f"are the\npretrained ones. {LICENCE}",
        "## How to use it",
        USAGE,
        "## How it was made",
        f"`proxsparse apply {base} masks.safetensors --output_dir DIR`",
        sha256_text(masks_sha256),
    )


def masks_card_text(metadata: dict[str, str], layers: int, masks_sha256: str, result: dict) -> str:
    """The card of masks without the model. `metadata`: of masks.safetensors; `result`: of result.json, or {}."""
    base, pattern = shortened(metadata["base_model"]) or "BASE", metadata["pattern"]
    revision = f" (revision {metadata['base_revision']})" if metadata.get("base_revision") else ""
    figures = perplexity_text(result.get("perplexity"))
    if result.get("updated"):  # the figures are those of other weights
        figures = "Not measured: the run also changed the kept weights, and this model has the pretrained ones."
    return page(
        front_matter(base if revision else "", pattern, MASKS_ALONE),
        f"# {pattern} masks for {Path(base).name}",
        f"masks.safetensors has one bit per weight of {number(layers)} linear layers of {base}{revision}: 1 is a kept "
        f"weight. It\ncontains no weights. {LICENCE}",
        "## Held-out perplexity under the masks",
        figures,
        "## How to use it",
        f"`proxsparse apply {base} masks.safetensors --output_dir DIR` makes the pruned model. It checks "
        f"that the weights are\nthose for which the masks were made. In plain Python:\n\n{APPLY_MASKS}",
        "## How it was made",
        f"{command_text(result)}{settings_text(result)}" if result else "By proxsparse.",
        sha256_text(masks_sha256),
    )

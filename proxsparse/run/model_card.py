"""README.md of a run: the model card of the pruned model."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from proxsparse.io.atomic import write_file
from proxsparse.run.sections import number, perplexity_text, settings_text, shortened, shortened_command, top_text

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
## How to use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
```
"""


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
    """The text of README.md: front matter for the hub, description, perplexity, usage and settings of the model.

    `result`: the content of result.json, of `proxsparse train` or `proxsparse prune`.
    """
    model, pattern = shortened(result.get("base_model") or result["model"]), result["pattern"]
    trained = "steps" in result
    made, credit = "with ProxSparse", "The mask was learned by ProxSparse (ICML 2025)."
    rest = "All other parameters are the pretrained ones."
    if result.get("method") == "finetune":
        made = "and fine-tuned"
        credit = f"It is {shortened(result['model'])}, which was trained while the mask was held"
        credit += f" (`--train {result['config'].get('train')}`)."
        rest = "Norms and biases were trained too; all other parameters are the pretrained ones."
    elif not trained:
        made, credit = f"with {result['method']}", f"The mask was chosen by `{result['method']}` ({result['paper']})."
    kept_share = f"{pattern.replace(':', ' of every ')} consecutive weights kept"
    if result.get("allocation", "uniform") != "uniform":
        kept_share += f" on average (`{result['allocation']}` chose the number for each decoder block)"
    kept = "have new values" if result.get("updated") else "are the pretrained ones, unchanged"
    if result.get("method") == "finetune" and result["config"].get("train") == "norms":
        kept = "were not trained"
    if result.get("already_pruned"):
        kept += f" ({number(result['already_pruned'])} of these layers were {pattern} before the run)"
        kept = kept.replace("the pretrained ones", "those of the given model")
        rest = rest.replace("pretrained", "given")
    length = f"{number(result['steps'])} steps, {number(result['tokens'])} tokens. " if trained else ""
    return f"""\
{front_matter(model, pattern, UPDATED if result.get("updated") else FROZEN)}
# {Path(model).name}, pruned to {pattern} {made}

{top_text((), result)}

{model} with {kept_share} in {number(result["layers"])} linear layers.
{credit} The kept weights {kept}; the other weights
of these layers are +0.0. {rest} The licence and the limitations of the pretrained model apply.

## Held-out perplexity

{perplexity_text(result["perplexity"])}

{USAGE}
## How it was made

{command_text(result)}{length}{settings_text(result)}

SHA-256 of the masks (names and packed bits): `{result["masks_sha256"]}`
"""


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
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n"


def applied_card_text(
    base: str, made_for: str, pattern: str, layers: int, masks_sha256: str, notes: Sequence[str] = ()
) -> str:
    """The text of README.md of `proxsparse apply`.

    Args:
        base: the pretrained model.
        made_for: the pretrained model that the masks name; "" if unknown.
        notes: what differs from the pretrained model besides the masks, see `models.loading.Source`.
    """
    base, made_for = shortened(base), shortened(made_for)
    other = f" The masks were made for {made_for}." if made_for not in ("", base) else ""
    warnings = "".join(f"\n> **Warning:** {note}\n" for note in notes)
    return f"""\
{front_matter(base, pattern, FROZEN)}
# {Path(base).name}, pruned to {pattern}
{warnings}
{base} under the masks of a run of proxsparse: {pattern} in {number(layers)} linear layers.{other} The kept weights
are the pretrained ones, unchanged; the other weights of these layers are +0.0. All other parameters are the
pretrained ones. The licence and the limitations of the pretrained model apply.

{USAGE}
## How it was made

`proxsparse apply {base} masks.safetensors --output_dir DIR`

SHA-256 of the masks (names and packed bits): `{masks_sha256}`
"""


def masks_card_text(metadata: dict[str, str], layers: int, masks_sha256: str, result: dict) -> str:
    """The text of README.md of masks without the model.

    Args:
        metadata: that of masks.safetensors.
        layers: their number.
        result: the content of result.json, or {}.
    """
    base, pattern = shortened(metadata["base_model"]) or "BASE", metadata["pattern"]
    revision = f" (revision {metadata['base_revision']})" if metadata.get("base_revision") else ""
    figures = perplexity_text(result.get("perplexity"))
    if result.get("updated"):  # the figures are those of other weights
        figures = "Not measured: the run also changed the kept weights, and this model has the pretrained ones."
    made = f"{command_text(result)}{settings_text(result)}" if result else "By proxsparse."
    return f"""\
{front_matter(base if metadata.get("base_revision") else "", pattern, MASKS_ALONE)}
# {pattern} masks for {Path(base).name}

masks.safetensors has one bit per weight of {number(layers)} linear layers of {base}{revision}: 1 is a kept weight. It
contains no weights. The licence and the limitations of the pretrained model apply.

## Held-out perplexity under the masks

{figures}

## How to use it

`proxsparse apply {base} masks.safetensors --output_dir DIR` makes the pruned model. It checks that the weights are
those for which the masks were made. In plain Python:

{APPLY_MASKS}

## How it was made

{made}

SHA-256 of the masks (names and packed bits): `{masks_sha256}`
"""

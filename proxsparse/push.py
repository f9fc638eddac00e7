"""`proxsparse push FOLDER REPO`: uploads a pruned or packed model, or its masks alone, to the Hugging Face Hub."""

import argparse
import sys
from pathlib import Path

from proxsparse.errors import InputError, run_command
from proxsparse.run import hub
from proxsparse.runtime.command import Parser

DESCRIPTION = """\
Upload the model in FOLDER to the Hugging Face Hub: weights, tokenizer, masks, result.json and model card. The other
files of the folder are not uploaded. A new repository has the default visibility of its owner, which is usually public;
for a private one run first: hf repos create REPO --private"""


def main(arguments: list[str] | None = None) -> int:
    """Uploads the folder. Returns the exit code."""
    options = parse(arguments)
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(f"FOLDER {options.folder!r}: no such folder; check the path")
    hub.upload(folder, hub.check_repository(options.repo), options.masks_only)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("push", description=DESCRIPTION)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="output folder of train, prune, finetune, apply or pack")
    add("repo", metavar="REPO", help="OWNER/NAME; the user of the token owns a NAME without OWNER")
    add("--masks_only", action="store_true", help="upload only masks.safetensors and a model card for it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))

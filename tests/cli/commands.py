"""A command run in this process: one that must succeed, one that must be refused, and what a pruned folder must be."""

import json

import torch
from pruned import assert_pruned
from safetensors.torch import load_file

from proxsparse import prune
from proxsparse.errors import run_command
from proxsparse.io.mask_files import load_masks
from proxsparse.models.loading import load_model

QUICK = ["--num_samples", "8", "--seq_len", "32", "--eval_seq_len", "32", "--eval_max_windows", "2"]


def run(main, model, text, output_dir, *flags) -> dict:
    """Runs train or prune on a model and a text; its result.json."""
    given = ["--model", model, "--data", text, "--eval_data", text, "--output_dir", output_dir, *QUICK, *flags]
    assert main(list(map(str, given))) == 0
    return json.loads((output_dir / "result.json").read_text())


def pruned(model, folder, *flags):
    """The folder of a run of magnitude pruning."""
    given = ["--method", "magnitude", "--model", model, "--eval_data", "none", "--output_dir", folder, *flags]
    assert prune.main(list(map(str, given))) == 0
    return folder


def refused(capsys, main, arguments, *words) -> list[str]:
    """The command must fail with one line that holds all the words; returns the other lines that it prints."""
    assert run_command(lambda: main(list(map(str, arguments)))) == 2
    printed = capsys.readouterr()
    *others, message = printed.err.strip().splitlines()
    assert message.startswith("error: ")
    for word in words:
        assert word in message, message
    return [*printed.out.splitlines(), *others]


def check_pruned(before_folder, run_dir, patterns="2:4", updated=False) -> dict:
    """The folder holds the pruned model and its masks, which are returned."""
    files = [load_file(folder / "model.safetensors").keys() for folder in (before_folder, run_dir)]
    before, after = (dict(load_model(str(folder))[0].named_parameters()) for folder in (before_folder, run_dir))
    masks = load_masks(run_dir / "masks.safetensors")
    assert files[0] == files[1]
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    patterns = dict.fromkeys(masks, patterns) if isinstance(patterns, str) else patterns
    assert_pruned(before, after, masks, patterns, updated)
    return masks

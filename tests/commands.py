"""Commands run in this process: those that must succeed or be refused; and what is in the folders that they write."""

import json

import torch
from pruned import assert_pruned
from safetensors.torch import load_file

from proxsparse import evaluate, prune
from proxsparse.errors import run_command
from proxsparse.io.mask_files import load_masks
from proxsparse.models.loading import load_model

QUICK = ["--num_samples", "8", "--seq_len", "32", "--eval_seq_len", "32", "--eval_max_windows", "2"]


def call(main, *arguments) -> None:
    """The command must succeed."""
    assert main(list(map(str, arguments))) == 0


def rows_in(file) -> list[dict]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_printed(capsys, *arguments) -> list[dict]:
    """What `proxsparse evaluate` prints as JSON."""
    call(evaluate.main, *arguments, "--json")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def result_of(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def run(main, model, text, output_dir, *flags) -> dict:
    """Runs train or prune on a model and a text; its result.json."""
    call(main, "--model", model, "--data", text, "--eval_data", text, "--output_dir", output_dir, *QUICK, *flags)
    return result_of(output_dir)


def pruned(model, folder, *flags):
    """The folder of a run of magnitude pruning."""
    call(prune.main, "--method", "magnitude", "--model", model, "--eval_data", "none", "--output_dir", folder, *flags)
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

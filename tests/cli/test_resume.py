"""kill -9, a signal, a full disk: the same command with --resume_from_checkpoint last gives the same bits."""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from commands import pruned, refused, result_of
from safetensors.torch import load_file, save_file
from tiny_models import save_texts, save_tiny_model

from proxsparse import finetune, prune, train
from proxsparse.run import job

RESUME = ["--resume_from_checkpoint", "last"]
QUICK = ["--seq_len", "32", "--precision", "fp32", "--eval_seq_len", "32", "--eval_max_windows", "2"]
STEPS = ["--num_samples", "8", "--save_steps", "2"]
MIXED = ["--method", "wanda", "--allocation", "sensitivity", "--target_flops", "0.7"]
EVERYTHING = "--distill 0.5 --precision bf16 --moment_dtype fp32 --gradient_accumulation_steps 2 --save_total_limit 2"
PAPER = "--objective paper --precision bf16 --frozen_lambda 0.2 --master_weights"
RUNS = {
    "prune sparsegpt": (prune.main, ["--method", "sparsegpt", "--num_samples", "4"]),
    "prune finetune": (prune.main, ["--method", "sparsegpt", "--finetune", *STEPS]),
    "prune mixed": (prune.main, [*MIXED, "--num_samples", "4"]),
    "train": (train.main, STEPS),
    "train stored": (train.main, [*STEPS, "--num_samples", "40000", "--max_steps", "5"]),  # the tokens are in a file
    "train everything": (train.main, [*STEPS, *EVERYTHING.split()]),
    "train paper": (train.main, [*STEPS, *PAPER.split()]),
    "finetune": (finetune.main, [*STEPS, "--packing", "false", "--held_out", "2", "--evals", "4"]),
}
ONE_SHOT = ("prune sparsegpt", "prune mixed")
QUICK_RUNS = ("prune sparsegpt", "prune finetune", "train", "finetune")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The model, the pruned model, the text."""
    folder = tmp_path_factory.mktemp("inputs")
    model, text = save_tiny_model("llama", folder / "model", num_hidden_layers=3), save_texts(folder / "text.jsonl")
    return model, pruned(model, folder / "pruned"), text


@pytest.fixture(scope="module")
def arguments_of(inputs):
    """arguments_of(run, output_dir, *more) -> the main function and the command line."""
    model, pruned, text = inputs

    def arguments(run, output_dir, *more):
        main, flags = RUNS[run]
        source = [str(pruned)] if main is finetune.main else ["--model", str(model)]
        data = ["--data", str(text), "--eval_data", str(text), "--output_dir", str(output_dir)]
        return main, [*source, *data, *QUICK, *flags, *more]

    return arguments


@pytest.fixture(scope="module")
def undisturbed(arguments_of, tmp_path_factory):
    """undisturbed(run) -> the outcome of a run without interruption."""
    found = {}

    def outcome_of(run):
        if run not in found:
            output_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
            main, arguments = arguments_of(run, output_dir)
            assert main(arguments) == 0
            found[run] = outcome(output_dir)
        return found[run]

    return outcome_of


def outcome(output_dir):
    """What must not depend on interruptions: masks and weights bit by bit, perplexity, the figures of every step."""
    assert {path.name for path in output_dir.glob(".*")} <= {".proxsparse.json"}
    assert not (output_dir / "checkpoints").exists()
    result = result_of(output_dir)
    tensors = load_file(output_dir / "masks.safetensors") | load_file(output_dir / "model.safetensors")
    bits = {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    metrics = output_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) | {"seconds": None} for line in lines]
    names = "status", "masks_sha256", "perplexity", "steps", "tokens", "mask_similarity", "feasible_share", "held_out"
    return bits, rows, {name: result.get(name) for name in names}


@pytest.fixture
def command_in_child(forks, tmp_path):
    """command_in_child(main, arguments, how to disturb it) -> exit code, or minus the signal; what it prints."""

    def run(main, arguments, **disturbed):
        output = tmp_path / "printed"
        output.unlink(missing_ok=True)
        (code,) = forks.run(arguments, output=output, main=f"{main.__module__}.main", **disturbed)
        return code, output.read_text()

    return run


def saved(output_dir):
    return sorted(path.name for path in (output_dir / "checkpoints").glob("[!.]*"))


# ---------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("run", QUICK_RUNS)
def test_killed_in_the_middle(run, arguments_of, undisturbed, command_in_child, tmp_path):
    """Before the first checkpoint has its name, after it, and before the model has its names."""
    main, arguments = arguments_of(run, tmp_path / "run", *RESUME)
    counts = []
    for number in (4, 6, 8):
        code, stderr = command_in_child(main, arguments, at_rename=(number, signal.SIGKILL))
        assert code == -signal.SIGKILL, stderr
        counts.append(len(saved(tmp_path / "run")))
    assert counts[0] < counts[-1] or run not in ONE_SHOT
    assert command_in_child(main, arguments)[0] == 0
    assert outcome(tmp_path / "run") == undisturbed(run)


def test_killed_while_a_thread_writes_checkpoints(arguments_of, undisturbed, command_in_child, tmp_path):
    """As on a GPU; the results are those of a run without the thread."""
    main, arguments = arguments_of("train", tmp_path / "run", *RESUME)
    for number in (4, 5, 6, 8):
        code, stderr = command_in_child(main, arguments, in_thread=True, at_rename=(number, signal.SIGKILL))
        assert code == -signal.SIGKILL, stderr
    assert saved(tmp_path / "run")
    assert command_in_child(main, arguments, in_thread=True)[0] == 0
    assert outcome(tmp_path / "run") == undisturbed("train")


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_killed_at_every_rename(run, arguments_of, undisturbed, command_in_child, tmp_path):
    """The same command again and again, each time killed one rename later; at last it gets through."""
    main, arguments = arguments_of(run, tmp_path / "run", *RESUME)
    for number in itertools.count(1):
        code, stderr = command_in_child(main, arguments, at_rename=(number, signal.SIGKILL))
        if code == 0:
            break
        assert code == -signal.SIGKILL, stderr
    assert number > 5
    assert outcome(tmp_path / "run") == undisturbed(run)
    code, stderr = command_in_child(main, arguments)
    assert code == 0
    assert outcome(tmp_path / "run") == undisturbed(run)


@pytest.mark.slow
@pytest.mark.parametrize("run", QUICK_RUNS)
def test_killed_at_twenty_random_moments(run, arguments_of, undisturbed, forks, tmp_path):
    """A run that gets through between two kills starts again in an empty folder."""
    main, arguments = arguments_of(run, tmp_path / "run", *RESUME)
    start, kills = time.monotonic(), 0
    assert forks.run(arguments, main=f"{main.__module__}.main") == [0]
    seconds = time.monotonic() - start
    while kills < 20:
        if (tmp_path / "run" / "result.json").exists():
            assert forks.run(arguments, main=f"{main.__module__}.main") == [0]
            assert outcome(tmp_path / "run") == undisturbed(run)
            shutil.rmtree(tmp_path / "run")
        process = forks.start(arguments, f"{main.__module__}.main", tmp_path / "printed")
        time.sleep(random.uniform(0, seconds))
        os.kill(process, signal.SIGKILL)
        code = forks.wait(process)
        assert code in (0, -signal.SIGKILL), (tmp_path / "printed").read_text()
        kills += code != 0
    assert forks.run(arguments, main=f"{main.__module__}.main") == [0]
    assert outcome(tmp_path / "run") == undisturbed(run)


# ---------------------------------------------------------------------------------------------- stopped


@pytest.mark.parametrize("act", [signal.SIGTERM, signal.SIGINT, "full"])
@pytest.mark.parametrize("run", QUICK_RUNS)
def test_a_signal_and_a_full_disk_say_how_to_resume(run, act, arguments_of, undisturbed, command_in_child, tmp_path):
    """After a signal during mask learning and fine-tuning the model so far is saved as well."""
    main, arguments = arguments_of(run, tmp_path / "run")
    number = 9 if run == "prune finetune" else 6  # after its pruning
    code, stderr = command_in_child(main, arguments, at_rename=(number, act))
    last = stderr.strip().splitlines()[-1]
    assert code == (2 if act == "full" else 128 + act)
    assert ("the disk is full" in last) == (act == "full")
    assert f"to resume, run the same command with --output_dir {tmp_path / 'run'} --resume_from_checkpoint last" in last
    if act == "full":
        assert saved(tmp_path / "run")
    elif run not in ONE_SHOT:
        assert result_of(tmp_path / "run")["status"] == "interrupted"
        assert (tmp_path / "run" / "model.safetensors").exists()
    assert command_in_child(main, [*arguments, *RESUME])[0] == 0
    assert outcome(tmp_path / "run") == undisturbed(run)


@pytest.mark.parametrize("run", [*QUICK_RUNS, "train stored"])
def test_a_signal_before_anything_is_saved_leaves_nothing(run, arguments_of, command_in_child, tmp_path):
    main, arguments = arguments_of(run, tmp_path / "run")
    code, stderr = command_in_child(main, arguments, at_rename=(2, signal.SIGINT))
    assert code == 128 + signal.SIGINT
    last = "interrupted; nothing has been saved; to start again, run the same command"
    assert stderr.strip().splitlines()[-1] == last
    assert not (tmp_path / "run").exists()


def test_a_signal_while_a_checkpoint_is_written(arguments_of, undisturbed, command_in_child, tmp_path):
    """torch.distributed.checkpoint wraps whatever interrupts it."""
    main, arguments = arguments_of("prune sparsegpt", tmp_path / "run")
    code, stderr = command_in_child(main, arguments, before=("safetensors.torch.save", 2, "term"))
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; 1 decoder block in checkpoints/ saved; to resume" in stderr.strip().splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert command_in_child(main, [*arguments, *RESUME])[0] == 0
    assert outcome(tmp_path / "run") == undisturbed("prune sparsegpt")


def test_a_signal_while_the_model_is_saved_loses_nothing(arguments_of, undisturbed, command_in_child, tmp_path):
    main, arguments = arguments_of("train", tmp_path / "run", "--save_steps", "100")
    moment = ("proxsparse.run.folder.save_model", 1, "term")
    assert command_in_child(main, arguments, before=moment)[0] == 128 + signal.SIGTERM
    bits, rows, figures = outcome(tmp_path / "run")
    assert (bits, rows) == undisturbed("train")[:2]
    assert (figures["status"], figures["perplexity"]) == ("complete", None)


# ---------------------------------------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def stopped_folder(arguments_of, forks, tmp_path_factory):
    """stopped_folder(run) -> the output folder of a run that was killed after its first checkpoint."""

    @functools.cache
    def stop(run):
        folder = tmp_path_factory.mktemp("stopped") / "run"
        main, arguments = arguments_of(run, folder, *RESUME)
        numbers = itertools.count(4)
        while not saved(folder):
            disturbed = {"main": f"{main.__module__}.main", "at_rename": (next(numbers), signal.SIGKILL)}
            assert forks.run(arguments, **disturbed) == [-signal.SIGKILL]
        return folder

    return stop


@pytest.fixture
def stopped(arguments_of, stopped_folder, tmp_path):
    """stopped(run) -> the main function and the command line of such a run, in a copy of its folder."""

    def copy(run):
        return arguments_of(run, shutil.copytree(stopped_folder(run), tmp_path / "run"))

    return copy


@pytest.mark.parametrize(
    ("run", "flags", "words"),
    [
        ("prune sparsegpt", ["--seed", "1"], "--seed 42 (now 1); give the same, or choose another --output_dir"),
        ("prune sparsegpt", ["--damping", "0.5"], "--damping 0.01 (now 0.5)"),
        ("prune sparsegpt", ["--method", "wanda"], "--method sparsegpt (now wanda)"),
        ("prune sparsegpt", ["--finetune"], "--finetune False (now True)"),
        ("prune sparsegpt", ["--method", "proxsparse"], "the command proxsparse prune (now train)"),
        ("prune sparsegpt", ["--include", "mlp"], "--include not set (now ['mlp'])"),
        ("train", ["--learning_rate", "0.1"], "--learning_rate 0.005 (now 0.1)"),
        ("train", ["--gradient_accumulation_steps", "2"], "times processes) 1 (now 2)"),
        ("finetune", ["--distill", "0.4"], "--distill 0.5 (now 0.4)"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_other_flags_are_refused_by_name(run, flags, words, stopped, capsys):
    main, arguments = stopped(run)
    refused(capsys, main, [*arguments, *flags, *RESUME], words)
    refused(capsys, main, arguments, "is not empty", "--resume_from_checkpoint last")


def test_flags_of_the_evaluation_may_differ(stopped, tmp_path):
    main, arguments = stopped("prune sparsegpt")
    assert main([*arguments, *RESUME, "--eval_max_windows", "1", "--device", "cpu"]) == 0
    assert result_of(tmp_path / "run")["perplexity"]["windows"] == 1


def test_a_changed_text_is_refused(inputs, stopped, capsys):
    main, arguments = stopped("train")
    text, content = inputs[2], inputs[2].read_text()
    text.write_text(content.replace("Document", "Paper"))
    try:
        refused(capsys, main, [*arguments, *RESUME], "has changed since the run was stopped")
    finally:
        text.write_text(content)


def test_a_changed_teacher_is_refused(arguments_of, command_in_child, capsys, tmp_path):
    teacher = save_tiny_model("llama", tmp_path / "teacher", num_hidden_layers=3)
    main, arguments = arguments_of("finetune", tmp_path / "run", "--teacher", str(teacher), *RESUME)
    assert command_in_child(main, arguments, at_rename=(6, signal.SIGKILL))[0] == -signal.SIGKILL
    assert saved(tmp_path / "run")
    weights = load_file(teacher / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, teacher / "model.safetensors", {"format": "pt"})
    refused(capsys, main, arguments, "its run has a teacher with the digest", "give the same")


@pytest.mark.parametrize("run", QUICK_RUNS)
def test_a_damaged_checkpoint_is_named_and_the_rest_is_used(run, stopped, undisturbed, capsys, tmp_path):
    main, arguments = stopped(run)
    path = tmp_path / "run" / "checkpoints" / saved(tmp_path / "run")[-1]
    tensors = next(path.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    for damaged, words in (
        (lambda: tensors.write_bytes(content), "has changed"),
        (lambda: (path / "facts.json").write_bytes(b"{"), "damaged"),
        (lambda: tensors.unlink(), "damaged"),
    ):
        damaged()
        refused(capsys, main, [*arguments, *RESUME], str(path), words, "delete this directory")
    shutil.rmtree(path)
    assert main([*arguments, *RESUME]) == 0
    assert outcome(tmp_path / "run") == undisturbed(run)


def test_last_starts_a_run_and_leaves_a_complete_one_alone(arguments_of, capsys, monkeypatch, tmp_path):
    main, arguments = arguments_of("prune sparsegpt", run_dir := tmp_path / "run", *RESUME)
    assert main(arguments) == 0
    assert f"no run to resume in {str(run_dir)!r}: starting it" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    (run_dir / "checkpoints").mkdir()  # of a run that was killed after its last file
    monkeypatch.setattr(job, "load_model", None)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"this run is complete; nothing to do; proxsparse evaluate {run_dir} measures it" in printed
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    refused(capsys, main, [*arguments, "--seed", "1"], "--seed 42 (now 1)")
    refused(capsys, main, arguments[:-2], "is not empty; choose another, or delete it")
    for flag in ("--resume_from_checkpoint", "last"):
        arguments.remove(flag)
    output = arguments.index("--output_dir")
    refused(capsys, main, [*arguments[:output], *arguments[output + 2 :], *RESUME], "requires --output_dir")

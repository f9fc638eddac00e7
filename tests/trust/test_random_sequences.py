"""Random sequences of commands on folders that also hold the user's files: the promises hold after every command.

    python -m pytest tests/trust                                              # 11 sequences, about 30 s
    PROXSPARSE_TRUST_SEQUENCES=200 python -m pytest -s tests/trust            # some ten minutes on one core
    PROXSPARSE_TRUST_SEED=17 PROXSPARSE_TRUST_SEQUENCES=1 python -m pytest -s tests/trust

A command is train, prune, pack, evaluate or report, with or without --overwrite_output_dir and
--resume_from_checkpoint last. It may be killed or interrupted at a random moment or before a random call of the
operating system, and another command may run at the same time. Sequence i has the seed PROXSPARSE_TRUST_SEED + i.
"""

import collections
import fcntl
import hashlib
import json
import os
import random
import re
import signal
import time
import traceback

import pytest
import torch
import yaml
from forks import Forks
from safetensors.torch import load_file
from tiny_models import save_texts, save_tiny_model

from proxsparse.io.mask_files import load_masks, masks_sha256
from proxsparse.io.output_folder import (
    COMPLETE,
    LOCK,
    MARKER,
    NEXT,
    RESULT,
    is_complete,
    is_scratch,
    read_marker,
    read_result,
)
from proxsparse.run.config import NOT_REPEATED

SEED = int(os.environ.get("PROXSPARSE_TRUST_SEED", "0"))
SEQUENCES = int(os.environ.get("PROXSPARSE_TRUST_SEQUENCES", "10"))
COMMANDS = 5  # of a sequence
RUNS = {  # name -> command and its own flags
    "train 1": "train --save_steps 2 --seed 1",
    "train 2": "train --save_steps 2 --seed 2",
    **{method: f"prune --method {method}" for method in ("magnitude", "wanda", "sparsegpt")},
}
SIZE = "--num_samples 6 --seq_len 24 --eval_seq_len 24 --eval_data none --precision fp32"
WEIGHTS = (3, 2, 1, 2, 2)  # how often each of them is chosen
CALLS = [f"os.{name}" for name in ("replace", "rename", "unlink", "mkdir", "fsync", "rmdir", "chmod")]
CALLS += [f"proxsparse.io.output_folder.{name}" for name in ("finish_replacement", "remove")]
CALLS += ["proxsparse.run.folder.finish"]
# The user's files in a folder of runs, and in a folder of the user's own.
IN_A_RUN = ("notes.md", "data.jsonl", "package.json", "figure.png", "precious.safetensors", "result.json.bak")
IN_A_RUN += ("model-final.safetensors", "checkpoint-12.zip", "custom.jinja", ".next-thesis", ".incomplete-thesis")
IN_A_PROJECT = (*IN_A_RUN, "README.md", "result.json", "metrics.jsonl", "masks.safetensors", "loss.png")
# Every refusal gives one of these reasons; any other error is a finding.
REFUSALS = (
    r"is not empty; choose another, or add --overwrite_output_dir",
    r"is not empty \(.*\) and no run of proxsparse has written there",
    r"another run \((pid \d+ on .*|just started)\) writes to",
    r"--resume_from_checkpoint: the run in .* has (--\w+|the command)",
    r"no metrics\.jsonl in this folder",
    r"not a folder",
    r"its folder has no .*, so no run wrote it, and the report would replace it; move it away",
    r"(metrics|result)\.jsonl?, line 1: not valid JSON",  # of a project
    r"not a model directory|no such file or folder",
    r"config\.json is missing; give the folder|model\.safetensors is missing; give the folder",
    r"a run is replacing the result, or was killed while replacing it",
    r"a run replaced the files while they were read; repeat",
    r"--output_dir .*: the folder of (the |--)model; choose another folder",
    r"MODEL_DIR .* is a file of|--model .* is a file of",
)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state_of(path):
    """What must stay: the target of a link, the mode and content of a file, the names in a folder."""
    if path.is_symlink():
        return os.readlink(path)
    return path.stat().st_mode, sorted(os.listdir(path)) if path.is_dir() else digest(path)


def tree(folder, ignored=None):
    return {path: state_of(path) for path in [folder, *folder.rglob("*")] if path.name != ignored}


@pytest.fixture(scope="module")
def forks():
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The model's folder and the calibration text."""
    folder = tmp_path_factory.mktemp("inputs")
    save_texts(folder / "text.jsonl", 8)
    save_tiny_model("llama", folder / "model")
    return folder


def arguments_of(name, inputs):
    """The command and the flags of a run."""
    command, *more = RUNS[name].split()
    return command, [*more, "--model", inputs / "model", "--data", inputs / "text.jsonl", *SIZE.split()]


def outcome(folder):
    """The bits of a result, and the rows of a training without their times."""
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    masks = masks_sha256(load_masks(folder / "masks.safetensors"))
    return masks, digest(folder / "model.safetensors"), [{**row, "seconds": None} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(forks, inputs, tmp_path_factory):
    """Name of a run -> its outcome where nothing disturbs it."""
    folder, found = tmp_path_factory.mktemp("undisturbed"), {}
    for name in RUNS:
        command, arguments = arguments_of(name, inputs)
        target = folder / name.replace(" ", "-")
        job = {"main": f"proxsparse.{command}.main", "output": folder / "log"}
        assert forks.run([*arguments, "--output_dir", target], **job) == [0], (folder / "log").read_text()
        found[name] = outcome(target)
    return found


class Sequence:
    """A folder with files of the user, and the commands that ran in it."""

    def __init__(self, seed, folder, forks, inputs, undisturbed, counts):
        self.random, self.folder, self.forks, self.inputs = random.Random(seed), folder, forks, inputs
        self.undisturbed, self.counts, self.history, self.logs = undisturbed, counts, [], 0
        self.run, self.project = folder / "run", folder / "project"
        self.project.mkdir()
        for name in IN_A_PROJECT:
            (self.project / name).write_text(f"the user's {name}")
        (self.project / "config.yaml").write_text("database: postgres\n")
        for place in (self.project / "checkpoint-9", folder / "elsewhere"):
            place.mkdir()
            (place / "thesis.tex").write_text("years of work")
        self.untouched = tree(self.project, ignored="project") | tree(folder / "elsewhere") | tree(inputs)
        self.has_user_files, self.stale_card = False, False
        self.seen = {masks for masks, _, _ in undisturbed.values()}

    def put_files(self):
        """The user puts files and links into the folder of the runs."""
        self.run.mkdir(exist_ok=True)
        for number, name in enumerate(IN_A_RUN):
            (self.run / name).write_text(f"the user's {name}")
            (self.run / name).chmod((0o600, 0o644, 0o755)[number % 3])
        (self.run / "checkpoint-final").mkdir()
        (self.run / "checkpoint-final" / "thesis.tex").write_text("years of work")
        (self.run / "checkpoint-9").symlink_to(self.folder / "elsewhere", target_is_directory=True)
        names = [*IN_A_RUN, "checkpoint-final", "checkpoint-final/thesis.tex", "checkpoint-9"]
        self.untouched |= {self.run / name: state_of(self.run / name) for name in names}
        self.has_user_files = True
        self.history.append("the user puts files into the folder")

    def job(self):
        """A random command: keyword arguments of `forks.child`."""
        choose = self.random.random
        reading = (2, 1, 1) if self.run.is_dir() else (0, 0, 0)
        kind = self.random.choices(["run", "pack", "evaluate", "report"], (6, *reading))[0]
        target = self.project if choose() < 0.1 else self.run
        flags = ["--overwrite_output_dir"] * (choose() < 0.7)
        if kind == "run":
            kind, arguments = arguments_of(self.random.choices(list(RUNS), WEIGHTS)[0], self.inputs)
            arguments += ["--output_dir", target, *flags, *["--resume_from_checkpoint", "last"] * (choose() < 0.5)]
        elif kind == "pack":
            source, target = self.run, self.folder / "packed"
            unpack = choose() < 0.4 and (target / "config.json").exists()
            if unpack:
                source, target = target, self.folder / "unpacked"
            target = self.run if choose() < 0.1 and not unpack else target
            arguments = [source, "--output_dir", target, *["--unpack"] * unpack, *flags]
        elif kind == "evaluate":
            arguments = [target, "--data", self.inputs / "text.jsonl", "--seq_len", "24", "--max_windows", "1"]
            arguments += ["--device", "cpu", "--json", self.folder / "scores.jsonl"]
        else:
            arguments = [target]
        self.logs += 1
        log = str(self.folder / f"log-{self.logs}")
        return {"main": f"proxsparse.{kind}.main", "arguments": list(map(str, arguments)), "output": log}

    def call(self):
        """A random call before which the process dies: function and number."""
        name = self.random.choice(CALLS)
        return name, self.random.randint(1, 4 if name.startswith("proxsparse") else self.random.choice((5, 35)))

    def step(self):
        """One command or two at once, disturbed or not; then everything that must hold."""
        jobs = [self.job() for _ in range(1 + (self.random.random() < 0.25))]
        for job in jobs:
            how = self.random.random()
            if how < 0.3:
                job["die_in"] = self.call()
            elif how < 0.55:
                number = self.random.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], (4, 1, 2))[0]
                job["signal"] = (int(number), self.random.uniform(0.0, 0.5))
            elif how < 0.65:
                job["term_in"] = self.call()
        self.history.append([dict(job) for job in jobs])
        before = self.whole(self.run)
        codes = self.forks.run_together(jobs)
        self.history.append(codes)
        for job, code in zip(jobs, codes, strict=True):
            self.counts.update((job["main"].split(".")[1], f"ended with {code}"))
            self.check_ending(job, code, alone=len(jobs) == 1)
        self.check(before)

    def check_ending(self, job, code, alone):
        """The exit code is a known one, and an error is one line with a known reason."""
        log = self.folder / job["output"]
        text = log.read_text() if log.exists() else ""
        before_it_began = (1, -signal.SIGINT, -signal.SIGTERM) if job.get("signal") and not text else ()
        assert code in (0, 2, 130, 143, -signal.SIGKILL, *before_it_began), (code, text)
        assert "Traceback" not in text, text
        if code != 2:
            return
        (line,) = [line for line in text.splitlines() if line.startswith(("error:", "usage:"))]
        assert text.splitlines()[-1] == line, text
        if not alone and re.search(r"^error: .*No such file or directory.*(safetensors|json|\.incomplete)", line):
            return  # the other command has just replaced or removed the files that this one reads
        known = next((words for words in REFUSALS if re.search(words, line)), None)
        assert known, text
        self.counts[f"refused: {known[:60]}"] += 1
        if "replaced the files" in line and ".report." in job["main"]:
            self.stale_card = True  # the message asks the user to write the report again

    def whole(self, folder):
        """The run id and the files of a complete result; None without one."""
        if not folder.is_dir() or not is_complete(folder):
            return None
        return read_result(folder)["run_id"], {
            path: state_of(path)
            for path in folder.iterdir()
            if path.is_file() and path.name not in ("report.md", "README.md", LOCK) and path.suffix != ".png"
            if not is_scratch(path)
        }

    def check(self, before):
        """The user's files are untouched, a complete result stays until the next one is complete, no lock is held."""
        for path, state in self.untouched.items():
            assert os.path.lexists(path), f"{path} is gone"
            assert state_of(path) == state, f"{path} has changed"
        new = {path.name for path in self.project.iterdir()} - {path.name for path in self.untouched}
        assert new <= {LOCK}, new
        for path in (self.run, self.run / NEXT):
            if path.is_dir() and is_complete(path):
                self.check_complete(path)
        if before is not None and not (self.run / COMPLETE).is_dir():
            after = self.whole(self.run)
            marker = read_marker(self.run)
            if marker["command"] == "pack":
                assert (self.run / "model.safetensors").exists()
            else:
                assert after is not None, "a complete result is gone"
                if after[0] == before[0]:
                    assert after[1] == before[1], "a complete result has changed"
        elif before is not None and (self.run / RESULT).exists() and any((self.run / COMPLETE).iterdir()):
            assert self.whole(self.run) == before, "the old result has changed before the new one was moved"
        if (self.run / "masks.safetensors").exists():  # of an interrupted run
            self.seen.add(masks_sha256(load_masks(self.run / "masks.safetensors")))
        self.check_packed()
        for folder in (self.run, self.project, self.folder / "packed"):
            if (folder / LOCK).exists():
                self.counts["lock files left by a kill"] += 1
                with (folder / LOCK).open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def check_complete(self, folder):
        """A complete result has all files of one run, and they agree."""
        result, marker = read_result(folder), read_marker(folder)
        assert result["run_id"] == marker["run_id"]
        expected = {k: v for k, v in result["config"].items() if v is not None and k not in NOT_REPEATED}
        assert yaml.safe_load((folder / "config.yaml").read_text()) == expected
        masks, weights = load_masks(folder / "masks.safetensors"), load_file(folder / "model.safetensors")
        assert masks_sha256(masks) == result["masks_sha256"]
        pretrained = load_file(self.inputs / "model" / "model.safetensors")
        for layer, mask in masks.items():
            weight = weights[f"{layer}.weight"]
            assert (weight[~mask].view(torch.int16) == 0).all()
            if not result["updated"]:
                kept = pretrained[f"{layer}.weight"][mask].view(torch.int16)
                assert weight[mask].view(torch.int16).equal(kept)
        found = outcome(folder)
        assert found == self.undisturbed[self.name_of(marker)]
        if "steps" in result:
            assert len(found[2]) == result["steps"] == 6
        else:
            assert not (folder / "metrics.jsonl").exists()
        if (folder / "README.md").exists() and not self.stale_card:
            assert result["masks_sha256"] in (folder / "README.md").read_text()
        self.counts["complete results checked"] += 1

    def name_of(self, marker):
        """The name in RUNS of the run that a marker belongs to."""
        settings = marker["settings"]
        return f"train {settings['seed']}" if marker["command"] == "train" else settings["method"]

    def check_packed(self):
        """A packed folder has all files and the masks of a run, or no weights."""
        for folder in (self.folder / "packed", self.folder / "unpacked"):
            if (folder / "model.safetensors").exists() and not (folder / COMPLETE).exists():
                names = {"config.json", "tokenizer.json", "tokenizer_config.json", "masks.safetensors"}
                assert names <= {path.name for path in folder.iterdir()}
                assert masks_sha256(load_masks(folder / "masks.safetensors")) in self.seen

    def finish(self):
        """`--resume_from_checkpoint last` of the right command completes with the bits of an undisturbed run."""
        found = [marker for path in (self.run / NEXT, self.run) if path.is_dir() and (marker := read_marker(path))]
        if (self.run / COMPLETE / MARKER).exists():
            found = [read_marker(self.run / COMPLETE)]
        if not found or found[0]["command"] == "pack":
            return
        name, log = self.name_of(found[0]), self.folder / "log-last"

        def succeed(command, *arguments):
            self.history.append((command, *arguments))
            assert self.forks.run(arguments, main=f"proxsparse.{command}.main", output=log) == [0], log.read_text()

        command, arguments = arguments_of(name, self.inputs)
        succeed(command, *arguments, "--output_dir", self.run, "--resume_from_checkpoint", "last")
        assert is_complete(self.run)
        assert self.name_of(read_marker(self.run)) == name
        assert not {path.name for path in self.run.iterdir()} & {COMPLETE, LOCK}
        self.check(None)
        self.counts["resumed at the end"] += 1
        packed, dense = self.folder / "at-the-end", self.folder / "dense-again"
        succeed("pack", self.run, "--output_dir", packed)
        succeed("pack", packed, "--output_dir", dense, "--unpack")
        assert digest(dense / "model.safetensors") == self.undisturbed[name][1]


@pytest.mark.parametrize("sequences", [1, pytest.param(SEQUENCES, marks=pytest.mark.slow)])
def test_the_promises_hold_after_every_command(sequences, forks, inputs, undisturbed, tmp_path, capsys):
    counts, started, findings = collections.Counter(), time.monotonic(), []
    for seed in range(SEED, SEED + sequences):
        folder = tmp_path / str(seed)
        folder.mkdir()
        sequence = Sequence(seed, folder, forks, inputs, undisturbed, counts)
        try:
            moment = sequence.random.randrange(COMMANDS + 2)
            for number in range(COMMANDS):
                marked = sequence.run.is_dir() and read_marker(sequence.run)
                if not sequence.has_user_files and number >= moment and marked:
                    sequence.put_files()
                sequence.step()
            sequence.finish()
        except Exception as error:  # the other sequences still run
            what = "".join(traceback.format_exception(error)[-4:])
            findings.append("\n".join([f"PROXSPARSE_TRUST_SEED={seed}:", *map(str, sequence.history), what]))
    seconds = time.monotonic() - started
    with capsys.disabled():
        print(f"\nPROXSPARSE_TRUST_SEED={SEED}, {sequences} sequences, {seconds:.0f} s:", dict(sorted(counts.items())))
    assert not findings, "\n\n".join([f"{len(findings)} findings", *findings])

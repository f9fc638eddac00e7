"""A run and its output directory: opening, saving the model, scoring, finishing."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from proxsparse.data.calibration import arrays_of
from proxsparse.errors import InputError, full_disk, is_lost_process
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.io import output_folder
from proxsparse.io.atomic import atomic_directory, require_space, sync, write_file
from proxsparse.io.checkpoints import CHECKPOINTS, STEP, TOKENS, Checkpoints, digest_of, saved_names, step_of
from proxsparse.io.mask_files import masks_sha256, save_masks
from proxsparse.io.output_folder import CONFIG, METRICS, RESULT, OutputFolder
from proxsparse.methods.pruned import Pruned
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.loading import load_model, save_model
from proxsparse.models.snap import apply_masks_, snap_
from proxsparse.patterns import NMPattern
from proxsparse.run import result as results
from proxsparse.run.args import LAST, NOT_REPEATED, RunArgs
from proxsparse.run.given import GivenMasks
from proxsparse.run.model_card import card_text
from proxsparse.run.report import write_report
from proxsparse.run.sections import counted
from proxsparse.runtime.device import choose_precision
from proxsparse.runtime.distributed import is_rank_zero, on_rank_zero, world_size
from proxsparse.runtime.sharding import gather_masks, gather_parameters, shard_and_move_

# Flags that a resumed run may change, because they change neither the masks nor the weights. 4 processes without
# accumulation equal 1 process with 4 passes; a checkpoint records their product.
MAY_DIFFER = (
    *NOT_REPEATED,
    *("recipe", "save_minutes", "save_steps", "save_total_limit", "pretrained_weights", "device"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "shard_within_node"),
    *("eval_data", "eval_seq_len", "eval_max_windows", "eval_bos"),
)


@dataclass
class Run:
    """A run that has begun, and its model."""

    args: RunArgs
    folder: OutputFolder
    device: torch.device
    model: nn.Module = field(init=False)
    tokenizer: object = field(init=False)
    layers: dict[str, nn.Linear] = field(init=False)  # that are pruned
    patterns: dict[str, NMPattern] = field(init=False)  # of these layers
    given: GivenMasks = field(init=False)  # of the layers that are pruned before the run
    pretrained: dict[str, Tensor] = field(init=False)  # parameter name -> W0, the rows of this process
    evaluate: Callable[[nn.Module, str], Perplexity | None] = lambda model, name: None  # held-out perplexity
    scores: dict[str, Perplexity | None] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self.weight_dtype, self.compute_dtype = choose_precision(self.args.hardware.precision, self.device)

    def checkpoints(self, batches: list[dict[str, Tensor]]) -> Checkpoints:
        """The checkpoints of this run, for its model and these samples."""
        identity = {"run_id": self.folder.run_id, "digest": digest_of(self.model, arrays_of(batches))}
        if self.args.training:
            steps = self.args.training.gradient_accumulation_steps * world_size()
            identity["batches per step (--gradient_accumulation_steps times processes)"] = steps
        return Checkpoints(self.folder.path, identity)

    def begin(self, updated: dict[str, nn.Linear]) -> None:
        """Writes config.yaml and moves the model to its device. `updated`: layers whose weights are in checkpoints."""
        hardware, path, blocks = self.args.hardware, self.folder.path, decoder_blocks(self.model)

        def prepare() -> None:
            saved = sum(layer.weight.numel() * self.weight_dtype.itemsize for layer in updated.values())
            require_space_for(self.model, path, saved)
            (path / RESULT).unlink(missing_ok=True)  # of the part of the run before it was interrupted
            flags = self.args.flags().items()
            settings = {name: value for name, value in flags if name not in NOT_REPEATED and value is not None}
            write_file(path / CONFIG, yaml.safe_dump(settings, sort_keys=False).encode())

        on_rank_zero(prepare)
        place = self.device, self.weight_dtype, hardware.pretrained_weights or "cpu", hardware.shard_within_node
        self.pretrained = shard_and_move_(self.model, blocks, *place)

    def save(self, pruned: Pruned) -> dict:
        """Writes the model under its masks (dense, zeros +0.0), its tokenizer, and the masks, atomically.

        The masks are those of the run, and those of the given model for its other layers. Returns the entries of
        result.json about the masks and the layers; right on rank zero.
        """
        snap_(self.model, self.pretrained, pruned.masks, pruned.trained)
        masks = gather_masks(pruned.masks, {name: layer.weight for name, layer in self.layers.items()})
        trained, given = gather_parameters(self.model, pruned.trained), self.given
        updated = bool(pruned.trained) or given.differ_from_base(masks)
        every, patterns = given.masks | masks, given.patterns | self.patterns

        def write() -> None:
            whole = whole_model(self.model, self.args.model.model, masks, trained)
            with atomic_directory(self.folder.path) as scratch:
                save_masks(scratch / output_folder.MASKS, every, patterns, **given.base, updated=updated)
                save_model(scratch, whole, self.tokenizer)

        on_rank_zero(write)
        pruned.stop.agree()
        pruned.stop.restore()
        facts = {"base_model": given.base["base_model"], "updated": updated, "masks_sha256": masks_sha256(every)}
        if given.patterns:
            facts["already_pruned"] = counted(given.patterns)
        if others := given.patterns.keys() - self.patterns.keys():
            facts["not_selected"] = len(others)
        return facts | results.layer_figures(self.model, patterns)

    def finish(self, pruned: Pruned, samples: int | None, figures: dict) -> int:
        """Measures the perplexity under the masks and those of the baselines, and writes the results.

        They are the model card, result.json, which marks the end of the run, and with metrics.jsonl the report. A
        complete run removes its checkpoints. Returns the exit code: 0, or 128 + the number of the signal that stopped
        the run. `samples`: number of calibration samples; None: the method needs none.
        """
        signal, path = pruned.stop.number, self.folder.path
        code = 128 + signal if signal else 0
        contenders = {"finetune" if self.args.finetune else self.args.method: pruned.masks} | pruned.baselines
        if not signal:
            measured = (self.model, self.pretrained, self.weight_dtype, self.evaluate, pruned.trained)
            scores, code = results.scores_under(contenders, *measured)
            self.scores |= scores
        if not is_rank_zero():
            return code
        table = None if signal else results.perplexity_table(self.scores, self.args.evaluate.eval_data)
        warnings = results.warnings_for(table, pruned.figures, samples, self.args)
        figures = {
            "status": "complete" if pruned.complete else "interrupted",
            "run_id": self.folder.run_id,
            "samples": samples or 0,
            **figures,
            "seconds": time.monotonic() - self.started + pruned.seconds_before,
            "resumed": self.folder.resumed,
            "world_size": world_size(),
            **pruned.figures,
            "perplexity": table,
            "warnings": [*self.model.source.notes, *warnings],
        }
        result = results.as_result(self.args, self.device, figures)
        if (path / METRICS).exists():
            sync(path / METRICS)
        write_file(path / "README.md", card_text(result).encode(errors="replace"))
        write_file(path / RESULT, (json.dumps(results.finite(result), indent=2) + "\n").encode())
        if (path / METRICS).exists():
            write_report(path)
        print(results.summary(result, path))
        if not pruned.complete:
            print(f"{progress_text(saved_names(path))} saved; {how_to_resume(path)}", file=sys.stderr)
            return code
        output_folder.remove_checkpoints(path)
        return code


@contextmanager
def opened(args: RunArgs) -> Iterator[OutputFolder]:
    """The output directory of a run, locked for this run within the block, see `output_folder.opened`.

    Rank 0 opens it for all processes. If the block fails with an error after which the same command may succeed, the
    error names what is saved and how to resume. Raises InputError as `output_folder.opened`.
    """
    with ExitStack() as stack:

        def enter() -> OutputFolder:
            path, resume = output_dir_of(args), args.output.resume_from_checkpoint is not None
            checks = {"resume": resume, "may_differ": MAY_DIFFER}
            folder = stack.enter_context(output_folder.opened(path, args.command, args.flags(), **checks))
            if resume and not folder.complete:
                what = f"resuming in {path}: {progress_text(saved_names(path)) or 'nothing saved yet'}"
                print(what if folder.resumed else f"no run to resume in {str(path)!r}: starting it", file=sys.stderr)
            return folder

        folder = on_rank_zero(enter)
        with progress_in_errors(folder.path):
            yield folder


def output_dir_of(args: RunArgs) -> Path:
    """--output_dir, else a new one. Raises InputError if a run without --output_dir is to be resumed."""
    if args.output.output_dir is not None:
        return Path(args.output.output_dir)
    if args.output.resume_from_checkpoint is not None:
        raise InputError(f"--resume_from_checkpoint {LAST} requires --output_dir")
    return Path(f"runs/{Path(args.model.model).name or 'model'}-{datetime.now():%Y%m%d-%H%M%S}")


def progress_text(saved: list[str]) -> str:
    """What a run resumes from: its last step, the number of its decoder blocks, its patterns or its tokens; or ""."""
    if steps := sorted(filter(STEP.fullmatch, saved), key=step_of):
        return f"{CHECKPOINTS}/{steps[-1]}"
    before = [name for name in ("patterns", TOKENS) if name in saved]
    if blocks := len(saved) - len(before):
        return f"{blocks} decoder block{'s' * (blocks > 1)} in {CHECKPOINTS}/"
    return f"{CHECKPOINTS}/{before[0]}" if before else ""


def how_to_resume(path: Path) -> str:
    """The end of a message about a stopped run that writes to `path`."""
    return f"to resume, run the same command with --output_dir {path} --resume_from_checkpoint {LAST}"


@contextmanager
def progress_in_errors(path: Path) -> Iterator[None]:
    """Adds what is saved, and how to resume, to an error of a signal, disk, network, GPU or other process."""
    try:
        yield
    except BaseException as error:
        external = (KeyboardInterrupt, OSError, dist.DistError, torch.AcceleratorError)
        if is_lost_process(error) or (is_rank_zero() and (isinstance(error, external) or full_disk(error))):
            with suppress(OSError):  # the disk may be unavailable
                saved = progress_text(saved_names(path))
                if saved or not path.is_dir():
                    state = f"{saved} saved" if saved else f"{path} cannot be reached"
                    error.add_note(f"{state}; {how_to_resume(path)}")
                elif isinstance(error, KeyboardInterrupt):
                    error.add_note("nothing has been saved; to start again, run the same command")
        raise


def require_space_for(model: nn.Module, path: Path, more: int = 0) -> None:
    """Raises InputError if the disk cannot hold the pruned model, its masks, small files, and `more` bytes."""
    weights = sum(p.numel() * p.element_size() + p.numel() // 8 for p in model.parameters())
    require_space(path, weights + more + 2**24)


def whole_model(model: nn.Module, name: str, masks: dict[str, Tensor], trained: dict[str, Tensor]) -> nn.Module:
    """The model; a sharded one is loaded again by its name, and gets the values of its trained parameters and masks."""
    if world_size() == 1:
        return model
    model, _ = load_model(name)
    for parameter_name, value in trained.items():
        model.get_parameter(parameter_name).data.copy_(value)
    apply_masks_(model, masks)
    return model


def nothing_left(folder: OutputFolder) -> bool:
    """Whether the resumed run is complete. If so, repeats the last actions, which a kill may have prevented."""
    if not folder.complete:
        return False
    if (folder.path / METRICS).exists():
        write_report(folder.path)
    output_folder.remove_checkpoints(folder.path)
    print(f"this run is complete; nothing to do; proxsparse evaluate {folder.path} measures it on other texts")
    return True

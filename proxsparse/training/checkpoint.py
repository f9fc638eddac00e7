"""Training checkpoints: a folder `checkpoint-STEP` from which a run resumes bit-exactly.

    checkpoint-200/shard-*.safetensors  weights, moments, scales, ...: torch.distributed.checkpoint in safetensors
    checkpoint-200/metrics.jsonl        the rows so far
    checkpoint-200/state.json           counters, settings, the size of every other file; written last

The folder is written under a temporary name, synced and renamed, so a folder with this name is complete. Each process
writes its rows of the weights; any number of processes can read them. Nothing is pickled.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError, describe_error
from proxsparse.io.atomic import SCRATCH, require_space, sync, write_file
from proxsparse.io.output_folder import checkpoints, remove, step_of
from proxsparse.runtime import distributed, sharding
from proxsparse.runtime.distributed import all_gather, on_rank_zero
from proxsparse.training.loop import TrainState
from proxsparse.training.optimizer import weights_of
from proxsparse.training.options import LearningOptions

STATE, METRICS = "state.json", "metrics.jsonl"
FILE_BYTES = 2**30  # approximate file size; each file is serialized in memory
COUNTERS = ("step", "batches", "tokens", "seconds")
OF_A_GROUP = ("prox_step", "reg_lambda", "initial_lr")


# ---------------------------------------------------------------------------------------------- what is saved


def is_due(state: TrainState, signal: int | None) -> bool:
    """Whether to save after this step: every --save_steps steps, and when a signal ends the run."""
    every = state.options.save_steps
    return state.step < state.steps and bool(signal or (every and state.step % every == 0))


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """All tensors of the state, by their names in the files."""
    found = {f"scale.{name}": one.scale for name, one in state.learned.items() if one.scale is not None}
    for name, weight in weights_of(state.optimizer).items():
        found[f"weight.{name}"] = weight.detach()
        held = state.optimizer.state.get(weight, {})
        found |= {f"{key}.{name}": value for key, value in held.items() if key != "step"}
    return (
        found
        | state.monitor.tensors()
        | {f"random.{kind}": all_gather(get()) for kind, (get, _) in random_generators(state.model.device).items()}
    )


def random_generators(device: torch.device) -> dict[str, tuple]:
    """Device type -> (get state, set state) of the random number generators that a run on this device uses."""
    found = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if device.type == "cuda":
        found["cuda"] = partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device)
    return found


def facts_of(state: TrainState, identity: dict) -> dict:
    """The rest of the state as JSON: `identity`, counters, and the optimizer's values that are not tensors."""
    held = {name: state.optimizer.state.get(weight, {}) for name, weight in weights_of(state.optimizer).items()}
    return identity | {
        **{name: getattr(state, name) for name in COUNTERS},
        "groups": [{key: group[key] for key in OF_A_GROUP} for group in state.optimizer.param_groups],
        "parameter_steps": {name: int(entries["step"]) for name, entries in held.items() if "step" in entries},
        "monitor": state.monitor.facts(),
    }


def size(state: TrainState) -> int:
    """Approximate bytes of a checkpoint: learned weights, moments, master weights."""
    added = (8 if state.optimizer.moment_dtype is None else 4) + (4 if state.optimizer.master_weights else 0)
    weights = weights_of(state.optimizer).values()
    copies = [*weights, *state.monitor.tensors().values()]
    return sum(copy.nbytes for copy in copies) + sum(weight.numel() for weight in weights) * added


def require_space_for(state: TrainState, run_dir: Path) -> None:
    """Raises InputError if the disk cannot hold --save_total_limit checkpoints and the one that is being written."""
    if state.options.save_steps:
        there = sum(file.stat().st_size for path in checkpoints(run_dir) for file in path.iterdir())
        needed = (state.options.save_total_limit + 1) * size(state) - there
        require_space(run_dir, needed, "the checkpoints (none with --save_steps 0) need")


def save(run_dir: Path, state: TrainState, identity: dict) -> None:
    """Writes the checkpoint of this step, then removes old ones. All processes must call it.

    Raises:
        OSError: the checkpoint could not be written; earlier checkpoints are unchanged.
    """
    import torch.distributed.checkpoint as dcp

    target, tensors = run_dir / f"checkpoint-{state.step}", tensors_of(state)
    scratch = target.with_name(f"{SCRATCH}-{target.name}")
    try:
        on_rank_zero(lambda: clear(scratch))
        with quiet():
            writer = dcp.HuggingFaceStorageWriter(str(scratch), file_numbers(tensors), save_distributed=True)
            dcp.save(tensors, storage_writer=writer)
        on_rank_zero(lambda: finish(scratch, target, facts_of(state, identity), state.options.save_total_limit))
    except (Exception, dcp.CheckpointException) as error:  # CheckpointException is not an Exception
        if distributed.is_rank_zero():
            shutil.rmtree(scratch, ignore_errors=True)
        reason = describe_error(cause_of(error))
        raise OSError(f"{target.name} could not be written to {str(run_dir)!r}: {reason}") from error


def clear(scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()


def finish(scratch: Path, target: Path, facts: dict, limit: int) -> None:
    """Writes state.json, renames the folder to `target`, and removes checkpoints beyond `limit`."""
    metrics = target.parent / METRICS
    shutil.copyfile(metrics, scratch / METRICS)
    sync(scratch / METRICS)
    sizes = {path.name: path.stat().st_size for path in sorted(scratch.iterdir())}
    write_file(scratch / STATE, (json.dumps(facts | {"files": sizes}) + "\n").encode())
    old = target.with_name(f"{SCRATCH}-old-{target.name}")
    if target.exists():  # written before the run was resumed from an earlier step
        target.rename(old)
    scratch.rename(target)
    sync(target.parent)
    *older, _ = [path for path in checkpoints(target.parent) if step_of(path) <= facts["step"]]
    for path in {*checkpoints(target.parent)} - {target, *older[max(0, len(older) - limit + 1) :]}:
        remove([path])  # also later steps, which were abandoned when the run was resumed from an earlier one
    shutil.rmtree(old, ignore_errors=True)


def file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Tensor name -> the number of its file, from 1; each file has about FILE_BYTES."""
    numbers, held, number = {}, 0, 1
    for name, tensor in tensors.items():
        held += tensor.nbytes // distributed.world_size()
        if held > FILE_BYTES:
            held, number = 0, number + 1
        numbers[name] = number
    return numbers


def cause_of(error: BaseException) -> BaseException:
    """The first error inside a CheckpointException, which collects those of all processes; else the error itself."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the warning of torch.distributed.checkpoint about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized")
        yield


# ---------------------------------------------------------------------------------------------- resuming


def read_facts(path: Path) -> dict:
    """The content of state.json, after checking that all files of the checkpoint are complete.

    Raises:
        InputError: there is no checkpoint, or it is damaged.
    """
    flag = f"--resume_from_checkpoint {path}"
    if not (path / STATE).is_file():
        raise InputError(f"{flag}: not a checkpoint directory (no {STATE}); give a checkpoint directory, or last")
    try:
        facts = json.loads((path / STATE).read_bytes())
        sizes = {name: (path / Path(name).name).stat().st_size for name in facts["files"]}
        missing = {*COUNTERS, "groups", "parameter_steps", "monitor"} - facts.keys()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{flag}: damaged ({describe_error(error)}); give another checkpoint") from error
    for name, expected in facts["files"].items():
        if sizes[name] != expected:
            raise InputError(f"{flag}: {name} has {sizes[name]} bytes, not {expected}; give another checkpoint")
    if missing:
        raise InputError(f"{flag}: {STATE} has no {sorted(missing)[0]}; give another checkpoint")
    return facts


def read_scales(path: Path, layers: dict[str, nn.Linear], options: LearningOptions) -> dict[str, Tensor]:
    """Layer name -> c, fp32 [in_features], on the layer's device; {} without a scaling."""
    scaled = layers.items() if options.scaling == "activation" else ()
    devices = {name: sharding.local(layer.weight).device for name, layer in scaled}
    found = {name: torch.empty(layer.in_features, device=devices[name]) for name, layer in scaled}
    load_(path, {f"scale.{name}": scale for name, scale in found.items()})
    return found


def restore_(path: Path, facts: dict, state: TrainState) -> None:
    """Restores the state of a run from a checkpoint. `facts`: the content of its state.json.

    Raises:
        InputError: a tensor is missing or has another shape or dtype.
    """
    saved = names_in(path)
    for name, weight in weights_of(state.optimizer).items():
        if f"exp_avg.{name}" in saved:  # a weight that has never had a gradient has no moments
            state.optimizer.prepare_state(weight)["step"].fill_(facts["parameter_steps"][name])
    state.monitor.prepare_(facts["monitor"])
    tensors = tensors_of(state)
    generators = random_generators(state.model.device)
    for name in [f"random.{kind}" for kind in generators]:
        tensors.pop(name)
        if name in saved:  # absent if written on another device type; one row for each process that wrote it
            tensors[name] = torch.empty(saved[name].size, dtype=torch.uint8)
    load_(path, tensors)
    for kind, (_, put) in generators.items():
        if (states := tensors.get(f"random.{kind}")) is not None:
            put(states[distributed.rank() if distributed.rank() < len(states) else 0].clone())  # must be aligned
    state.monitor.restore_(tensors)
    for group, values in zip(state.optimizer.param_groups, facts["groups"], strict=True):
        group |= {key: values[key] for key in OF_A_GROUP}
    for name in COUNTERS:
        setattr(state, name, facts[name])
    state.remask_()


def names_in(path: Path) -> dict:
    """Tensor name -> metadata of torch.distributed.checkpoint, for every tensor in the files.

    Raises:
        InputError: a file is damaged.
    """
    import torch.distributed.checkpoint as dcp

    try:
        return dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # of any type: a damaged header leads to many
        reason = f"damaged ({describe_error(error)}); give another checkpoint"
        raise InputError(f"--resume_from_checkpoint {path}: {reason}") from error


def load_(path: Path, tensors: dict[str, Tensor]) -> None:
    """Reads the tensors, or the rows of this process, from the files. All processes must call it.

    Raises:
        InputError: a tensor is missing or has another shape or dtype.
    """
    import torch.distributed.checkpoint as dcp

    saved = names_in(path) if tensors else {}
    for name, tensor in tensors.items():
        found = saved.get(name)
        held = found and (list(found.size), found.properties.dtype)
        if held != (list(tensor.shape), tensor.dtype):
            raise InputError(
                f"--resume_from_checkpoint {path}: {name} is {held or 'missing'}, expected {list(tensor.shape)} "
                f"{tensor.dtype}; give a checkpoint of this model and version"
            )
    with quiet():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)))

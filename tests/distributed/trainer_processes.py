"""The processes of test_trainer_fsdp2: `main([JOB, FOLDER, NAME])` saves its results in FOLDER."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from training import INPUTS, weights
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from proxsparse import hold_masks_, nm_mask
from proxsparse.integrations.transformers_trainer import HoldMasksCallback, ProxTrainerMixin
from proxsparse.runtime.distributed import init_process_group

SAMPLES, STEPS, BATCH = 32, 4, 4
STEP_OF_CHECKPOINT = 2
RAGGED = (1, 3, 5)  # out_features: of 2 and of 4 processes some hold fewer rows than others, some none


def main(arguments: list[str]) -> None:
    job, folder, name = arguments
    os.environ["PROXSPARSE_DEBUG"] = "1"  # an error is shown with its traceback
    init_process_group(torch.device("cpu"))
    globals()[job](Path(folder), name)
    if dist.is_initialized():
        dist.barrier()


class MaskTrainer(ProxTrainerMixin, Trainer):
    pass


def on_fsdp2(kind: type[Trainer]) -> type[Trainer]:
    """The same with accelerate's FSDP2 on a CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    class ShardedTrainer(kind):
        def create_accelerator_and_postprocess(self):
            """Sets what accelerate sets itself on accelerators only."""
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    return ShardedTrainer


def train_under_accelerate(folder: Path, name: str) -> None:
    train_with_trainer(folder, name, sharded=True, fsdp=True, save_strategy="steps", save_steps=STEP_OF_CHECKPOINT)


def resume_under_accelerate(folder: Path, name: str) -> None:
    """From the checkpoint of the run before, as if that had been interrupted; evaluated after each step."""
    checkpoint = folder / train_under_accelerate.__name__ / f"checkpoint-{STEP_OF_CHECKPOINT}"
    fsdp = {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}
    train_with_trainer(folder, name, sharded=True, resume=checkpoint, eval_strategy="steps", eval_steps=1, **fsdp)


def train_as_loaded(folder: Path, name: str) -> None:
    """transformers shards the model, and accelerate does not change that."""
    from transformers.distributed import DistributedConfig

    train_with_trainer(folder, name, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()))


def train_with_trainer(
    folder: Path, name: str, sharded: bool = False, resume: Path | None = None, distributed_config=None, **settings
) -> None:
    """Trains and saves into folder/name; seen-RANK.pt there holds what only this process can see."""
    placed = {"distributed_config": distributed_config} if distributed_config else {}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **placed)
    ours = {"reg_lambda": 0.02}
    trainer = make_trainer(on_fsdp2(MaskTrainer) if sharded else MaskTrainer, model, folder / name, ours, settings)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trainer.save_model()
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    seen = {
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "sharded": all(isinstance(parameter, DTensor) for parameter in held),
        "of the model": set(held) == set(trainer.model.parameters()),
        "with a state": set(held) == set(trainer.optimizer.state),
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    torch.save(seen, folder / name / f"seen-{os.environ.get('RANK', 0)}.pt")


def make_trainer(kind: type[Trainer], model: nn.Module, folder: Path, ours: dict, settings: dict) -> Trainer:
    """A Trainer that sees the same batches in any number of processes."""
    ids = torch.randint(260, (SAMPLES, 16), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        folder,
        **{"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no"} | settings,
        per_device_train_batch_size=BATCH // (dist.get_world_size() if dist.is_initialized() else 1),
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return kind(model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:4], **ours)


def fine_tune(folder: Path, name: str, kind: type[Trainer] = Trainer, **settings) -> None:
    """Fine-tunes a 2:4 model, twice: without a break, and from the checkpoint. Two processes use DDP."""
    settings |= {"weight_decay": 0.1, "max_grad_norm": 0.1, "save_strategy": "steps", "save_steps": STEP_OF_CHECKPOINT}
    result, checkpoint = [], None
    for _ in range(2):
        model = AutoModelForCausalLM.from_pretrained(folder / "pruned", dtype=torch.float32)
        names = [parameter for parameter, _ in model.named_parameters()]
        trainer = make_trainer(kind, model, folder / name, {"callbacks": [HoldMasksCallback()]}, settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        checkpoint = str(folder / name / f"checkpoint-{STEP_OF_CHECKPOINT}")
        held = [weight for weight in trainer.model.parameters() if weight._post_accumulate_grad_hooks is not None]
        assert len(held) == 14
        assert all(isinstance(weight, DTensor) == ("fsdp" in settings) for weight in held)
        result.append(dict(zip(names, weights(trainer.model), strict=True)))
    torch.save(result, folder / f"{name}-{os.environ.get('RANK', 0)}.pt")


def fine_tune_on_fsdp2(folder: Path, name: str) -> None:
    fine_tune(folder, name, on_fsdp2(Trainer), fsdp=True)


class Ragged(nn.ModuleList):
    """Parallel layers with few rows."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(inputs) for layer in self], dim=-1)


def hold_ragged_masks(folder: Path, name: str) -> None:
    """`hold_masks_` on layers with fewer rows than processes; only the first row of each has blocks of two nonzeros."""
    torch.manual_seed(0)
    model = Ragged(nn.Linear(8, rows, dtype=torch.float64) for rows in RAGGED)
    for layer in model:
        layer.weight.data *= nm_mask(layer.weight.data.abs(), "1:4")
        layer.weight.data[0, 1::4] = layer.weight.data[0, 3::4] = 0.5
        layer.weight.data[0, 0::4] = layer.weight.data[0, 2::4] = 0.0
    if dist.is_initialized():
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    hold_masks_(optimizer)
    for _ in range(4):
        for _ in range(2):
            model(INPUTS).sin().square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with CommDebugMode() as communication:
            optimizer.step()
        assert not communication.get_total_counts(), "the step communicates"
        optimizer.zero_grad()
    moments = [optimizer.state[parameter]["exp_avg_sq"] for parameter in model.parameters()]
    moments = [value.full_tensor() if isinstance(value, DTensor) else value for value in moments]
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    result = {"weights": weights(model), "moments": moments, "norm": norm}
    torch.save(result, folder / f"{name}-{os.environ.get('RANK', 0)}.pt")

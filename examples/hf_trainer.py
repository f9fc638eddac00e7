"""ProxOptimizer inside transformers.Trainer: learn a 2:4 mask of a causal language model, then snap to it.

    python examples/hf_trainer.py                                  # tiny random Llama, offline, some seconds
    python examples/hf_trainer.py --model NAME --text FILE         # your model, your text

All that Trainer needs is another `create_optimizer`; mixed precision, accumulation and checkpoints stay its business.
The snap takes every weight back to its pretrained value, or to zero where the mask prunes it.
The tiny model's "pretrained" weights are random: it shows the mechanics, its quality after the snap means nothing.
For the whole method (calibration data, metric, reports) use `python -m proxsparse.train`.
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments

from proxsparse import NMPattern, ProxOptimizer, nm_mask
from proxsparse.models import copy_weights, prunable_layers, snap_
from proxsparse.monitor import feasible_share

PATTERN = NMPattern.parse("2:4")


class ProxTrainer(Trainer):
    """Trainer whose optimizer ends every step with the prox on the model's `prunable_layers`."""

    def __init__(self, *args, reg_lambda: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.reg_lambda = reg_lambda

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's own optimizer, with the parameters that are not pruned moved to groups with reg_lambda = 0."""
        base = super().create_optimizer(model)
        pruned = {layer.weight for layer in prunable_layers(self.model, PATTERN).values()}
        for group in list(base.param_groups):
            others = [parameter for parameter in group["params"] if parameter not in pruned]
            group["params"] = [parameter for parameter in group["params"] if parameter in pruned]
            base.add_param_group({**group, "params": others, "reg_lambda": 0.0})
        self.optimizer = ProxOptimizer(base, self.reg_lambda, PATTERN)
        return self.optimizer


def tiny_llama() -> nn.Module:
    """A random Llama of two decoder blocks, small enough for any CPU."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config)


def counting_samples(samples: int = 256, length: int = 32, vocabulary: int = 64) -> list[dict]:
    """Rows that count upwards in steps of 1 to 7 from a random start: something a tiny model can learn."""
    start, stride = torch.randint(vocabulary, (samples, 1)), torch.randint(1, 8, (samples, 1))
    return as_dataset((start + stride * torch.arange(length)) % vocabulary)


def text_samples(model_name: str, path: str, length: int = 512) -> list[dict]:
    """The tokens of a text file in windows of `length`."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    with open(path, encoding="utf-8") as file:
        ids = tokenizer(file.read(), return_tensors="pt").input_ids[0]
    return as_dataset(ids[: len(ids) // length * length].view(-1, length))


def as_dataset(ids: torch.Tensor) -> list[dict]:
    """[samples, length] -> what Trainer's default collator takes."""
    return [{"input_ids": row, "labels": row} for row in ids]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Learn a 2:4 mask with transformers.Trainer and ProxOptimizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="model name or folder; a tiny random Llama without it")
    parser.add_argument("--text", help="text file to train on, required with --model")
    parser.add_argument("--max_steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--reg_lambda", type=float, default=0.5, help="lambda_1, in units of 1/|w|")
    parser.add_argument("--output_dir", help="where to save the pruned model; not saved without it")
    arguments = parser.parse_args(argv)
    if bool(arguments.model) != bool(arguments.text):
        parser.error("--model and --text go together")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    torch.manual_seed(0)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        samples = text_samples(arguments.model, arguments.text)
    else:
        model, samples = tiny_llama(), counting_samples()

    layers, pretrained = prunable_layers(model, PATTERN), copy_weights(model)
    with tempfile.TemporaryDirectory() as scratch:
        training = TrainingArguments(
            output_dir=scratch,
            max_steps=arguments.max_steps,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=8,
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, arguments.max_steps // 4),
        )
        trainer = ProxTrainer(model=model, args=training, train_dataset=samples, reg_lambda=arguments.reg_lambda)
        trainer.train()

    print(f"2:4 blocks after training: {feasible_share(layers, PATTERN):.1%}")
    snap_(model, pretrained, {name: nm_mask(layer.weight.detach().abs(), PATTERN) for name, layer in layers.items()})
    print(f"2:4 blocks after the snap: {feasible_share(layers, PATTERN):.1%}")
    if arguments.output_dir:
        model.save_pretrained(arguments.output_dir)
        print(f"saved to {arguments.output_dir}")


if __name__ == "__main__":
    main()

"""ProxSparse inside transformers.Trainer: learn a 2:4 mask of a causal language model, then apply it.

    python examples/hf_trainer.py                                  # tiny random Llama, offline, some seconds
    python examples/hf_trainer.py --model NAME --text FILE         # your model, your text
    accelerate launch examples/hf_trainer.py --fsdp ...            # many GPUs, FSDP2

`ProxTrainerMixin` creates the optimizer and saves the masks; Trainer handles mixed precision, accumulation and
checkpoints as usual. At the end the masks are applied to the pretrained weights.
The "pretrained" weights of the tiny model are random, so its quality is meaningless.
For the complete method (calibration data, scaling, reports) use `proxsparse train`.
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments

from proxsparse import apply_masks_
from proxsparse.integrations.transformers_trainer import ProxTrainerMixin


class MaskTrainer(ProxTrainerMixin, Trainer):
    """A Trainer whose optimizer applies the prox after every step."""


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
    """Rows that count upwards in steps of 1 to 7 from a random start, which a tiny model can learn."""
    start, stride = torch.randint(vocabulary, (samples, 1)), torch.randint(1, 8, (samples, 1))
    return as_dataset((start + stride * torch.arange(length)) % vocabulary)


def text_samples(model_name: str, path: str, length: int = 512) -> list[dict]:
    """The tokens of a text file in windows of `length`."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    with open(path, encoding="utf-8") as file:
        ids = tokenizer(file.read(), return_tensors="pt").input_ids[0]
    return as_dataset(ids[: len(ids) // length * length].view(-1, length))


def as_dataset(ids: torch.Tensor) -> list[dict]:
    """[samples, length] -> a data set for the default collator of Trainer."""
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
    parser.add_argument("--fsdp", action="store_true", help="shard the model over all processes (FSDP2)")
    parser.add_argument("--report_to", default="none", help="tensorboard, wandb or any other tracker of Trainer")
    parser.add_argument("--output_dir", help="where to save the pruned model and its masks; not saved without it")
    arguments = parser.parse_args(argv)
    if bool(arguments.model) != bool(arguments.text):
        parser.error("--model and --text go together")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)

    def pretrained() -> nn.Module:
        torch.manual_seed(0)
        name = arguments.model
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) if name else tiny_llama()

    model = pretrained()
    samples = text_samples(arguments.model, arguments.text) if arguments.model else counting_samples()
    with tempfile.TemporaryDirectory() as scratch:
        training = TrainingArguments(
            output_dir=arguments.output_dir or scratch,
            max_steps=arguments.max_steps,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=8,
            save_strategy="no",
            logging_steps=max(1, arguments.max_steps // 4),
            fsdp=arguments.fsdp or None,
            report_to=arguments.report_to,
            use_cpu=not torch.accelerator.is_available(),
        )
        trainer = MaskTrainer(model=model, args=training, train_dataset=samples, reg_lambda=arguments.reg_lambda)
        trainer.train()  # saves masks.safetensors
    if trainer.is_world_process_zero():
        shares = [row["feasible_share"] for row in trainer.state.log_history if "feasible_share" in row]
        print(f"2:4 blocks: {shares[-1]:.1%}; {len(trainer.masks)} layers have masks")
        if arguments.output_dir:
            pruned = pretrained()
            apply_masks_(pruned, trainer.masks)
            pruned.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()

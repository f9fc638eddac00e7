"""What a run costs on N devices: operations, bytes over the network, time. The machine is assumed, nothing is measured.

Weights that are multiplied with activations are L, those of them that learn L', tokens of a device's step T, decoder
blocks B, their attention's width A = heads * head_dim.
"""

import math
from dataclasses import dataclass

from proxsparse.plan.memory import Shape, dtypes_of, held
from proxsparse.run.config import TrainConfig

# NVIDIA's data sheet of the H200 SXM: dense bf16 operations/s, bytes/s of its memory, of NVLink in one direction; and
# an InfiniBand port of 400 Gb/s and 16 lanes of PCIe 5 to the host for every GPU, eight of which share a node.
FLOPS, MEMORY, NVLINK, NETWORK, HOST, NODE = 989e12, 4.8e12, 450e9, 50e9, 64e9, 8
UTILISATION = 0.4  # of FLOPS, of MEMORY and of the links alike: what well-tuned training reaches; not measured here
DEVICES = tuple(2**power for power in range(10))  # 1 to 512


@dataclass(frozen=True)
class Cost:
    """Of a step: documents of all devices; operations, bytes received and seconds of each. And the steps of a run."""

    documents: int
    steps: int
    operations: float
    network: float
    seconds: float

    @property
    def run_seconds(self) -> float:
        return self.steps * self.seconds


def cost(shape: Shape, config: TrainConfig, devices: int) -> Cost:
    """Computing and the network overlap, the optimizer's step follows."""
    documents = config.per_device_train_batch_size * config.gradient_accumulation_steps
    operations = documents * operations_of_a_document(shape, config)
    network = bytes_received(shape, config, devices)
    link = NVLINK if devices <= NODE else NETWORK
    passes = max(operations / FLOPS, network / link) / UTILISATION
    step = bytes_of_a_step(shape, config) / MEMORY + bytes_from_host(shape, config) / HOST
    seconds = passes + step / devices / UTILISATION
    return Cost(documents * devices, steps_of(config, devices), operations, network, seconds)


def operations_of_a_document(shape: Shape, config: TrainConfig) -> float:
    """2 T (2 L + L') + 6 T^2 A B: products forward, for the inputs' gradients, for the weights'; causal attention.

    With gradient checkpointing the forward pass of the decoder blocks counts once more.
    """
    tokens = config.seq_len
    learned = shape.prunable if config.update == "prunable" else shape.linear
    again = shape.blocks * shape.block if config.gradient_checkpointing else 0
    attention = (8 if config.gradient_checkpointing else 6) * tokens**2 * shape.attention
    return 2.0 * tokens * (2 * shape.linear + learned + again) + attention


def bytes_received(shape: Shape, config: TrainConfig, devices: int) -> float:
    """FSDP2, a device and a step: (N - 1) / N of all weights for each pass forward and back, of the gradients after."""
    weight = dtypes_of(config)[0].itemsize
    moved = weight * (2 * shape.weights + shape.learned(config))
    return config.gradient_accumulation_steps * moved * (devices - 1) / devices


def bytes_of_a_step(shape: Shape, config: TrainConfig) -> float:
    """What the optimizer reads and writes: the gradient, and all that is held twice."""
    return 2.0 * sum(held(shape, config).values()) + dtypes_of(config)[0].itemsize * shape.learned(config)


def bytes_from_host(shape: Shape, config: TrainConfig) -> float:
    """W0, which every new mask needs, where it waits there."""
    waits_there = config.forward == "masked" and config.pretrained_weights != "device"
    return float(shape.file_bytes * shape.prunable if waits_there else 0)


def steps_of(config: TrainConfig, devices: int) -> int:
    """--max_steps, or what the epochs give where every step takes a document a device."""
    if config.max_steps > 0:
        return config.max_steps
    documents = config.per_device_train_batch_size * config.gradient_accumulation_steps * devices
    return config.average_runs * max(1, math.floor(config.num_samples * config.num_train_epochs / documents))


def sensible_devices(config: TrainConfig) -> list[int]:
    """1, 2, 4, ... as long as every device has a document a step, at most 512."""
    documents = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return [count for count in DEVICES if count == 1 or count * documents <= config.num_samples]

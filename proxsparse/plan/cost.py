"""Operations, network traffic and time of a run on N devices, computed from data sheets: nothing is measured."""

from typing import NamedTuple

from proxsparse.plan.memory import Plan

# NVIDIA's data sheet of the H200 SXM: dense bf16 operations/s, bytes/s of its memory and of NVLink in one direction.
# Assumed: for every GPU one InfiniBand port of 400 Gb/s and 16 lanes of PCIe 5 to the host; 8 GPUs per node.
FLOPS, MEMORY, NVLINK, NETWORK, HOST, NODE = 989e12, 4.8e12, 450e9, 50e9, 64e9, 8
UTILIZATION = 0.4  # of FLOPS, MEMORY and all links: what well-tuned training reaches; not measured here
DEVICES = tuple(2**power for power in range(10))  # 1 to 512


class Cost(NamedTuple):
    """The cost of one step, and how many steps the run has."""

    documents: int  # on all devices
    steps: int
    operations: float  # on each device
    network: float  # bytes that each device receives
    seconds: float


def cost(plan: Plan, devices: int) -> Cost:
    """The cost on N devices.

    operations of a document = 2 T (2 L + L') + 6 T^2 A: forward, gradients of the inputs, gradients of the weights, and
    causal attention. T: tokens, L: weights in matrix products, L': those of them that learn, A: attention width summed
    over the blocks. Gradient checkpointing repeats the forward pass of the decoder blocks, and --match_hidden adds a
    forward pass of the dense model.

    bytes received = (N - 1) / N * (2 * all weights + gradients) per pass (FSDP2). Computation and network overlap; the
    optimizer step follows and reads and writes everything that is held.
    """
    config, shape, weight = plan.config, plan.shape, plan.weight_bytes
    tokens, again, teacher = config.seq_len, config.gradient_checkpointing, config.match_hidden > 0
    own_documents = config.per_device_train_batch_size * config.gradient_accumulation_steps
    learned = shape.linear if plan.all_learn else shape.prunable
    products = 2.0 * tokens * ((2 + teacher) * shape.linear + learned + again * shape.blocks * shape.block)
    operations = own_documents * (products + (6 + 2 * again + 2 * teacher) * tokens**2 * shape.attention)
    passes = config.gradient_accumulation_steps
    network = passes * weight * ((2 + teacher) * shape.weights + plan.learned) * (devices - 1) / devices
    link = NVLINK if devices <= NODE else NETWORK
    optimizer = (2 * sum(plan.held().values()) + weight * plan.learned) / MEMORY
    if plan.masked and config.pretrained_weights != "device":  # every new mask reads W0; the teacher too, and after it
        optimizer += (1 + 2 * passes * teacher) * shape.file_bytes * shape.prunable / HOST
    seconds = (max(operations / FLOPS, network / link) + optimizer / devices) / UTILIZATION
    documents = own_documents * devices
    steps = max(1, int(config.num_samples * config.num_train_epochs / documents))
    return Cost(documents, config.max_steps if config.max_steps > 0 else steps, operations, network, seconds)

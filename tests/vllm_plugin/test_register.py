"""The entry point of vLLM: what it does in any installation, also without vLLM. vLLM itself is replaced."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from proxsparse.integrations.vllm_plugin import register

PARENTS = ("vllm", "vllm.model_executor", "vllm.model_executor.layers")


def replace_vllm(monkeypatch, quantization: object) -> None:
    """Replaces vLLM by its module `quantization`."""
    for name in PARENTS:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[PARENTS[-1]], "quantization", quantization, raising=False)


def test_the_entry_point_is_register():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["proxsparse"].partition(":")
    assert getattr(import_module(module), function) is register


def test_register_does_nothing_if_vllm_has_the_method_already(monkeypatch):
    quantization = ModuleType("quantization")
    quantization.QUANTIZATION_METHODS = ["awq", "proxsparse"]
    replace_vllm(monkeypatch, quantization)
    register()
    assert quantization.QUANTIZATION_METHODS == ["awq", "proxsparse"]


@pytest.mark.parametrize("version", ["no vLLM", "no list of methods", "no base class"])
def test_register_never_raises(monkeypatch, caplog, version):
    quantization = ModuleType("quantization")
    if version == "no base class":
        quantization.QUANTIZATION_METHODS = []
    replace_vllm(monkeypatch, quantization)
    if version == "no vLLM":
        monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert "the plug-in does not fit this version of vLLM" in caplog.text

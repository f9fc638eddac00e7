"""README and docs: every snippet runs, every command line is accepted by its parser, named files and flags exist."""

import gzip
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from pruned import prune_
from tiny_models import byte_tokenizer, save, save_tiny_model, tiny_model

import proxsparse
from proxsparse import apply, evaluate, pack, serve, sparsify_
from proxsparse._start import COMMANDS
from proxsparse.allocations.registry import ALLOCATIONS
from proxsparse.data.sources import evaluation_text, load_texts
from proxsparse.evaluation import zero_shot
from proxsparse.methods import list_methods
from proxsparse.run.args import SECTIONS
from proxsparse.run.parse import parse_finetune, parse_prune, parse_train, prune_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
DOCS = sorted((ROOT / "docs").glob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES + DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
FLAGS_OF_OTHERS = {"--no-build-isolation", "--nproc-per-node", "--nnodes", "--port", "--help", "--private"}
FLAGS_OF_OTHERS |= {"--enforce-eager", "--max-model-len", "--model_args", "--tensor-parallel-size"}


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def snippets(text: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


README = read(PAGES[0])
WORDS = f"{'Some words . ' * 200}\n"  # more than 2,048 tokens of a byte


def tiny_batches() -> list[dict[str, torch.Tensor]]:
    """Three batches for a model with 260 tokens."""
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 260, (3, 1, 12))]


class Rows(list):
    """A data set, streamed or not."""

    def take(self, count: int) -> "Rows":
        return Rows(self[:count])


def fake_data_set(name: str, config: str, split: str, streaming: bool = False) -> Rows:
    """In the place of the Hub's C4 and WikiText-2: rows as there, a few."""
    return Rows({"text": text, "timestamp": None} for text in (" = Title = \n", "", WORDS))


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> dict:
    """A current folder with the checkpoints that pages name, and the names that their snippets use."""
    from transformers import TrainingArguments
    from transformers.cli import transformers as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", fake_data_set)
    monkeypatch.setattr(command, "main", lambda: None)
    pruned = prune_(tiny_model("llama", torch.bfloat16))
    save_tiny_model("llama", tmp_path / "Qwen" / "Qwen2.5-0.5B", max_position_embeddings=2048)
    save(pruned, Path("runs/qwen"))
    save(sparsify_(pruned), Path("runs/qwen-packed"))
    batches = tiny_batches()
    return {
        "model": tiny_model("llama", initializer_range=1.0),  # weights so large that lambda = 0.25 prunes
        "batches": batches,
        "args": TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True),
        "data": [{name: row[0] for name, row in batch.items()} for batch in batches],
        "texts": ["Two of every four weights stay.", "The others become zero."] * 4,
        "tokenizer": byte_tokenizer(),
    }


@pytest.mark.parametrize("page", [page for page in PAGES + DOCS if "```python" in read(page)], ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_snippets_run(page, workplace):
    for snippet in snippets(read(page)):
        exec(compile(snippet, str(page), "exec"), workplace | {"torch": torch, "proxsparse": proxsparse})


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model("llama", tmp_path / "model")
    (tmp_path / "text.txt").write_text(WORDS)
    tiny = {"MODEL": "model", "DATA": "text.txt", "NUM_SAMPLES": 2, "SEQ_LEN": 32, "MAX_WINDOWS": 2}
    cells = json.loads(read(ROOT / "examples" / "prune_smollm2.ipynb"))["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert tiny.keys() <= names.keys()
            names |= tiny
    assert names["equal"]
    assert set(names["masks"]) == set(proxsparse.load_masks("masks.safetensors"))
    assert all(mask.unflatten(-1, (-1, 4)).sum(-1).eq(2).all() for mask in names["masks"].values())
    assert any(isinstance(module, proxsparse.SparseLinear) for module in names["packed"].modules())


def test_the_data_of_the_results_is_what_their_commands_read(workplace, tmp_path):
    text = (ROOT / "docs" / "results.md").read_text()
    exec(snippets(text)[0], workplace)
    named = set(re.findall(r"\bdata/([\w.]+\.(?:gz|raw))", text))
    assert named == {path.name for path in (tmp_path / "data").iterdir()}
    assert load_texts("data/c4_train_sample.jsonl.gz", "train")[2] == WORDS
    assert evaluation_text("data/wiki.test.raw") == f" = Title = \n\n\n\n\n{WORDS}"
    with gzip.open("data/c4_validation_first1025.jsonl.gz", "rt") as file:
        assert json.loads(file.readline()) == {"text": " = Title = \n"}


def commands(text: str) -> list[list[str]]:
    """The words of every command in the blocks and in the inline code of a page, without comments."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    start = re.compile(r"proxsparse [a-z]|python3? (-m|\w+/)|torchrun |make [a-z]|bash ")
    return [shlex.split(line, comments=True) for line in lines if start.match(line)]


def check_command(words: list[str]) -> None:
    """Raises an error if there is no such program, file, target or flag."""
    program, *arguments = words
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program == "proxsparse":
        parse(*arguments)
    elif "-m" in arguments and (module := arguments[arguments.index("-m") + 1]).startswith("proxsparse."):
        parse(module.partition(".")[2], *arguments[arguments.index(module) + 1 :])
    elif program != "torchrun" and "-m" not in arguments:
        assert (ROOT / arguments[0]).is_file(), words


PARSERS = {"train": parse_train, "prune": parse_prune, "finetune": parse_finetune, "apply": apply.parse}
PARSERS |= {"evaluate": evaluate.parse, "pack": pack.parse, "serve": serve.parse}


def parse(command: str, *arguments: str) -> None:
    """What the command does with its arguments before it loads anything; without any it is a name in a sentence."""
    assert command in (*COMMANDS, "COMMAND")
    if command == "report":
        assert len(arguments) <= 1
    elif arguments and (command, *arguments) != ("prune", "--list") and command != "COMMAND":
        PARSERS[command](list(arguments))


@each_page
def test_commands_are_accepted(page, monkeypatch):
    monkeypatch.setattr(zero_shot, "require_lm_eval", lambda: None)  # its import takes seconds
    monkeypatch.setattr(zero_shot, "task_file", lambda name, folder: None)
    for words in commands(read(page)):
        check_command(words)


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """The flags of all commands, benchmarks and tests."""
    methods = [name for name in list_methods() if name != "proxsparse"]  # whose flags are those of train
    parsers = [prune_parser(method, allocation) for method in methods for allocation in ALLOCATIONS]
    flags = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    flags |= {f"--{field.name}" for sections in SECTIONS.values() for section in sections for field in fields(section)}
    files = [*(ROOT / "benchmarks").rglob("*.py")]
    files += [ROOT / "proxsparse" / f"{name}.py" for name in ("apply", "evaluate", "pack", "prune", "serve")]
    sources = "\n".join(path.read_text() for path in files)
    return flags | FLAGS_OF_OTHERS | set(re.findall(r"--[a-z][\w-]*", sources))


@pytest.fixture(scope="module")
def code() -> str:
    """What may read a variable of the environment."""
    folders = ("proxsparse", "csrc", "benchmarks", "tests")
    files = [path for folder in folders for kind in ("py", "h", "cpp") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return "\n".join(map(read, [*files, ROOT / "setup.py"]))


@each_page
def test_what_is_named_exists(page, known_flags, code):
    """Flags, variables, files, links, and functions: `run/folder.py: opened` is a file of the package and one in it."""
    text, package = read(page), ROOT / "proxsparse"
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"pip install.*", "", text))) <= known_flags
    assert not [name for name in re.findall(r"PROXSPARSE_[A-Z_]+", text) if name not in code]
    folders = "proxsparse|csrc|benchmarks|tests|docs|examples|triton_kernels"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+?\.\w+)`", text))
    links = {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:\s]+)[^):\s]*\)", text)}
    assert not [path for path in {ROOT / name for name in named} | links if not path.exists()]
    for folder, file, function in re.findall(r"`([a-z]+)/([\w/]+\.py)(?:: (\w+))?`", text):
        if (package / folder).is_dir():
            assert f"def {function}" in read(package / folder / file)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert max(map(len, README.splitlines())) <= 100


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_can_be_read_in_one_sitting(page):
    lines = read(page).splitlines()
    assert len(lines) <= 400
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]

"""What the commands refuse: exit code 2, one line that names the value and the remedy, and no output directory.

The calls run in a folder with what damaged_inputs.py makes; the parts of a message are separated by " .. ".
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import refused
from damaged_inputs import NORM, UP, make_places, set_last
from task_files import write_task_files

from proxsparse import apply, env, evaluate, finetune, pack, prune, report, train
from proxsparse.evaluation import zero_shot
from proxsparse.io import atomic
from proxsparse.run import job

SHORT = "--data text.jsonl --num_samples 8 --seq_len 16 --eval_data none"
COMMANDS = {  # its main function, and flags with which it succeeds
    "train": (train.main, f"--model dense --max_steps 1 {SHORT}"),
    "prune": (prune.main, f"--method wanda --model dense {SHORT}"),
    "finetune": (finetune.main, f"--max_steps 1 {SHORT}"),
    "apply": (apply.main, ""),
    "pack": (pack.main, ""),
    "evaluate": (evaluate.main, "--seq_len 64"),
    "report": (report.main, ""),
    "env": (env.main, ""),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folder in which the calls run."""
    return make_places(tmp_path_factory.mktemp("places"))


def call_is_refused(call, message, tmp_path, capsys, trains=False):
    """`trains`: the training begins, so its log stays."""
    command, *words = shlex.split(call)
    main, flags = COMMANDS[command]
    arguments = [*flags.split(), *words]
    if "output_dir" not in call and command in ("train", "prune", "finetune", "apply", "pack"):
        arguments += ["--output_dir", tmp_path / "out"]
    printed = refused(capsys, main, arguments, *message.split(" .. "))
    assert not any("perplexity" in line or "saved to" in line for line in printed), printed
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert trains or not (tmp_path / "out").exists()


def cases(table):
    return pytest.mark.parametrize(("call", "message"), table, ids=[call[:90] for call, _ in table])


BEFORE_THE_MODEL_IS_LOADED = [
    *[(f"{call} ''", "'': empty; give a name") for call in ("train --output_dir", "apply dense pruned --output_dir")],
    # the command line
    ("evaluate model --dat x", "unrecognized arguments: --dat x .. --help"),
    ("train --data c4.jsonl.bz2", "'c4.jsonl.bz2': no such file"),
    ("train --lerning_rate 1", "unrecognized arguments: --lerning_rate 1 .. --help"),
    ("train --num_samples many", "--num_samples: invalid int value: 'many'"),
    ("train --packing maybe", "--packing: maybe: must be true or false"),
    ("finetune", "MODEL is missing"),
    ("evaluate", "required: model"),
    ("evaluate model --precision fp8", "--precision .. fp8 .. bf16"),
    # values
    ("train --reg_lambda -1", "--reg_lambda -1"),
    ("train --reg_lambda 0.1 --reg_lambda_rel 0.1", "mutually exclusive"),
    ("train --reg_lambda 25", "--reg_lambda 25 .. --objective paper"),
    ("train --reg_lambda_rel 25", "--reg_lambda_rel 25 .. --objective paper"),
    ("train --frozen_lambda 0.1", "--frozen_lambda 0.1: needs --objective paper .. frozen already"),
    (
        "train --match_hidden 16 --objective paper",
        "--match_hidden 16: needs .. it compares .. add --objective masked, or leave out --match_hidden",
    ),
    ("train --seq_len 0", "--seq_len 0: must be at least 2"),
    ("train --num_samples 0", "--num_samples 0"),
    (f"train --num_samples 1{'0' * 310}", "--num_samples 1000 .. 000: must be at least 1"),
    ("train --learning_rate 0", "--learning_rate 0"),
    ("train --max_steps 0", "--max_steps 0"),
    ("train --warmup_ratio 5", "--warmup_ratio 5"),
    ("train --num_train_epochs 1e308", "--num_train_epochs 1e+308: must be a number > 0, at most 1,000,000"),
    (
        "train --per_device_train_batch_size 2 --gradient_accumulation_steps 9999",
        "ion_steps 9999: a step needs 19998 samples",
    ),
    ("train --save_steps 5 --save_minutes 5", "--save_steps 5 and --save_minutes 5 exclude each other; give one"),
    ("train --master_weights", "--master_weights: needs --precision bf16"),
    ("train --pattern 4:2", "--pattern .. 4:2 .. 1 <= n < m"),
    ("train --resume_from_checkpoint runs/a/checkpoints/step-2", "step-2: must be .. last"),
    ("train --precision fp16", "--precision fp16 .. bf16"),
    ("train --model someone/unknown --plan", "'someone/unknown' .. give a folder with config.json"),
    ("train --recipe unheard-of", "unheard-of .. llama-2-7b"),
    ("train --config absent.yaml", "absent.yaml"),
    ("train --config c.yaml", "c.yaml .. lerning_rate"),
    ("train --device cuda:7", "cuda:7 .. --device cpu"),
    ("train --device meta", "--device meta: not usable here .. --device cpu"),
    ("evaluate dense --seq_len 0", "--seq_len 0: must be at least 2"),
    ("evaluate dense --limit 5", "--limit 5: only for --tasks; add --tasks, or leave it out"),
    ("evaluate dense --allow_other_base", "--allow_other_base: only for --masks"),
    ("evaluate dense --data text.jsonl --split train", "--split train: a local file has no splits; leave it out"),
    ("evaluate dense --max_windows 0", "--max_windows 0"),
    ("evaluate dense --json absent/scores.jsonl", "absent/scores.jsonl .. no such folder"),
    ("evaluate dense --json directory", "--json .. exists; name a new file"),
    ("evaluate dense --masks absent.safetensors", "absent.safetensors .. no such file"),
    ("evaluate dense --data absent.raw", "absent.raw"),
    # methods and allocations
    ("prune --method obs", "--method 'obs' .. choose from .. magnitude .. proxsparse"),
    ("prune --method obs --list_all", "--list_all .. --help"),
    ("prune --allocation owls", "'owls' .. choose from .. sensitivity, uniform"),
    ("prune --method proxsparse --allocation sensitivity", "one --pattern .. another --method"),
    ("prune --damping 0.1", "unrecognized arguments: --damping 0.1; .. --method NAME --help"),
    ("prune --method sparsegpt --damping much", "--damping: invalid float value: 'much'"),
    ("prune --method sparsegpt --damping -0.1", "--damping -0.1: must be a finite number >= 0"),
    ("prune --method sparsegpt --chunk 0", "--chunk 0: must be at least 1"),
    ("prune --method swap --sweeps 0", "--sweeps 0: must be at least 1"),
    ("prune --method admm --mask_iterations 0", "--mask_iterations 0: must be at least 1"),
    ("prune --method admm --rho 0", "--rho 0.0: must be a finite number > 0"),
    ("prune --method maskllm --tau 0", "--tau 0.0: must be"),
    ("prune --method maskllm --finetune", "not with --method maskllm .. finetune on its --output_dir afterwards"),
    ("prune --method proxsparse --finetune", "--finetune: not with --method proxsparse"),
    ("prune --method wanda --finetune --distill 2", "--distill 2.0: must be between 0 and 1"),
    ("prune --method wanda --distill 1", "unrecognized arguments: --distill 1; .. --finetune --help"),
    ("prune --method maskllm --epochs 0", "--epochs 0: must be at least 1"),
    ("prune --method maskllm --learning_rate nan", "--learning_rate nan: must be"),
    ("prune --method maskllm --scale 0", "--scale 0.0: must be"),
    ("prune --method maskllm --prior nope", "--prior 'nope': no such method"),
    ("prune --allocation sensitivity --target_flops 0.4", "--target_flops 0.4: must be from 0.5"),
    ("prune --config masked.yaml", "masked.yaml .. arguments: --objective=masked"),
    ("prune --config rate.yaml", "rate.yaml: unrecognized arguments: --learning_rate=0.1"),
    ("prune --config list.yaml", "no such allocation; choose from .. sensitivity, uniform"),
    ("train --config mapping.yaml", "mapping.yaml: --include: {'a': 'b'} is not text"),
    ("train --config numbers.yaml", "numbers.yaml: --seq_len: YAML reads this value as [16, 32]; put it in quotes"),
    ("train --config no.yaml", "no.yaml: --eval_data: YAML reads this value as False; put it in quotes"),
    ("train --config false.yaml", "false.yaml: must be a mapping of flags to values"),
    ("train --config noes.yaml", "noes.yaml: --exclude: False is not text"),
    # texts
    ("train --eval_data absent.txt", "absent.txt"),
    # folders
    ("train --output_dir c.yaml", "is a file"),
    ("train --output_dir /proc/proxsparse", "/proc/proxsparse .. choose another"),
    (
        "train --output_dir used",
        "'used' is not empty (thesis.tex) and no run .. has written there; choose another directory",
    ),
    ("prune --output_dir dense", "'dense' is not empty .. choose another"),
    ("apply dense pruned --output_dir dense", "'dense' is not empty .. choose another"),
    ("pack pruned --output_dir pruned", "'pruned' is not empty; choose another, or delete it"),
    ("apply dense absent.safetensors", "absent.safetensors .. no such file"),
    ("apply dense dense", "masks.safetensors .. no such file"),
    ("apply dense dense/model.safetensors", "not a mask file of proxsparse .. give a masks.safetensors file"),
    ("apply dense cut-masks", "malformed"),
    # pack: from the headers of the files alone
    ("pack absent", "absent .. no such folder"),
    ("pack pruned --max_shard_size '5 boxes'", "--max_shard_size 5 boxes .. 5GB"),
    ("pack pruned --unpack", "not packed"),
    ("pack packed", "not dense .. proxsparse"),
    ("pack packed --unpack --bits 4", "--unpack .. --bits"),
    ("pack pruned --bits 3", "--bits .. 3 .. 16, 8, 4"),
    ("pack pruned --calibrate builtin", "--calibrate .. --bits 8 or --bits 4"),
    ("pack pruned --bits 4 --calibrate /absent.txt", "/absent.txt"),
    ("pack pruned --bits 4 --calibrate builtin --num_samples 0", "--num_samples 0: must be"),
    ("pack pruned --bits 4 --calibrate builtin --seq_len -1", "--seq_len -1: must be at least 2"),
    ("pack pruned --num_samples 7 --text_field a", "--num_samples, --text_field: only for --calibrate; add"),
    ("pack pruned --include (", "regular expression"),
    (
        "pack pruned --exclude proj",
        "nothing to pack .. include=None, exclude=['proj'] .. proxsparse prune",
    ),
    ("pack pruned --include lm_head", "lm_head .. its weight is not 2:4 or"),
    ("pack dense", "nothing to pack .. proxsparse prune"),
    ("pack cut-pruned", "model.safetensors .. truncated"),
    ("pack no-weights", "model.safetensors is missing"),
    ("pack no-shard", "b.safetensors is missing"),
    ("pack bad-index", "index.json: malformed"),
    ("pack no-metadata", "index.json: malformed (no metadata)"),
    ("pack list-config", "generation_config.json: malformed (not a JSON object)"),
    ("pack torch-dtype", "config.json: dtype 'torch.bfloat16' is not a dtype of torch; give that of the weights"),
    ("pack large-half --bits 8", f"{UP}: values contain .. 3.28e+04 .. keep 16 bits or convert them to bfloat16"),
    ("pack empty-weights", "model.safetensors: contains no tensors"),
    ("pack bad-config", "config.json .. malformed"),
    ("pack empty-config", "config.json"),
    ("pack other-shape", f"{UP} .. [63, 32] .. [64, 32]"),
    ("pack not-2of4", f"{UP} .. 1 of 512 blocks .. exclude"),
    ("pack base-model", "LlamaForCausalLM needs 1 tensors that are missing .. lm_head.weight .. save the causal"),
]


@cases(BEFORE_THE_MODEL_IS_LOADED)
def test_refused_before_the_model_is_loaded(call, message, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(places)
    for module in (job, evaluate, apply, pack):
        monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    call_is_refused(call, message, tmp_path, capsys)


def test_a_missing_method_is_named(places, capsys, monkeypatch):
    monkeypatch.chdir(places)
    refused(capsys, prune.main, [], "--method is missing", "sparsegpt")
    refused(capsys, prune.main, ["--config", "empty.yaml"], "--method is missing", "sparsegpt")
    refused(capsys, prune.main, ["--config", "obs.yaml"], "'obs': no such method; choose from")
    refused(capsys, pack.main, ["pruned"], "required: --output_dir")


BEFORE_THE_WORK = [
    ("evaluate pruned/model.safetensors", "'pruned/model.safetensors': a file; give its folder"),
    ("train --model ./absent", "./absent .. no such"),
    ("train --model ~nouser/x", "'~nouser/x': no such file or folder; check the path"),
    ("train --model cut", "damaged or truncated .. download the file again"),
    ("train --model incomplete", "up_proj .. complete checkpoint"),
    ("train --model nan-layer", f"{UP}.weight .. NaN or infinite .. download"),
    ("prune --model infinite-last-norm", "model.norm.weight .. NaN or infinite .. download"),
    ("train --model packed", "proxsparse .. --unpack"),
    ("train --data pipe", "a.jsonl: not a regular file in this folder"),
    ("train --data other.jsonl", "no field 'text'; set --text_field to one of: body; .. 'text', rename the field"),
    (
        "train --num_samples 100 --gradient_accumulation_steps 50",  # the file has 40 documents
        "--gradient_accumulation_steps 50 .. needs 50 batches, there are 40 to train on .. more samples (more text",
    ),
    # before the pruning
    ("prune --method admm --finetune --num_samples 8 --held_out 8", "--held_out 8: the calibration text has only 8"),
    (
        "prune --method admm --finetune --num_samples 100 --gradient_accumulation_steps 50",
        "--gradient_accumulation_steps 50 .. needs 50 batches, there are 40 to train on",
    ),
    ("train --pattern 2:5", "q_proj .. [32, 32] .. multiple of 5 .. --exclude"),
    ("train --seq_len 1000", "context length of 128 .. lower --seq_len"),
    ("train --eval_data text.jsonl --eval_seq_len 1000", "context length of 128 .. lower --eval_seq_len"),
    ("train --include nothing", "no layer to prune .. nothing"),
    ("train --exclude (", "regular expression"),
    (
        "prune --method sparsegpt --damping 0 --num_samples 1 --precision fp32",
        "model.layers.0.self_attn.q_proj .. not positive definite .. increase damping",
    ),
    ("finetune dense --distill 0", "model.layers.0 .. is not 2:4 .. blocks have more than 2 non-zero"),
    ("finetune 3of4 --teacher dense --pattern 2:4", "is not 2:4"),
    ("finetune 3of4", "--teacher is missing .. --distill 0"),
    (
        "finetune pruned --teacher other-tokens",
        "--teacher other-tokens .. pruned .. 2 token ids differ .. 'b' in the teacher, 'a' in",
    ),
    ("finetune pruned --teacher other-vocabulary", "--teacher .. vocabulary has 300 tokens"),
    ("finetune pruned --teacher absent", "--teacher: cannot load model 'absent' .. there is no such folder"),
    (
        "finetune base-gone",
        "cannot load model 'absent' .. masks.safetensors names this model, to use another one, give",
    ),
    (
        "finetune base-changed --eval_data text.jsonl --eval_seq_len 16",
        "masks.safetensors names .. dense', whose weights are not those that were pruned .. recorded 000000000000 .. "
        "--teacher",
    ),
    ("finetune nan-pruned --teacher dense", "model.norm.weight .. NaN"),
    ("finetune pruned --held_out 8 --distill 0", "--held_out 8 .. only 8 samples"),
    ("finetune pruned --pattern 1:4", "--pattern 1:4: the masks of pruned are 2:4; leave --pattern out"),
    (
        "finetune other-masks --distill 0",
        f"{UP} .. weights that it prunes are not 0; make the model with proxsparse apply",
    ),
    ("finetune short-masks --distill 0", f"{UP} .. it has shape [32, 32], the model has shape [64, 32]; make"),
    ("finetune absent", "cannot load model 'absent' .. there is no such folder"),
    ("evaluate nan-layer --data text.jsonl", f"{UP}.weight: has weights that are NaN"),
    ("evaluate no-tokenizer --data text.jsonl", "no tokenizer.json or other tokenizer files"),
    ("evaluate dense --data text.jsonl --masks directory", "a directory; give the masks.safetensors in it"),
    ("evaluate dense --data text.jsonl short.txt", "--seq_len 64: short.txt has 11 tokens; lower it"),
    ("evaluate dense --data text.jsonl --seq_len 1000000", "1000000 .. length of 128 .. lower --seq_len"),
    ("evaluate dense --masks no-layer.safetensors --allow_other_base", "layers.9.mlp .. no such linear layer"),
    ("evaluate dense --masks no-shape.safetensors --allow_other_base", "up_proj .. [8, 8] .. has shape [64, 32]"),
    ("evaluate other-vocabulary --data text.jsonl --masks pruned/masks.safetensors", "belong to .. --allow_other_base"),
    ("apply absent pruned", "absent .. no such"),
    ("apply nan-layer pruned", f"{UP} .. NaN"),
    ("apply packed pruned", "not dense .. proxsparse pack MODEL_DIR --unpack"),
    ("apply other-vocabulary pruned", "belong to .. --allow_other_base"),
    ("pack pruned --bits 4 --calibrate other.jsonl --text_field a", "no field 'a'; set --text_field to one of: body"),
    ("pack pruned --bits 4 --calibrate text.jsonl --seq_len 9999", "--seq_len 9999 .. context length"),
]


@cases(BEFORE_THE_WORK)
def test_refused_before_the_work(call, message, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(places)
    call_is_refused(call, message, tmp_path, capsys)


@pytest.mark.parametrize("call", ["train", "prune", "finetune pruned --distill 0", "apply dense pruned", "pack pruned"])
def test_too_small_a_disk_is_refused_before_the_work(call, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(places)
    usage = atomic.shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _path: usage)
    call_is_refused(call, "MiB free .. --output_dir", tmp_path, capsys)


def test_tasks_are_checked_before_the_model_is_loaded(places, capsys, monkeypatch):
    monkeypatch.chdir(places)
    monkeypatch.setattr(evaluate, "load_model", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(zero_shot, "require_lm_eval", lambda: None)  # its import takes seconds
    (places / "tasks").mkdir()
    write_task_files(places / "tasks", zero_shot.TASKS)
    for flags, words in (
        ("--tasks piqa --limit 0", ["--limit 0", "at least 1"]),
        ("--tasks piqa --batch_size 0", ["--batch_size 0", "at least 1"]),
        ("--tasks piqa --data_dir absent", ["absent", "no such folder", "piqa"]),
        ("--tasks piqa --data_dir directory", ["piqa_validation.jsonl.gz", "piqa"]),
    ):
        refused(capsys, evaluate.main, ["dense", *flags.split()], *words)


# ---------------------------------------------------------------------------------------------- during the work


@pytest.fixture
def overflow(monkeypatch):
    """overflow(module): after the check of its files the weights of the module are infinite."""

    def damage(module):
        fill = lambda model: model.get_submodule(module).weight.data.fill_(torch.inf)  # noqa: E731
        monkeypatch.setattr(job, "refuse_not_finite", fill)

    return damage


@pytest.mark.parametrize(
    ("call", "module", "message"),
    [
        ("train --objective paper", NORM, "the loss is nan; lower --learning_rate"),
        ("train --objective paper --gradient_accumulation_steps 4", NORM, "the loss is nan; lower --learning_rate"),
        ("train", NORM, "model.layers.1.self_attn.q_proj: its calibration inputs .. damaged"),
        ("finetune pruned --distill 0", NORM, "the loss is nan; lower --learning_rate"),
        ("finetune pruned --distill 0 --held_out 2", NORM, "not finite; lower --learning_rate"),
    ],
)
def test_a_loss_of_nan_is_refused(call, module, message, overflow, places, tmp_path, capsys, monkeypatch):
    """Finite weights whose products overflow, as those of a run that diverges."""
    monkeypatch.chdir(places)
    overflow(module)
    call_is_refused(call, message, tmp_path, capsys, trains=True)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_prune_names_the_layer_whose_inputs_are_not_finite(method, places, tmp_path, capsys, monkeypatch):
    """The finished decoder block is kept."""
    model = shutil.copytree(places / "dense", tmp_path / "overflowing")
    set_last(UP, torch.finfo(torch.bfloat16).max)(model)
    monkeypatch.chdir(places)
    flags = [*COMMANDS["prune"][1].split(), "--model", model, "--method", method, "--output_dir", tmp_path / "out"]
    refused(capsys, prune.main, flags, "model.layers.1.mlp.down_proj", "NaN", "fp32, or pack without --calibrate")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".proxsparse.json", "config.yaml", "checkpoints"}


def test_the_command_line_prints_no_traceback(tmp_path):
    command = [sys.executable, "-m", "proxsparse.train", "--model", "./absent", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False, cwd=Path.cwd())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr

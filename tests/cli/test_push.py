"""`proxsparse push` and --push_to_hub: what is uploaded, what stays on this machine, and what is refused."""

import json
import re
import shutil
import socket

import pytest
import yaml
from commands import QUICK, refused, run
from forks import Forks
from hub_server import served
from safetensors import safe_open

from proxsparse import apply, finetune, pack, prune, push, train
from proxsparse.errors import INTERRUPTED, InputError, run_command
from proxsparse.io.mask_files import load_masks
from proxsparse.io.model_files import FROM_CLONE
from proxsparse.models.loading import load_model

MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", "masks.safetensors"}
MODEL |= {"tokenizer.json", "tokenizer_config.json", ".gitattributes"}


@pytest.fixture(params=[True, False], ids=["large", "small"])
def hub(request, monkeypatch):
    """The stand-in, with the token of jane, who can write. Large files go by LFS: it has no xet storage."""
    with served() as hub:
        hub.large = request.param
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", request.param)
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield hub


one_hub = pytest.mark.parametrize("hub", [True], indirect=True)


def pushed(folder, *arguments) -> None:
    assert push.main([str(folder), *arguments]) == 0


def card_of(files: dict[str, bytes]) -> tuple[dict, str]:
    """The front matter and the text of the model card."""
    card = files["README.md"].decode()
    return yaml.safe_load(card.split("---\n")[1]), card


def copied(folder, target):
    return shutil.copytree(folder, target)


def test_a_run_uploads_its_model(hub, tiny_llama, text_file, tmp_path, capsys):
    out = tmp_path / "home" / "run"
    run(prune.main, tiny_llama, text_file, out, "--method", "magnitude", "--push_to_hub", "jane/model")
    assert hub.repos["jane/model"].keys() == MODEL | {"result.json"}
    for name in MODEL - {"masks.safetensors", ".gitattributes"}:
        assert hub.repos["jane/model"][name] == (out / name).read_bytes(), name
    printed = capsys.readouterr().out
    assert "uploaded to jane/model: README.md, config.json," in printed
    assert "not uploaded: config.yaml" in printed
    assert "push_to_hub" not in (out / "config.yaml").read_text()


@one_hub
def test_the_uploaded_model_is_that_of_the_run(hub, pruned_dir, tmp_path):
    pushed(pruned_dir, "jane/model")
    there = tmp_path / "there"
    there.mkdir()
    for name, content in hub.repos["jane/model"].items():
        (there / name).write_bytes(content)
    ours, theirs = (dict(load_model(str(folder))[0].named_parameters()) for folder in (pruned_dir, there))
    assert all(ours[name].equal(theirs[name]) for name in ours)
    ours, theirs = (load_masks(folder / "masks.safetensors") for folder in (pruned_dir, there))
    assert all(ours[name].equal(theirs[name]) for name in ours)


@one_hub
def test_only_the_model_is_uploaded_and_no_folder_of_this_machine_is_named(hub, pruned_dir, tiny_llama, tmp_path):
    folder = copied(pruned_dir, tmp_path / "run")
    for name in ("metrics.jsonl", "report.md", "loss.png", "notes.txt", "hf_token.txt", "LICENSE"):
        (folder / name).write_text("mine")
    for entry in ("checkpoints", "tensorboard"):
        (folder / entry).mkdir()
        (folder / entry / "facts.json").write_text("{}")
    result = json.loads((folder / "result.json").read_text())
    result["command"] += f" --eval_data={tiny_llama.parent.parent}/a=b --include {tiny_llama.parent.parent}/c=d"
    (folder / "result.json").write_text(json.dumps(result))
    pushed(folder, "jane/model")
    files = hub.repos["jane/model"]
    assert files.keys() == MODEL | {"result.json", "LICENSE"}
    for name, content in files.items():
        assert str(tiny_llama.parent.parent).encode() not in content, name
    result = json.loads(files["result.json"])
    assert result["model"] == result["config"]["model"] == tiny_llama.name
    assert re.search(r"proxsparse[ .]", result["command"])


@one_hub
def test_copied_files_of_a_model_are_uploaded_but_not_all(hub, pruned_dir, tmp_path):
    source = copied(pruned_dir, tmp_path / "run")
    for name in ("LICENSE", "notes.txt", "hf_token.txt"):
        (source / name).write_text(name)
    assert pack.main([str(source), "--output_dir", str(tmp_path / "packed"), "--push_to_hub", "lab/packed"]) == 0
    assert (tmp_path / "packed" / "notes.txt").exists()
    assert hub.repos["lab/packed"].keys() == MODEL | {"LICENSE"}
    assert FROM_CLONE.format(".") in card_of(hub.repos["lab/packed"])[1]


@one_hub
def test_masks_alone(hub, pruned_dir, tiny_llama, tmp_path):
    pushed(pruned_dir, "masks", "--masks_only")
    files = hub.repos["jane/masks"]
    assert files.keys() == {".gitattributes", "README.md", "masks.safetensors"}
    (there := tmp_path / "masks.safetensors").write_bytes(files["masks.safetensors"])
    with safe_open(there, framework="pt") as file:
        assert file.metadata()["base_model"] == tiny_llama.name
    front, card = card_of(files)
    assert front["library_name"] == "proxsparse"
    assert f"proxsparse apply {tiny_llama.name} masks.safetensors" in card
    target = tmp_path / "applied"
    assert apply.main([str(tiny_llama), str(there), "--output_dir", str(target), "--push_to_hub", "applied"]) == 0
    weights = "model.safetensors"
    assert hub.repos["jane/applied"][weights] == (pruned_dir / weights).read_bytes()


@one_hub
def test_an_old_model_in_the_repository_is_replaced(hub, pruned_dir):
    old = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}", "video.mp4": b"theirs"}
    hub.repos["jane/model"] = {".gitattributes": b"", **old}
    pushed(pruned_dir, "jane/model")
    assert hub.repos["jane/model"].keys() == MODEL | {"result.json", "video.mp4"}
    with pytest.raises(InputError, match="has a model, whose card would be replaced"):
        push.main([str(pruned_dir), "jane/model", "--masks_only"])


@one_hub
def test_a_bad_login_or_name_is_refused_before_the_work_begins(
    hub, tiny_llama, pruned_dir, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    commands = {
        train.main: ["--model", tiny_llama],
        prune.main: ["--method", "magnitude", "--model", tiny_llama],
        finetune.main: [pruned_dir],
        apply.main: [tiny_llama, pruned_dir],
        pack.main: [pruned_dir],
    }

    def refuse(repo, *words):
        for main, arguments in commands.items():
            refused(capsys, main, [*arguments, "--output_dir", out, "--push_to_hub", repo], *words)
            assert not out.exists()
        refused(capsys, push.main, [pruned_dir, repo], *words)

    refuse("a/b/c", "'a/b/c'", "not a valid name", "OWNER/NAME")
    refuse("jane/.x", "not a valid name")
    refuse("", "not a valid name")
    refuse("someone/model", "jane may not write to it", "choose the owner from jane, lab")
    refuse("club/model", "jane may not write to it")
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    refuse("jane/model", "can only read", "hf auth login")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refuse("jane/model", "does not accept the token", "hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    refuse("jane/model", "not logged in", "hf auth login")
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        refuse("jane/model", "cannot reach the Hub", "check the network")
    assert set(hub.requests) == {"GET /api/whoami-v2"}
    assert not hub.repos


@one_hub
@pytest.mark.parametrize("place", ["repos/create", "preupload", "objects/batch", "PUT /stored", "/commit/"])
def test_a_failed_upload_leaves_the_folder_and_says_how_to_repeat_it(place, hub, tiny_llama, tmp_path, capsys):
    out, hub.failing = tmp_path / "run", {place: 413}
    flags = ["--method", "magnitude", "--model", tiny_llama, "--output_dir", out, "--eval_data", "none"]
    later = f"{out} is complete; to upload it, run: proxsparse push {out} jane/model"
    refused(capsys, prune.main, [*flags, "--push_to_hub", "jane/model"], "upload to jane/model failed", "413", later)
    assert (out / "result.json").exists()
    assert "model.safetensors" not in hub.repos.get("jane/model", {})
    hub.failing = {}
    again = [*flags, "--push_to_hub", "jane/model", "--resume_from_checkpoint", "last"]  # as a batch system does
    assert prune.main(list(map(str, again))) == 0
    assert hub.repos["jane/model"]["model.safetensors"] == (out / "model.safetensors").read_bytes()


@one_hub
def test_ctrl_c_during_the_upload(hub, pruned_dir, capsys, monkeypatch):
    def interrupted(*_arguments, **_keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", interrupted)
    assert run_command(lambda: push.main([str(pruned_dir), "jane/model", "--masks_only"])) == INTERRUPTED
    assert f"proxsparse push {pruned_dir} jane/model --masks_only" in capsys.readouterr().err


@one_hub
def test_folders_that_are_not_complete_are_refused(hub, pruned_dir, tmp_path, capsys):
    refused(capsys, push.main, [tmp_path / "absent", "jane/model"], "no such folder")
    refused(capsys, push.main, [tmp_path, "jane/model"], "no config.json")
    refused(capsys, push.main, [tmp_path, "jane/model", "--masks_only"], "masks.safetensors", "no such file")
    for name, words in {"result.json": "until the run is complete", "model.safetensors": "is missing"}.items():
        folder = copied(pruned_dir, tmp_path / name)
        (folder / name).unlink()
        refused(capsys, push.main, [folder, "jane/model"], words)
    folder = copied(pruned_dir, tmp_path / "damaged")
    (folder / "masks.safetensors").write_bytes(b"damaged")
    refused(capsys, push.main, [folder, "jane/model"], "masks.safetensors", "malformed")
    assert not hub.repos


@pytest.mark.slow
def test_of_two_processes_one_uploads(tiny_llama, text_file, tmp_path, monkeypatch):
    data = ["--model", tiny_llama, "--data", text_file, "--eval_data", "none", *QUICK, "--max_steps", "1"]
    log, out = tmp_path / "log", tmp_path / "run"
    with served() as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        with Forks() as forks:
            codes = forks.run([*data, "--output_dir", out, "--push_to_hub", "model"], 2, output=log)
            assert codes == [0, 0], log.read_text()[-2000:]
            other = [*data, "--output_dir", tmp_path / "other", "--push_to_hub", "someone/model"]
            assert forks.run(other, 2, output=log) == [2, 2]
    assert hub.repos["jane/model"]["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert len([request for request in hub.requests if "commit" in request]) == 1
    assert hub.requests.count("GET /api/whoami-v2") == 2
    assert log.read_text().count("jane may not write to it") == 1

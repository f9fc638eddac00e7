"""Uploads a result to the Hugging Face Hub: the files of the model, or the masks alone.

The local folder is complete before the upload begins, and does not change. Only files with the names of a model's
files are uploaded: no marker, lock, checkpoints, logs or calibration text. The uploaded result.json and
masks.safetensors do not name the folders of this machine.
"""

import json
import shlex
import shutil
import tempfile
from pathlib import Path

from proxsparse._version import __version__
from proxsparse.errors import InputError
from proxsparse.io.mask_files import copy_masks
from proxsparse.io.model_files import INDEX, ONE_FILE, check_folder, is_inside, weight_files
from proxsparse.io.output_folder import MASKS, RESULT, read_marker, read_result
from proxsparse.models.loading import reason_of
from proxsparse.run.model_card import masks_card_text
from proxsparse.run.sections import shareable, shortened
from proxsparse.runtime.progress import phase

CARD, CONFIG = "README.md", "config.json"
# The names of a model's files, in addition to those of its weights.
FILES = (
    *(MASKS, RESULT, CARD, CONFIG, INDEX, "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "*_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab*.*", "merges.txt", "tekken.json"),
    *("*.model", "*.tiktoken", "*.jinja", "additional_chat_templates"),
)
# Deleted in the repository if they are not uploaded again: transformers would load an old model.safetensors.
REPLACED = [ONE_FILE, "model-?????-of-?????.safetensors", INDEX, MASKS, RESULT]
LOGIN = "run `hf auth login` with a token that can write, or set HF_TOKEN"


def check_repository(repo: str | None) -> str | None:
    """The name OWNER/NAME of a repository, before the work begins; None, without --push_to_hub, gives None.

    Nothing is created. Raises InputError unless the name is valid and the token of this machine may write to it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if repo is None:
        return None
    what = f"Hub repository {repo!r}"
    try:
        validate_repo_id(repo)
        user = HfApi().whoami()
    except Exception as error:  # of many types: HTTP errors, no network
        reason = f"cannot reach the Hub ({reason_of(error)}); check the network, or upload later with `proxsparse push`"
        if isinstance(error, HFValidationError):
            reason = f"not a valid name ({reason_of(error)}); give one such as OWNER/NAME"
        elif isinstance(error, LocalTokenNotFoundError):
            reason = f"not logged in to the Hub; {LOGIN}"
        elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            reason = f"the Hub does not accept the token of this machine; {LOGIN}"
        raise InputError(f"{what}: {reason}") from error
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise InputError(f"{what}: the token {token.get('displayName', '')!r} can only read; {LOGIN}")
    owner, name = repo.split("/") if "/" in repo else (user["name"], repo)
    owners = [user["name"], *(org["name"] for org in user.get("orgs") or () if org.get("roleInOrg") != "read")]
    if owner.lower() not in map(str.lower, owners):
        raise InputError(f"{what}: {user['name']} may not write to it; choose the owner from {', '.join(owners)}")
    return f"{owner}/{name}"


def upload(folder: Path, repo: str, masks_only: bool = False) -> None:
    """Uploads a complete folder in one commit, and prints what was uploaded; creates the repository if needed.

    `masks_only`: only masks.safetensors, with a model card that says how to apply them. Raises InputError if the folder
    is not complete, or if the upload failed; the message says how to repeat it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        (stage_masks if masks_only else stage_model)(folder, Path(scratch))
        names = sorted(path.name for path in Path(scratch).iterdir())
        size = sum(path.stat().st_size for path in Path(scratch).rglob("*"))
        command = ["proxsparse", "push", str(folder), repo, *["--masks_only"] * masks_only]
        later = f"{folder} is complete; to upload it, run: {shlex.join(command)}"
        try:
            with phase(f"uploading {size / 1e6:.1f} MB to {repo}"):
                send(Path(scratch), repo, masks_only)
        except InputError:
            raise
        except KeyboardInterrupt as stop:
            stop.add_note(later)
            raise
        except Exception as error:  # of many types: HTTP errors, no network
            causes = [error, error.__cause__] if type(error) is RuntimeError and error.__cause__ else [error]
            raise InputError(f"upload to {repo} failed ({'; '.join(map(reason_of, causes))}); {later}") from error
    print(f"uploaded to {repo}: {', '.join(names)}")
    if left := sorted(path.name for path in folder.iterdir() if path.name not in names and path.name[0] != "."):
        print(f"not uploaded: {', '.join(left)}")


def send(files: Path, repo: str, masks_only: bool) -> None:
    """Creates the repository if needed and uploads a folder."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # `phase` shows the time
    api = HfApi()
    api.create_repo(repo, exist_ok=True)
    if masks_only and CONFIG in api.list_repo_files(repo):
        raise InputError(f"Hub repository {repo!r}: has a model, whose card would be replaced; choose another one")
    message, replaced = f"Upload with proxsparse {__version__}", None if masks_only else REPLACED
    api.upload_folder(repo_id=repo, folder_path=files, commit_message=message, delete_patterns=replaced)


def stage_model(folder: Path, target: Path) -> None:
    """Fills an empty folder with links to the files of a model; result.json and masks.safetensors are rewritten."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{str(folder)!r}: no {CONFIG}; give the output folder of a proxsparse command")
    check_folder(folder)
    marker, result = read_marker(folder), read_result(folder)
    if marker and marker["command"] not in ("pack", "apply") and not result:
        raise InputError(f"{str(folder)!r}: no {RESULT}; wait until the run is complete, or resume it")
    weights = {path.name for path in weight_files(folder)}
    for path in sorted(folder.iterdir()):
        if not (path.name in weights or any(map(path.match, FILES))) or not is_inside(path, folder):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        elif path.name == MASKS:
            copy_masks(path, target / MASKS, shortened)
        elif path.name == RESULT:
            (target / RESULT).write_text(json.dumps(shareable(result), indent=2) + "\n")
        else:
            (target / path.name).symlink_to(path.resolve())


def stage_masks(folder: Path, target: Path) -> None:
    """Writes masks.safetensors and a model card for it to an empty folder."""
    metadata, layers, digest = copy_masks(folder / MASKS, target / MASKS, shortened)
    card = masks_card_text(metadata, layers, digest, read_result(folder))
    (target / CARD).write_bytes(card.encode(errors="replace"))

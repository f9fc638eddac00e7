"""Saves a model, and reads the headers of the files back: a folder is saved only if `from_pretrained` restores it."""

from pathlib import Path

from torch import nn

from proxsparse.io.model_files import add_tensors, headers, weight_files
from proxsparse.models.loading import Source, skeleton
from proxsparse.models.matching import check_saved
from proxsparse.runtime.progress import phase, write_line


def save_model(folder: Path, model: nn.Module, tokenizer) -> None:
    """Writes a model of `load_model`, its tokenizer, and the tensors of its source that it does not have.

    Raises:
        InputError: the written files do not fit the model.
    """
    with phase("saving the model"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        extra = getattr(model, "source", Source({}, [])).extra
        if extra:
            add_tensors(folder, extra)
            write_line(
                f"{len(extra)} tensors that {type(model).__name__} does not use, such as {next(iter(extra))}, are "
                "saved unchanged"
            )
        check_saved(headers(weight_files(folder)), skeleton(folder), model, extra)

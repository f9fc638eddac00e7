"""`proxsparse report RUN`: regenerates the report and the plots of a run."""

import os
import sys
from pathlib import Path

from proxsparse.errors import InputError, run_command
from proxsparse.io.atomic import write_file
from proxsparse.io.output_folder import MARKER, read_marker
from proxsparse.run.model_card import is_edited
from proxsparse.run.report import PLOTS, report_files
from proxsparse.runtime.command import Parser
from proxsparse.runtime.progress import phase


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("report", description="Regenerate the report and the plots of a run, also while it is running.")
    parser.add_argument("run_dir", type=Path, help="the --output_dir of `proxsparse train`")
    run_dir = parser.parse_args(arguments).run_dir
    refuse_foreign(run_dir)
    with phase("drawing the report"):
        files = report_files(run_dir)
    for name, content in files.items():
        write_file(run_dir / name, content)
    if is_edited(run_dir / "README.md"):
        print(f"kept {run_dir / 'README.md'}, because its text was changed; to write it again, move it away")
    print(f"wrote {run_dir / 'report.md'}{' and plots' * any(name in PLOTS for name in files)}")


def refuse_foreign(run_dir: Path) -> None:
    """Raises InputError if a page or plot would replace a file that was not written by a run."""
    marked = read_marker(run_dir) is not None if run_dir.is_dir() else False
    for path in (run_dir / name for name in ("report.md", "README.md", *PLOTS)):
        if os.path.lexists(path) and not (marked and path.is_file() and not path.is_symlink()):
            reason = "is a link or a folder" if marked else f"its folder has no {MARKER}, so no run wrote it"
            raise InputError(f"{path}: {reason}, and the report would replace it; move it away")


if __name__ == "__main__":
    sys.exit(run_command(main))

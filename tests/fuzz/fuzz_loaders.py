"""`python tests/fuzz/fuzz_loaders.py --inputs 100000`: damaged files through every loader of untrusted files.

An input may be loaded, with what `loaders.py` asserts, or refused by a ValueError or OSError, which a command prints as
one line. Anything else is a finding: another exception, more than ten seconds, more than a GiB. A crash ends the run.
"""

import argparse
import collections
import faulthandler
import logging
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), *map(str, Path(__file__).parents[1:3])]

from loaders import LOADERS
from mutations import damage

SECONDS, BYTES = 10, 1 << 30  # limits of one input


class Hang(BaseException):
    """An input took too long; not an Exception, so that no loader can take it for a bad file."""


@contextmanager
def bounded():
    """Within it the process gets `BYTES` more of address space, and an alarm raises Hang."""

    def raise_hang(*_signal):
        raise Hang

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, raise_hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def write(files: dict[str, bytes], folder: Path) -> Path:
    """Writes the files into a new folder."""
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def outcome(name: str, folder: Path) -> str:
    """ "loaded", "refused", or what was found."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        LOADERS[name].load(folder)
    except (ValueError, OSError):
        return "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also what a Rust library calls a panic
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loaded"


def fuzz(name: str, seed: int, numbers: range, folder: Path) -> dict[str, list[int]]:
    """Outcome -> numbers of the inputs of one loader; call it within `bounded`. `folder` holds the last input."""
    found, loader = collections.defaultdict(list), LOADERS[name]
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        random = Random(f"{seed} {name} {number}")
        found[outcome(name, write(damage(random, random.choice(loader.valid())), folder))].append(number)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all loaders together")
    parser.add_argument("--first", type=int, default=0, help="number of each loader's first input")
    parser.add_argument("--only", choices=LOADERS, help="one loader, which gets all inputs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    total, findings = 0, 0
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "input"
    print(f"the present input is in {folder}", flush=True)
    for name in [options.only] if options.only else LOADERS:
        count = options.inputs if options.only else options.inputs * LOADERS[name].share // 100_000
        LOADERS[name].valid()
        started = time.monotonic()
        faulthandler.dump_traceback_later(SECONDS * count + 1, exit=True)  # where no signal reaches Python
        with bounded():
            found = fuzz(name, options.seed, range(options.first, options.first + count), folder)
        faulthandler.cancel_dump_traceback_later()
        total += count
        counts = {what: len(found.pop(what, ())) for what in ("loaded", "refused")}
        print(f"{name:16}{count:7} inputs, {counts}, {time.monotonic() - started:.1f} s", flush=True)
        for what, where in found.items():
            findings += len(where)
            print(f"  FOUND {len(where)} times, the first is --only {name!r} --first {where[0]} --inputs 1: {what}")
    print(f"{total} inputs, {findings} findings")
    shutil.rmtree(folder.parent, ignore_errors=True)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Runs of proxsparse.train, or of another `main`, in processes forked from one that has imported all: a second each.

    with Forks() as forks:
        codes = forks.run(["--model", ...], processes=2)          # as torchrun starts them
        codes = forks.run([...], before=("proxsparse.io.checkpoints.finish", 2, "kill"))  # kill -9 in the 2nd call
        codes = forks.run([...], before=("proxsparse.io.checkpoints.clear", 2, "fill", "/disk"))  # another of EVENTS
        codes = forks.run([...], main="trainer_processes.main")   # another function of a list of texts

    pid = forks.start([...], "live_server.serve", output)             # and goes on
    code = forks.wait(pid)

A fork of pytest itself would inherit thread pools without their threads, and locks that these hold.
"""

import contextlib
import errno
import faulthandler
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

LIMIT = 600  # seconds of a process: then it writes where its threads are to its output, and ends with 1


class Forks:
    """The process that forks; `run` asks it."""

    def __enter__(self) -> "Forks":
        paths = [*sys.path, *(str(Path(__file__).with_name(name)) for name in ("optim", "cli"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.server = subprocess.Popen([sys.executable, __file__], text=True, env=environment, **pipes)
        return self

    def __exit__(self, *_exception) -> None:
        self.server.stdin.close()
        self.server.wait()

    def run(self, arguments: list, processes: int = 1, nodes: int = 1, output: Path | None = None, **how) -> list[int]:
        """The exit codes, -9 for one that was killed; what the processes print goes to the file `output`."""
        job = {"main": "proxsparse.train.main", "arguments": list(map(str, arguments))} | how
        return self.call("run", processes=processes, nodes=nodes, output=str(output or os.devnull), **job)

    def start(self, arguments: list, main: str, output: Path) -> int:
        """The process id of one process that goes on."""
        return self.call("start", arguments=list(map(str, arguments)), main=main, output=str(output))

    def wait(self, pid: int) -> int:
        """The exit code of a process that was started, when it has ended."""
        return self.call("wait", pid=pid)

    def call(self, function: str, **arguments):
        """What a function of FUNCTIONS returns there."""
        print(json.dumps([function, arguments]), file=self.server.stdin, flush=True)
        return json.loads(self.server.stdout.readline())


def serve() -> None:
    """One call a line on stdin, its result as a line on stdout."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 what a run imports late, imported once

    import proxsparse.train  # noqa: F401
    from proxsparse.run import report

    torch.set_num_threads(1)
    report.draw_plots = lambda rows, similarity: dict.fromkeys(report.PLOTS, b"a picture")  # half of the time of a run
    for line in sys.stdin:
        function, arguments = json.loads(line)
        print(json.dumps(FUNCTIONS[function](**arguments)), flush=True)


def run(processes: int, nodes: int, **job) -> list[int]:
    if processes == 1:
        return [wait(start(**job))]
    store, port = start_store()
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes // nodes, "TORCHELASTIC_USE_AGENT_STORE": True}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = [start({"RANK": rank, "LOCAL_RANK": rank} | world, **job) for rank in range(processes)]
    codes = [wait(pid) for pid in pids]
    os.kill(store, signal.SIGKILL)
    wait(store)
    return codes


def start_store() -> tuple[int, int]:
    """The id and the port of a process that holds a store, as torchrun does.

    The threads of a store take a lock of the C library for each connection, and a fork would inherit the lock.
    """
    from torch.distributed import TCPStore

    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)  # so that a store that fails ends the next line
    port = int(os.read(reading, 9))
    os.close(reading)
    return pid, port


def start(environment: dict | None = None, **job) -> int:
    importlib.import_module(job["main"].rpartition(".")[0])  # here, where the next job finds it too
    if (pid := os.fork()) == 0:
        os.environ |= {name: str(value) for name, value in (environment or {}).items()}
        child(**job)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


FUNCTIONS = {"run": run, "start": start, "wait": wait}


def child(arguments, main, output, before=None, at_rename=None, in_thread=False, folders=None) -> None:
    """The run itself; never returns."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(0)
    code = 1
    try:
        from proxsparse._start import quit_at_once
        from proxsparse.errors import run_command

        signal.signal(signal.SIGINT, quit_at_once)  # as when a command has been imported
        if before:
            before_call(*before)
        if at_rename:
            before_rename(*at_rename)
        if in_thread:
            save_in_thread()
        if folders:  # a relative --output_dir is another one in each process
            os.chdir(folders[int(os.environ["RANK"])])
        module, _, name = main.rpartition(".")
        code = run_command(lambda: getattr(sys.modules[module], name)(arguments))
    except SystemExit as ending:
        code = ending.code
    except Exception:  # with PROXSPARSE_DEBUG
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def save_in_thread() -> None:
    """A thread writes the checkpoints of training steps, as on a GPU."""
    from proxsparse.io.checkpoints import Checkpoints

    save = Checkpoints.save
    Checkpoints.save = lambda *given, **named: save(*given, **named | dict.fromkeys({"in_thread"} & {*named}, True))


def fill_disk(folder: str) -> None:
    """A file `filler` takes all that is free."""
    with contextlib.suppress(OSError), Path(folder, "filler").open("wb", buffering=0) as file:
        while file.write(b"0" * 4096):
            pass


EVENTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "fill": fill_disk,
    "unmount": lambda folder: subprocess.run(["umount", "-l", folder], check=True),
}


def before_call(name: str, number: int, event: str, *folder: str) -> None:
    """The event comes before the call of that number, from 1, of the function of that full name."""
    module, attribute = importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]
    function, calls = getattr(module, attribute), itertools.count(1)

    def call(*arguments, **keywords):
        if next(calls) == number:
            EVENTS[event](*folder)
        return function(*arguments, **keywords)

    setattr(module, attribute, call)


def before_rename(number: int, act: int | str) -> None:
    """Before the rename of that number: a signal, or "full": an error of a full disk.

    Every file and folder of a run gets its name by a rename.
    """
    count = itertools.count(1)

    def sabotaged(rename, *paths, **more):
        if next(count) == number:
            if act == "full":
                raise OSError(errno.ENOSPC, "No space left on device", "somewhere")
            os.kill(os.getpid(), act)
        rename(*paths, **more)

    os.rename, os.replace = partial(sabotaged, os.rename), partial(sabotaged, os.replace)


if __name__ == "__main__":
    serve()

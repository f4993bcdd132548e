"""A process that imported libraries once and runs modules in forks of itself.

    python -m tests.engines.fork_server LIBRARIES SOCKET

Importing torch, transformers and their like takes most of a driver's start. `LIBRARIES` is a module that imports them;
the engine and baige-device are not among them, so each driver imports those itself, under its own environment. A
client connects to `SOCKET`, sends one JSON line, and reads two: the process id of the fork, and its exit status. The
server ends when its stdin is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys

__all__ = ["serve"]


def serve(libraries: str, path: str) -> None:
    """Listen until stdin is closed; also returns in each fork, when its module has ended without an exception."""
    importlib.import_module(libraries)
    gc.collect()
    gc.freeze()  # what was imported stays; no fork shall look through it again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the attendants
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        os.rename(f"{path}.new", path)  # where it is, it listens
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                attend(connection)
                return
            connection.close()


def attend(connection: socket.socket) -> None:
    """Fork once more, and tell the client how that ended; in the fork, run what it asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    child = os.fork()
    if child == 0:
        connection.close()
        become(**request)
        return
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(module: str, arguments: list[str], environment: dict[str, str], stdin: str, stdout: str) -> None:
    """What a new interpreter would do; the process leads a session of its own."""
    os.setsid()
    for number, file in ((0, os.open(stdin, os.O_RDONLY)), (1, os.open(stdout, os.O_WRONLY | os.O_APPEND))):
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    importlib.invalidate_caches()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])

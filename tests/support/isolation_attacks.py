"""Code of a compromised function: confines itself as told, then tries to get out. Prints results as JSON.

python isolation_attacks.py '{"readable": [...], "uid": 65534, "parent": 1234, "sealed": 5, "secret": "/path"}'
"""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from manylora.core.clock import Clock
from manylora.core.config import EngineConfig
from manylora.core.errors import ConfigError
from manylora.core.isolation.confine import Confinement, confine
from manylora.core.ports import EngineParts, SharedBase

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> str:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "done"


class Remote(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t))


def attempt_all(
    parent: int,
    sealed: int,
    folder: str,
    secret: str,
    *,
    sibling: int | None = None,
    backbone: str = "/run/backbone",
    server: int = 8000,
) -> dict[str, str]:
    """Return the result of each attempt: ``refused: ...`` or ``REACHED ...``.

    Args:
        parent: Process of the server.
        sealed: Descriptor of the base.
        folder: Of the function's own adapter. ``link`` there points to ``secret``.
        secret: A file of another function's adapter.
        sibling: Process of another function; the server's by default.
        backbone: Socket of the process that holds the base.
        server: Port of the server.
    """
    other = parent if sibling is None else sibling

    def write_file() -> str:
        with open(f"{folder}/written", "w") as file:
            file.write("x")
        return "done"

    def read(path: str) -> Callable[[], str]:
        def attempt() -> str:
            with open(path, "rb") as file:
                return file.read(16).hex()

        return attempt

    def write_sealed() -> str:
        return str(os.pwrite(sealed, b"x", 0))

    def map_sealed_writable() -> str:
        mmap.mmap(sealed, 4096, access=mmap.ACCESS_WRITE)
        return "done"

    def make_mapping_writable() -> str:
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, sealed, ctypes.c_long(0))
        return checked(libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3))

    def store_to_the_base() -> str:
        """Write through a mapping of its own, as engines map it; others must not see that."""
        before = os.pread(sealed, 1, 0)
        own = mmap.mmap(sealed, 4096, access=mmap.ACCESS_COPY)
        own[0] = before[0] ^ 1
        if os.pread(sealed, 1, 0) == before:
            raise PermissionError("the change stays in a page of its own")
        return "done"

    def read_memory_of_another() -> str:
        numbers = {"x86_64": 310, "aarch64": 270}
        into = ctypes.create_string_buffer(16)
        here = Remote(ctypes.cast(into, ctypes.c_void_p), 16)
        there = Remote(id(Remote), 16)  # an address of the zygote's, which all forks have
        count = libc.syscall(numbers[platform.machine()], other, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        checked(count)
        return into.raw.hex()

    def connect_to_the_backbone() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
            held.connect(backbone)
        return "done"

    def ask_the_server(path: str) -> Callable[[], str]:
        def attempt() -> str:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asking:
                asking.connect(("127.0.0.1", server))
                asking.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                return asking.recv(16).hex()

        return attempt

    def reopen_sealed() -> str:
        return str(os.write(os.open(f"/proc/self/fd/{sealed}", os.O_RDWR), b"x"))

    def truncate_sealed() -> str:
        os.ftruncate(sealed, 0)
        return "done"

    def new_socket(family: int) -> Callable[[], str]:
        return lambda: str(socket.socket(family, socket.SOCK_STREAM))

    def fork() -> str:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        return "done"

    def run_program() -> str:
        os.execv("/bin/true", ["true"])

    def become_root() -> str:
        os.setuid(0)
        return "done"

    def stop(pid: int) -> Callable[[], str]:
        def attempt() -> str:
            os.kill(pid, signal.SIGSTOP)
            return "done"

        return attempt

    def use_memory() -> str:
        return str(len(bytearray(4 << 30)))

    def use_descriptors() -> str:
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                stack.callback(os.close, os.dup(1))
        return "done"

    def use_threads() -> str:
        arena_max = -8
        libc.mallopt(arena_max, 1)  # a thread that lacks memory as it starts is waited for without end
        end = threading.Event()
        threads = [threading.Thread(target=end.wait) for _ in range(1000)]
        before = threading.stack_size(1 << 16)
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        finally:
            end.set()
            threading.stack_size(before)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        return "done"

    def read_environment() -> str:
        return os.environ["MANYLORA_API_KEY"]

    def scan_stack() -> str:
        """Search the strings that the kernel put on the stack at exec: arguments, variables, and the program's name."""
        at = ctypes.c_void_p.in_dll(libc, "program_invocation_name").value
        assert at is not None
        found = b""
        while not found.endswith(bytes(8)):  # the end of the stack
            size = mmap.PAGESIZE - at % mmap.PAGESIZE
            found += ctypes.string_at(at, size)
            at += size
        assert b"PATH=" in found
        if b"MANYLORA_API_KEY=" not in found:
            raise KeyError("MANYLORA_API_KEY")
        return "the key"

    def limit(pid: int) -> str:
        numbers = {"x86_64": 302, "aarch64": 261}
        one_second = (ctypes.c_ulong * 2)(10**9, 10**9)
        return checked(libc.syscall(numbers[platform.machine()], pid, 0, ctypes.byref(one_second), None))

    def keep_a_processor() -> str:
        os.sched_setaffinity(parent, os.sched_getaffinity(0))
        return "done"

    def take_priority() -> str:
        os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, 0))
        return "done"

    def share_memory(flags: int) -> str:
        mmap.mmap(-1, 4096, flags=flags)
        return "done"

    def list_mounts() -> str:
        listmount = 458  # the same on every machine
        request = (ctypes.c_uint64 * 3)(24, 2**64 - 1, 0)  # of ``struct mnt_id_req``: its size, below the root
        found = (ctypes.c_uint64 * 64)()
        return checked(libc.syscall(listmount, ctypes.byref(request), ctypes.byref(found), ctypes.c_size_t(64), 0))

    def lock(path: str) -> str:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "done"

    def told(call: Callable[..., None], *arguments: object) -> str:
        call(*arguments)
        return "done"

    def watch(path: str) -> str:
        watching = libc.inotify_init1(0)
        checked(watching)
        return checked(libc.inotify_add_watch(watching, path.encode(), 0xFFF))

    attempts: dict[str, Callable[[], str]] = {
        "close another function's adapter by its mode": lambda: told(os.chmod, secret, 0o600),
        "open another function's adapter by its mode": lambda: told(os.chmod, secret, 0o644),
        "change the times of another function's adapter": lambda: told(os.utime, secret),
        "mark another function's adapter": lambda: told(os.setxattr, secret, "user.x", b"x"),
        "give another function's adapter away": lambda: told(os.chown, secret, os.getuid(), os.getgid()),
        "change the mode of an open file": lambda: told(os.fchmod, sealed, 0o600),
        "truncate the log": lambda: told(os.ftruncate, 2, 0),
        "lock a file of its own folder": lambda: lock(f"{folder}/adapter_config.json"),
        "watch another function's folder": lambda: watch(os.path.dirname(secret)),
        "read the processor time of another function": lambda: str(time.clock_gettime((~other << 3) | 2)),
        "list the mounts of the machine": list_mounts,
        "make a file of memory": lambda: str(os.memfd_create("x")),
        "take memory that is shared": lambda: share_memory(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS),
        "make a pair of sockets": lambda: str(socket.socketpair()),
        "write a file in its own folder": write_file,
        "read a file of the system": read("/etc/passwd"),
        "read another function's adapter": read(secret),
        "follow a link in its folder to another function's adapter": read(f"{folder}/link"),
        "see another function's adapter": lambda: str(os.stat(secret)),
        "see the processes of the machine": lambda: str(os.stat("/proc/self")),
        "read another function's memory file": read(f"/proc/{other}/mem"),
        "read another function's memory": read_memory_of_another,
        "read another function's descriptors": lambda: str(os.listdir(f"/proc/{other}/fd")),
        "trace another function": lambda: checked(libc.ptrace(16, other, 0, 0)),
        "stop another function": stop(other),
        "take a descriptor of another function": lambda: checked(libc.syscall(434, other, 0)),
        "connect to the process that holds the backbone": connect_to_the_backbone,
        "ask the server for its metrics": ask_the_server("/metrics"),
        "ask the server for its state": ask_the_server("/status"),
        "read another process's environment": read(f"/proc/{parent}/environ"),
        "read another process's memory": read(f"/proc/{parent}/mem"),
        "read its own memory file": read("/proc/self/mem"),
        "list processes": lambda: str(os.listdir("/proc")),
        "read another process's name and arguments": read(f"/proc/{parent}/cmdline"),
        "write its own memory file": lambda: str(os.open("/proc/self/mem", os.O_RDWR)),
        "share memory with others": lambda: str(os.open("/dev/shm/x", os.O_RDWR | os.O_CREAT)),
        "fill the disk": lambda: str(os.open("/tmp/x", os.O_RDWR | os.O_CREAT)),
        "read keys in its environment": read_environment,
        "read the environment that it was started with": read("/proc/self/environ"),
        "read keys on its stack": scan_stack,
        "store to the backbone where it maps it": store_to_the_base,
        "write the backbone": write_sealed,
        "map the backbone for writing": map_sealed_writable,
        "make a mapping of the backbone writable": make_mapping_writable,
        "reopen the backbone and write": reopen_sealed,
        "truncate the backbone": truncate_sealed,
        "trace another process": lambda: checked(libc.ptrace(16, parent, 0, 0)),
        "stop another process": stop(parent),
        "open a network socket": new_socket(socket.AF_INET),
        "open a local socket": new_socket(socket.AF_UNIX),
        "start a process": fork,
        "start a program": run_program,
        "become root": become_root,
        "enter a new user namespace": lambda: checked(libc.unshare(0x10000000)),
        "mount a file system": lambda: checked(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None)),
        "take a descriptor of another process": lambda: checked(libc.syscall(434, parent, 0)),
        "outlive its zygote": lambda: checked(libc.prctl(1, 0, 0, 0, 0)),
        "show its memory to its user": lambda: checked(libc.prctl(4, 1, 0, 0, 0)),
        "limit another process": lambda: limit(parent),
        "bind another process to a processor": keep_a_processor,
        "set the priority of another process": take_priority,
        "set the priority of its group": lambda: checked(libc.setpriority(os.PRIO_PGRP, 0, 19)),
        "take a larger share of the processors": lambda: str(os.open("/proc/self/autogroup", os.O_WRONLY)),
        "take memory without end": use_memory,
        "take descriptors without end": use_descriptors,
        "take threads without end": use_threads,
    }
    results = {}
    for name, attempt in attempts.items():
        try:
            results[name] = f"REACHED {attempt()}"
        except (OSError, MemoryError, ValueError, KeyError) as error:
            results[name] = f"refused: {error!r}"
    return results


def attack(config: EngineConfig, clock: Clock, *, shared: SharedBase) -> EngineParts:
    """Attack instead of building an engine; told by the model's name, it tells by the reason to refuse it."""
    told = json.loads(config.model.model)
    os.write(2, b"attacks begin\n")
    others = {key: told[key] for key in ("sibling", "backbone", "server") if key in told}
    raise ConfigError(json.dumps(attempt_all(told["parent"], shared.file, told["own"], told["secret"], **others)))


def main() -> None:
    told = json.loads(sys.argv[1])
    sealed = told["sealed"]
    folder = told["readable"][0]
    os.environ["MANYLORA_API_KEY"] = "secret"
    measures = confine(
        Confinement(
            readable=[*told["readable"], sys.prefix, sys.base_prefix],
            uid=told["uid"],
            keep_fds=(0, 1, 2, sealed),
            memory_bytes=1 << 30,
            num_tasks=256,
            has_own_root=True,
            ends_with_parent=True,
        )
    )
    results = attempt_all(told["parent"], sealed, folder, told["secret"])
    # What it must still be able to do.
    with open(f"{folder}/adapter_config.json", "rb") as file:
        allowed = [file.read().decode()]
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE))
    os.nice(1)
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    thread = threading.Thread(target=lambda: allowed.append("thread"))
    thread.start()
    thread.join()
    print(json.dumps({"measures": {m.name: [m.is_on, m.note] for m in measures}, "attempts": results, "can": allowed}))


if __name__ == "__main__":
    main()

"""Numbers of the system calls that a confined process may make, by machine; from the kernel's tables."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FIRST_UNKNOWN", "NUMBERS"]

FIRST_UNKNOWN = 451
"""The kernel had no call of this number or a higher one when the tables were made."""

NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "access": 21, "brk": 12, "clock_getres": 229, "clock_gettime": 228, "clock_nanosleep": 230, "clone": 56,
        "clone3": 435, "close": 3, "close_range": 436, "dup": 32, "dup2": 33, "dup3": 292, "epoll_create1": 291,
        "epoll_ctl": 233, "epoll_pwait": 281, "epoll_wait": 232, "eventfd2": 290, "exit": 60, "exit_group": 231,
        "faccessat": 269, "faccessat2": 439, "fadvise64": 221, "fcntl": 72, "fstat": 5, "ftruncate": 77, "futex": 202,
        "futex_waitv": 449, "getcpu": 309, "getcwd": 79, "getdents64": 217, "getegid": 108, "geteuid": 107,
        "getgid": 104, "getpid": 39, "getppid": 110, "getpriority": 140, "getrandom": 318, "getrusage": 98,
        "getsockname": 51, "getsockopt": 55, "gettid": 186, "gettimeofday": 96, "getuid": 102, "ioctl": 16, "lseek": 8,
        "lstat": 6, "madvise": 28, "memfd_create": 319, "mmap": 9, "mprotect": 10, "mremap": 25, "munmap": 11,
        "nanosleep": 35, "newfstatat": 262, "open": 2, "openat": 257, "openat2": 437, "poll": 7, "ppoll": 271,
        "prctl": 157, "pread64": 17, "preadv": 295, "prlimit64": 302, "pselect6": 270, "pwrite64": 18, "pwritev": 296,
        "read": 0, "readlink": 89, "readlinkat": 267, "readv": 19, "recvfrom": 45, "recvmsg": 47,
        "restart_syscall": 219, "rseq": 334, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
        "sched_getaffinity": 204, "sched_setaffinity": 203, "sched_yield": 24, "select": 23, "sendmsg": 46,
        "sendto": 44, "set_robust_list": 273, "setpriority": 141, "shutdown": 48, "sigaltstack": 131, "stat": 4,
        "statx": 332, "sysinfo": 99, "tgkill": 234, "time": 201, "times": 100, "uname": 63, "write": 1, "writev": 20,
    },
    "aarch64": {  # it has no calls that newer ones replace, as ``open`` and ``stat``
        "brk": 214, "clock_getres": 114, "clock_gettime": 113, "clock_nanosleep": 115, "clone": 220, "clone3": 435,
        "close": 57, "close_range": 436, "dup": 23, "dup3": 24, "epoll_create1": 20, "epoll_ctl": 21,
        "epoll_pwait": 22, "eventfd2": 19, "exit": 93, "exit_group": 94, "faccessat": 48, "faccessat2": 439,
        "fadvise64": 223, "fcntl": 25, "fstat": 80, "ftruncate": 46, "futex": 98, "futex_waitv": 449, "getcpu": 168,
        "getcwd": 17, "getdents64": 61, "getegid": 177, "geteuid": 175, "getgid": 176, "getpid": 172, "getppid": 173,
        "getpriority": 141, "getrandom": 278, "getrusage": 165, "getsockname": 204, "getsockopt": 209, "gettid": 178,
        "gettimeofday": 169, "getuid": 174, "ioctl": 29, "lseek": 62, "madvise": 233, "memfd_create": 279, "mmap": 222,
        "mprotect": 226, "mremap": 216, "munmap": 215, "nanosleep": 101, "newfstatat": 79, "openat": 56,
        "openat2": 437, "ppoll": 73, "prctl": 167, "pread64": 67, "preadv": 69, "prlimit64": 261, "pselect6": 72,
        "pwrite64": 68, "pwritev": 70, "read": 63, "readlinkat": 78, "readv": 65, "recvfrom": 207, "recvmsg": 212,
        "restart_syscall": 128, "rseq": 293, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
        "sched_getaffinity": 123, "sched_setaffinity": 122, "sched_yield": 124, "sendmsg": 211, "sendto": 206,
        "set_robust_list": 99, "setpriority": 140, "shutdown": 210, "sigaltstack": 132, "statx": 291, "sysinfo": 179,
        "tgkill": 131, "times": 153, "uname": 160, "write": 64, "writev": 66,
    },
}  # fmt: skip

"""Lock a process in before it touches a tenant's bytes: no new files, sockets, processes or rights.

Every measure that the kernel offers is taken; a report names the measures that are missing.
"""

from manylora.core.isolation.cgroups import Cgroup, ProcessorShare, enter_own_share, remove_groups_of_the_dead
from manylora.core.isolation.confine import (
    MEASURES,
    ONE_THREAD,
    READABLE_OF_SYSTEM,
    Confinement,
    Measure,
    confine,
    receive_answer,
    start_on_pipe,
)
from manylora.core.isolation.landlock import FileRules, landlock_version
from manylora.core.isolation.namespaces import NEW_PROCESSES, enter_namespaces
from manylora.core.isolation.seccomp import restrict_calls

__all__ = [
    "MEASURES",
    "NEW_PROCESSES",
    "ONE_THREAD",
    "READABLE_OF_SYSTEM",
    "Cgroup",
    "Confinement",
    "FileRules",
    "Measure",
    "ProcessorShare",
    "confine",
    "enter_namespaces",
    "enter_own_share",
    "landlock_version",
    "receive_answer",
    "remove_groups_of_the_dead",
    "restrict_calls",
    "start_on_pipe",
]

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
from manylora.core.isolation.namespaces import NEW_PROCESSES, enter_namespaces

__all__ = [
    "MEASURES",
    "NEW_PROCESSES",
    "ONE_THREAD",
    "READABLE_OF_SYSTEM",
    "Cgroup",
    "Confinement",
    "Measure",
    "ProcessorShare",
    "confine",
    "enter_namespaces",
    "enter_own_share",
    "receive_answer",
    "remove_groups_of_the_dead",
    "start_on_pipe",
]

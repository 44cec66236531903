"""Lock a process in before it touches a tenant's bytes: no new files, sockets, processes or rights.

Every measure of the kernel is taken that is to be had, and a report names those that were not.
"""

from manylora.isolation.cgroups import Cgroup, remove_groups_of_the_dead
from manylora.isolation.confine import MEASURES, READABLE_OF_SYSTEM, Confinement, Measure, confine
from manylora.isolation.landlock import FileRules, landlock_version
from manylora.isolation.seccomp import restrict_calls
from manylora.isolation.share import ProcessorShare, enter_own_share

__all__ = [
    "MEASURES",
    "READABLE_OF_SYSTEM",
    "Cgroup",
    "Confinement",
    "FileRules",
    "Measure",
    "ProcessorShare",
    "confine",
    "enter_own_share",
    "landlock_version",
    "remove_groups_of_the_dead",
    "restrict_calls",
]

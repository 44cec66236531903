"""Lock a process in before it touches a tenant's bytes: no new files, sockets, processes or rights.

Every measure that the kernel offers is taken; a report names the measures that are missing.
"""

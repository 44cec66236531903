"""Compromises the functions of zygotes that start with this folder in ``PYTHONPATH``, and no other process."""

import sys

if "manylora.functions.processes.zygote_process" in sys.orig_argv:
    from starve_others import compromise

    compromise()

"""The isolated functions of one machine: they sleep and wake, share memory and device, and each has its account.

::

    BackboneFleet   the server's view of the functions of one backbone
    FunctionNode    all functions: memory, pre-loading, keep-alive, account
    FunctionInstance   one function: its requests, its phases      BackboneHost   one base: memory, holder, zygote
    launch          one process, from the zygote, as a Fleet
"""

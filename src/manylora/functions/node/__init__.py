"""The isolated functions of one machine: they sleep and wake, share memory and device, and each has its account.

::

    BackboneFleet    the server's view of the functions of one backbone
    FunctionNode     all functions: orders, keep-alive, reports
      NodeRoom           memory: what leaves it when a function wakes
      NodeAccounts       who pays for each second
      BackboneHost       a base, its holder and its zygote
      FunctionInstance   one function: its phase, the queue of its requests
        Launcher             starts its process, and keeps it as a Fleet
"""

"""The controller of functions: the desired state, the nodes that report to it, and the ledger.

::

    TOML, REST ---> Controller ---> Store (SQLite)
                      ^    |
              Report  |    |  Orders: functions of the node, artefacts to hold
                      |    v
                     agents, one on each node
"""

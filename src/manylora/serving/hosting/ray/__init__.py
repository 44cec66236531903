"""Engines on the nodes of a Ray cluster.

Ray places an engine, hands the public keys of its sockets over, and reports its end. Tokens do not pass through Ray:
the API process and the engine speak ZeroMQ.

::

    API process                              Ray                         node
    RayLink                                                              EngineActor
      |-- placement group, actor ------------>|--- places, starts ------->|  listens on two ports
      |<-- Door: address, ports, public key --|<--------------------------|  and makes the engine's keys
      |-- engine, public key of this process->|-------------------------->|--- starts ---> engine process
      |<============ EngineConnection: commands, messages (CURVE) =======================>|
      |<-- exit code of the engine -----------|<--------------------------|<--------------|
"""

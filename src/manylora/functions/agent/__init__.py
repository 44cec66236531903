"""The agent of a node: it owns the node's backbones and functions, and serves them with OpenAI's API.

::

    clients ---> Dispatch ---> the server's application, one for each backbone ---> FunctionNode ---> processes
                                                                                        ^
    controller <--- reports, once a second --- Agent --- orders -------------------------+
"""

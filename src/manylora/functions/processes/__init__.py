"""Isolated functions: engine processes of one adapter each, locked in, over one sealed copy of the base.

::

    backbone process   loads, fuses, packs and seals the base     --- descriptor and table --->  API process
    zygote process     imports everything, maps no tenant's bytes      --- fork --->  function process
    function process   confined first, then: map, build, read its adapter, serve its socket
"""

"""The time that a step or a load takes: its features, the protocol over cost models, and the models themselves.

``roofline`` derives prices from a data sheet, ``fitted`` reads a profile that ``calibrate`` made from a step log,
``online`` learns while steps run. A simulator, a scheduler and a router ask the same questions of them.
"""

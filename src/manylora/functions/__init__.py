"""Isolated functions on shared backbones: decisions, processes, nodes, agents, the controller."""

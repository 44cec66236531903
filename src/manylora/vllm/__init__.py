"""A plug-in for vLLM: the core's order, eviction and prefetching of adapters, and loads beside the steps.

``gate.py`` decides, with the core's own parts, and knows no vLLM. ``connector.py`` and ``worker.py`` are the two sides
of vLLM that it speaks with; nothing outside this folder imports ``vllm``.
"""

"""The ground of every product: engine, scheduling, memory, adapters, routing and scaling, without torch or threads."""

__all__ = ["__version__"]

__version__ = "0.2.0"

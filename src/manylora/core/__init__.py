"""The ground of every product: engine, scheduling, memory, adapters, routing and scaling, without torch or threads."""

"""Which replica serves a request: policies over what replicas tell of themselves."""

__all__: list[str] = []

"""One backend: its health, its reports, and the requests of this router there."""

"""The live page at ``/ui``: its files, sessions and viewers, for every server in the house."""

from manylora.serving.http.page.page import LivePage, PageAction

__all__ = ["LivePage", "PageAction"]

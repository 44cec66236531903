"""Forms of answers are checked in a process that may die of them, before an engine gets them."""

from manylora.serving.text.forms.process import FormProcess, FormSettings

__all__ = ["FormProcess", "FormSettings"]

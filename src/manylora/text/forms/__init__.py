"""Forms of answers are checked in a process that may die of them, before an engine hears of them."""

from manylora.text.forms.messages import FormSettings
from manylora.text.forms.process import FormProcess

__all__ = ["FormProcess", "FormSettings"]

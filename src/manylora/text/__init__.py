"""Between text and tokens: tokenizer, chat template, incremental detokenisation, stop strings.

Above the engine, which knows only token ids; used by the server and the offline API alike.
"""

from manylora.text.detokenizer import Detokenizer, TextDelta, TokenLogprob
from manylora.text.stop_strings import StopMatch, StopStrings
from manylora.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatch", "StopStrings", "TextDelta", "TokenLogprob", "Tokenizer"]

"""Token ids in this process, from the model's own tokenizer and chat template."""

from __future__ import annotations

from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import Chat, EngineFlags, render_chat
from kvroute.tokens.model import ModelFiles
from kvroute.tokens.reading import Plain, TokenIds, read, truncated
from kvroute.tokens.reason import Inexact, Reason
from kvroute.tokens.segments import SegmentCache


class LocalTokenizer:
    """One model's prompts as token ids. Blocking; meant for a thread. Thread-safe.

    `cache` belongs to this model alone (the same text has other ids elsewhere).
    """

    def __init__(self, files: ModelFiles, cache: SegmentCache, flags: EngineFlags | None = None) -> None:
        self._files = files
        self._cache = cache
        self._flags = flags or EngineFlags()

    @property
    def files(self) -> ModelFiles:
        return self._files

    @property
    def cache(self) -> SegmentCache:
        return self._cache

    def prompts(self, request: InferenceRequest) -> tuple[TokenIds, ...]:
        """The ids of each of the request's prompts, in order.

        Raises Inexact. A chat of 32,000 tokens that is known but for its last turn takes 0.4 ms with
        fastokens and 1.5 to 4 ms with tokenizers; one not known 4 ms and 60 ms or more
        (bench/micro_tokens.py).
        """
        prompt = read(request, self._flags, self._files.template)
        if isinstance(prompt, Chat):
            return (self._chat(prompt),)
        if prompt.ids:
            return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in prompt.ids)
        return tuple(self._encoded(text, prompt) for text in prompt.texts)

    def text_of(self, chat: Chat) -> str:
        """A chat as the model sees it."""
        template = self._files.template(chat.tools is not None)
        if template is None:
            raise Inexact(Reason.NO_TEMPLATE)
        return render_chat(chat, template)

    def _chat(self, chat: Chat) -> TokenIds:
        return self._encoded(self.text_of(chat), chat)

    def _encoded(self, text: str, how: Chat | Plain) -> TokenIds:
        try:
            ids = self._cache.encode(self._files.cutter.segments(text), self._files.encoder.encode)
        except (UnicodeEncodeError, TypeError):  # a lone surrogate, from an escape inside arguments
            raise Inexact(Reason.UNREADABLE) from None
        if not how.add_special_tokens:
            return truncated(ids, how.truncate_to, how.truncation_side)
        if self._files.added_around is None:
            raise Inexact(Reason.UNSUPPORTED)
        before, after = self._files.added_around
        if how.truncate_to is None or how.truncation_side is not None:
            return truncated(before + ids + after, how.truncate_to, how.truncation_side)
        # Without a side of its own the tokenizer truncates, and it keeps what it adds.
        room = how.truncate_to - len(before) - len(after)
        if room <= 0:
            raise Inexact(Reason.TRUNCATION)
        return before + truncated(ids, room, None) + after

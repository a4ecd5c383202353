"""Token ids in this process, from the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import ref

from kvroute.blocks.known_prompts import PrefixIds, PromptIds
from kvroute.openai.request import InferenceRequest
from kvroute.tokens.chat import Chat, EngineFlags, chat_completion, render_chat
from kvroute.tokens.conversations import (
    CHAT_PATH,
    CachedConversation,
    Conversations,
    Mark,
    continued,
    opening,
    signature_of,
    with_more_messages,
)
from kvroute.tokens.model import ModelFiles
from kvroute.tokens.options import Inexact, TokensReason
from kvroute.tokens.reading import Plain, TokenIds, read, truncated
from kvroute.tokens.segments import SegmentCache, joined
from kvroute.tokens.template import ChatTemplate

_QUICK_MESSAGES: Final = 32
"""More of them take long to render, however short they are."""


class LocalTokenizer:
    """One model's prompts as token ids. Blocking; meant for a thread. Thread-safe.

    `cache` and `conversations` belong to this model alone (the same text has other ids elsewhere).
    """

    def __init__(
        self,
        files: ModelFiles,
        cache: SegmentCache,
        flags: EngineFlags | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        self._files = files
        self._cache = cache
        self._flags = flags or EngineFlags()
        self._conversations = Conversations(0) if conversations is None else conversations

    @property
    def files(self) -> ModelFiles:
        return self._files

    @property
    def cache(self) -> SegmentCache:
        return self._cache

    def prompts(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        """The ids of each of the request's prompts, in order.

        Raises Inexact. What is new of a chat that is known but for its last turn decides what that takes,
        where the chat template renders message by message; else a chat of 32,000 tokens takes 0.4 ms with
        fastokens and 1.5 to 4 ms with tokenizers; one not known 4 ms and 60 ms or more
        (bench/micro_tokens.py).
        """
        known = self._conversations.find(request)
        if known is not None and (ids := self._continued(request, known)) is not None:
            return (ids,)
        return self._all(request)

    def prompts_at_once(self, request: InferenceRequest) -> tuple[Sequence[int], ...] | None:
        """The same where it takes well under a millisecond, else None: `Encoder.quick_bytes` of JSON are
        new. May be called from the event loop's thread. Raises Inexact."""
        body, quick = request.body, self._files.encoder.quick_bytes
        if len(body) <= quick:
            messages = request.messages
            if messages is not None and len(messages) > _QUICK_MESSAGES:
                return None
            return self.prompts(request)
        known = self._conversations.find(request)
        if known is None or len(body) - known.end + len(known.carry) > quick:
            return None
        ids = self._continued(request, known, most=_QUICK_MESSAGES)
        return None if ids is None else (ids,)

    def text_of(self, chat: Chat) -> str:
        """A chat as the model sees it."""
        return render_chat(chat, self._template(chat))

    def _template(self, chat: Chat) -> ChatTemplate:
        template = self._files.template(chat.tools is not None)
        if template is None:
            raise Inexact(TokensReason.NO_TEMPLATE)
        return template

    def _all(self, request: InferenceRequest) -> tuple[Sequence[int], ...]:
        """Without looking for what it continues."""
        prompt = read(request, self._flags, self._files.template)
        if isinstance(prompt, Chat):
            text = self.text_of(prompt)
            ids = self._begun(request, prompt, text)
            return (self._encoded(text, prompt) if ids is None else ids,)
        if prompt.ids:
            return tuple(truncated(ids, prompt.truncate_to, prompt.truncation_side) for ids in prompt.ids)
        return tuple(self._encoded(text, prompt) for text in prompt.texts)

    def _begun(self, request: InferenceRequest, chat: Chat, text: str) -> Sequence[int] | None:
        """The ids of a chat that is kept to be continued; None if it cannot be."""
        if request.endpoint.path != CHAT_PATH or len(request.body) < self._conversations.least_bytes:
            return None
        template = self._template(chat)
        signature = signature_of(chat) if _is_separable(chat.messages, template) else None
        if signature is None or (found := opening(request)) is None:
            return None
        head, tail = template.around(**_arguments(chat))
        bare = Chat(messages=(), tools=chat.tools, kwargs=chat.kwargs)
        nothing = CachedConversation(
            (0, 0), (), b"", found.before, bare, signature, len(head), tail, "", PrefixIds()
        )
        return self._kept(nothing, found.mark, request, text, None)

    def _continued(
        self, request: InferenceRequest, known: CachedConversation, most: int | None = None
    ) -> Sequence[int] | None:
        """The ids of a chat that continues a known one; None if it does not, after all, or has more than
        `most` new messages."""
        grown = with_more_messages(request, known)
        if grown is not None:
            chat, mark = grown
        else:
            found = continued(request, known)
            if found is None:
                return None
            chat, mark = chat_completion(found.fields, self._flags), found.mark
            if signature_of(chat) != known.signature:
                return None
        if most is not None and len(chat.messages) > most:
            return None
        template = self._template(chat)
        if not _is_separable(chat.messages, template):
            return None
        if template.content_format == "string" and (said := template.between(chat.messages)) is not None:
            return self._kept(known, mark, request, known.carry + said + known.tail, known)
        # As many messages as there are new ones: their text stands between the same head and tail.
        text = render_chat(chat, template) if chat.messages else "".join(template.around(**_arguments(chat)))
        return self._kept(known, mark, request, known.carry + text[known.head :], known)

    def _kept(
        self,
        known: CachedConversation,
        mark: Mark,
        request: InferenceRequest,
        text: str,
        instead: CachedConversation | None,
    ) -> PromptIds:
        """The ids of `known.ids` and `text`, which ends with the template's tail; what nothing that may
        follow can change of them is remembered."""
        segments = self._files.cutter.segments(text)
        end = len(text) - len(known.tail)
        # A segment begins where it does whatever follows `end`, if that is too far away to be looked at.
        limit, settled, start = end - self._files.cutter.reach, 0, 0
        place = 0
        for number, segment in enumerate(segments):
            if place > limit:
                break
            settled, start = number, place
            place += len(segment)
        parts = self._parts(segments)
        first = known.ids.extended(joined(parts[:settled])) if settled else known.ids
        if instead is None or mark != instead.mark:
            body, seen = request.body, request.seen
            kept = CachedConversation(
                mark,
                known.body_to(mark[0], body),
                body[mark[0] :],
                known.before,
                known.chat,
                known.signature,
                known.head,
                known.tail,
                text[start:end],
                first,
                None if seen is None else ref(seen.becomes or seen.beginning),
            )
            self._conversations.keep(kept, instead)
        return PromptIds(first, joined(parts[settled:]), known.ids)

    def _parts(self, segments: Sequence[str]) -> list[TokenIds]:
        try:
            return self._cache.encode_each(segments, self._files.encoder.encode)
        except (UnicodeEncodeError, TypeError):  # a lone surrogate, from an escape inside arguments
            raise Inexact(TokensReason.UNREADABLE) from None

    def _encoded(self, text: str, how: Chat | Plain) -> TokenIds:
        ids = joined(self._parts(self._files.cutter.segments(text)))
        if not how.add_special_tokens:
            return truncated(ids, how.truncate_to, how.truncation_side)
        if self._files.added_around is None:
            raise Inexact(TokensReason.UNSUPPORTED)
        before, after = self._files.added_around
        if how.truncate_to is None or how.truncation_side is not None:
            return truncated(before + ids + after, how.truncate_to, how.truncation_side)
        # Without a side of its own the tokenizer truncates, and it keeps what it adds.
        room = how.truncate_to - len(before) - len(after)
        if room <= 0:
            raise Inexact(TokensReason.TRUNCATION)
        return before + truncated(ids, room, None) + after


def _is_separable(messages: Sequence[Any], template: ChatTemplate) -> bool:
    """Whether these messages are rendered one by one. Where a template does not know developers, messages
    of theirs move others."""
    return template.is_separable and (
        template.knows_developer or all(message.get("role") != "developer" for message in messages)
    )


def _arguments(chat: Chat) -> dict[str, Any]:
    """Of the template, but for the messages."""
    kwargs = {"add_generation_prompt": False, **chat.kwargs, "tools": chat.tools}
    kwargs.pop("continue_final_message", None)
    return kwargs

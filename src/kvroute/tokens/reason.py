"""Why a prompt's token ids are not known, as metrics, decisions and logs name it."""

from __future__ import annotations

from enum import StrEnum

from kvroute.errors import KvrouteError


class Reason(StrEnum):
    LATE = "late"
    """The deadline passed."""
    BUSY = "busy"
    """Too much waits for the tokenizer's threads already."""
    NO_SOURCE = "no_source"
    """Nothing can tokenize for this model: no files of it, and no worker that answers."""
    WORKER_FAILED = "worker_failed"
    """The worker that was asked refused or broke off."""
    UNREADABLE = "unreadable"
    """The body is not what its endpoint takes."""
    STRUCTURE = "structure"
    """A large body of too many JSON values, beside its texts, to be decoded as a whole."""
    MEDIA = "media"
    """Images, audio, video or embeddings: their token ids are placeholders that say nothing."""
    REQUEST_TEMPLATE = "request_template"
    """The request brings a chat template of its own."""
    NO_TEMPLATE = "no_template"
    TEMPLATE_REFUSED = "template_refused"
    """The chat template cannot render this conversation; the worker will say so."""
    TRUNCATION = "truncation"
    """What remains depends on something only the worker knows, such as its context length."""
    STORED_RESPONSE = "stored_response"
    """The conversation continues a response that only its worker keeps."""
    FAILED = "failed"
    """Tokenizing failed on our side, which is a defect: the log has it."""
    UNSUPPORTED = "unsupported"
    """A field or an endpoint that changes the prompt in a way not rendered here."""


class Inexact(KvrouteError):
    """The token ids of a prompt cannot be told exactly. Raised and caught inside `tokens` only."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class UnusableModel(KvrouteError):
    """A model's folder does not hold what tokenizing needs; the text says what is wrong."""

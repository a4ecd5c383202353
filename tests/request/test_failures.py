import json

import pytest

from kvroute.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NoRoutableWorker,
    TooManyRequests,
    Unauthorized,
    WorkerTimeout,
    WorkerUnreachable,
)
from kvroute.openai.endpoints import ErrorShape
from kvroute.request.failures import InternalError, answer_error, error_body, error_event, late_error_event

ERROR = WorkerUnreachable("Gone.")


def test_errors_have_openais_shape():
    assert json.loads(error_body(BodyTooLarge(5))) == {
        "error": {
            "message": "The request body is larger than 5 bytes (server.max_body_bytes).",
            "type": "invalid_request_error",
            "param": None,
            "code": "body_too_large",
        }
    }


def test_anthropics_clients_find_their_own_shape_around_it():
    assert json.loads(error_body(ERROR, ErrorShape.ANTHROPIC))["type"] == "error"


def test_error_events_are_separate_even_when_the_stream_was_cut_inside_an_event():
    for shape in ErrorShape:
        event = b'data: {"half' + error_event(ERROR, shape)
        last = event.rstrip(b"\n").split(b"\n\n")[-1]
        data = last.split(b"data: ", 1)[1]
        assert "Gone." in json.dumps(json.loads(data))
        assert event.endswith(b"\n\n")


@pytest.mark.parametrize("shape", ErrorShape)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (error_body(ERROR), "Gone."),
        (error_body(ERROR, ErrorShape.ANTHROPIC), "Gone."),
        (b'{"object":"error","message":"too long","type":"BadRequestError","code":400}', "too long"),
        (b'{"message":"a\\ud800\\nb","code":["x"],"param":1.5}', "a?\nb"),
        (b'{"error":"a text"}', "status 400"),
        (b'{"error":{"message":7}}', "status 400"),
        (b'{"error":{"message":"cut', "status 400"),
        (b"[" * 100_000, "status 400"),
        (b"\xff\xfe", "status 400"),
        (b"9" * 5_000, "status 400"),
        (b"", "status 400"),
    ],
)
def test_any_error_answer_becomes_one_event_of_the_endpoints_form(shape, body, message):
    lines = late_error_event(400, body, shape).strip(b"\n").split(b"\n")

    assert lines[:-1] == ([] if shape is ErrorShape.OPENAI else [b"event: error"])
    data = json.loads(lines[-1].removeprefix(b"data: "))
    inner = data if shape is ErrorShape.RESPONSES else data["error"]
    assert message in inner["message"]
    assert shape is not ErrorShape.RESPONSES or isinstance(inner["code"], str)


class Answer:
    """A `Downstream` that keeps what it is given."""

    is_paused = False

    def start(self, status, headers):
        self.status, self.headers = status, dict(headers)

    def finish(self, chunk=b""):
        self.body = chunk

    write = cut = None


def answered(error):
    answer = Answer()
    answer_error(answer, error)
    return answer


def test_an_answer_declares_its_length_and_when_to_come_back():
    answer = answered(TooManyRequests("Busy.", retry_after_s=3))

    assert answer.headers[b"retry-after"] == b"3"
    assert int(answer.headers[b"content-length"]) == len(answer.body)
    assert answer.status == 429


def test_a_401_names_the_authorization_scheme():
    assert answered(Unauthorized("Key?")).headers[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("No."), "invalid_request_error"),
        (Unauthorized("Key?"), "authentication_error"),
        (Forbidden("No."), "permission_error"),
        (ModelNotFound("m"), "not_found_error"),
        (BodyTooLarge(5), "request_too_large"),
        (TooManyRequests("Busy."), "rate_limit_error"),
        (InternalError("Internal error."), "api_error"),
        (WorkerUnreachable("Gone."), "api_error"),
        (NoRoutableWorker("None."), "overloaded_error"),
        (WorkerTimeout("Late."), "timeout_error"),
    ],
)
def test_anthropics_clients_find_their_own_error_types(error, kind):
    assert json.loads(error_body(error, ErrorShape.ANTHROPIC))["error"]["type"] == kind
    assert json.loads(error_body(error))["error"]["type"] == error.type

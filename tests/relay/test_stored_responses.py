from kvroute.fleet.worker import WorkerId
from kvroute.relay.stored_responses import ResponseOwners, response_id_in

A, B = WorkerId("a"), WorkerId("b")


def test_the_most_recent_responses_are_remembered():
    owners = ResponseOwners(limit=2)
    owners.remember("resp_1", A)
    owners.remember("resp_2", A)
    owners.remember("resp_1", B)
    owners.remember("resp_3", B)

    assert [owners.owner(f"resp_{n}") for n in (1, 2, 3)] == [B, None, B]


def test_a_worker_that_left_holds_nothing():
    owners = ResponseOwners()
    owners.remember("resp_1", A)
    owners.remember("resp_2", B)

    owners.forget_worker(A)

    assert (owners.owner("resp_1"), owners.owner("resp_2")) == (None, B)


def test_ids_are_found_in_plain_and_streamed_answers():
    assert response_id_in(b'{"id":"resp_0a-b","object":"response"') == "resp_0a-b"
    assert response_id_in(b'event: response.created\ndata: {"response":{"id": "resp_1","x":1}}') == "resp_1"
    assert response_id_in(b'{"id":"chatcmpl-1"}') is None
    assert response_id_in(b'{"text":"\\"id\\": \\"resp_9\\""}') is None

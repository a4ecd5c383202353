"""A worker for bench/edge.py that reads any body without parsing it.

    python bench/edge_worker.py PORT

The worker answers every POST with a small completion. With the header `x-silence-s: N` the answer is an event
stream that sends one event, nothing for N seconds, and then a proper end.
"""

from __future__ import annotations

import asyncio
import json
import sys

from gateway_requests import MODEL

HEAD_MOST = 1 << 20
MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": 262_144}],
}
COMPLETION = {
    "id": "edge",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
METRICS = f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{MODEL}"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{MODEL}"}} 0.0
"""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request_line, *lines = head.split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            await skip_body(reader, headers)
            if silence := headers.get("x-silence-s"):
                await stream(writer, float(silence))
            else:
                writer.write(reply(*request_line.split(" ")[:2]))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the gateway has closed the connection because of the attack
    finally:
        writer.close()


async def skip_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).split(b";")[0], 16):
            await skip(reader, size + 2)
        while (await reader.readline()).strip():
            pass
    else:
        await skip(reader, int(headers.get("content-length", 0)))


async def skip(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        got = await reader.read(min(size, 1 << 20))
        if not got:
            raise asyncio.IncompleteReadError(b"", size)
        size -= len(got)


async def stream(writer: asyncio.StreamWriter, silence_s: float) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    end = b"data: [DONE]\n\n"
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
    await writer.drain()
    await asyncio.sleep(silence_s)
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))


def reply(method: str, path: str) -> bytes:
    kind = "application/json"
    if method == "POST":
        text = json.dumps(COMPLETION)
    elif path.startswith("/v1/models"):
        text = json.dumps(MODELS)
    elif path.startswith("/metrics"):
        text, kind = METRICS, "text/plain; version=0.0.4"
    else:
        text = json.dumps({"status": "ok", "version": "0.32.0"})
    body = text.encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        kind.encode(),
        len(body),
        body,
    )


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]), limit=HEAD_MOST, backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())

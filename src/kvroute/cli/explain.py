"""`kvroute explain`: says in a sentence where a prompt would go, or where a request went, and why."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx

from kvroute.cli.doctor import CLIENT_KEY, TIMEOUT_S, CannotRun, admin_key
from kvroute.config.loading import load
from kvroute.config.paths import ConfigSetting
from kvroute.errors import InvalidConfig


@click.command()
@click.argument("prompt", required=False)
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The gateway.")
@click.option("--request-id", metavar="ID", help="Explain a request that the gateway has served.")
@click.option("--model", metavar="NAME", help="Model of the prompt; needed if the gateway serves several.")
@click.option(
    "--body", metavar="FILE", type=click.File("rb"), help="A request body (JSON) instead of a prompt."
)
@click.option("--admin-key-file", metavar="FILE", type=click.Path(path_type=Path), help="For --request-id.")
@click.option("--json", "as_json", is_flag=True, help="Print the decision as JSON.")
def explain(
    prompt: str | None,
    url: str,
    request_id: str | None,
    model: str | None,
    body: io.BufferedReader | None,
    admin_key_file: Path | None,
    as_json: bool,
) -> None:
    """Say where a prompt would go, or where a request went, and why.

    PROMPT becomes a chat of one user message; nothing is sent to a worker. A client's key is read from
    KVROUTE_API_KEY.
    """
    if sum(argument is not None for argument in (prompt, request_id, body)) != 1:
        raise click.UsageError("Give one of PROMPT, --body and --request-id.")
    url = url.rstrip("/")
    if request_id is not None:
        decision = _recorded(url, request_id, admin_key_file)
    else:
        document = body.read() if body is not None else _chat(prompt or "", model)
        decision = _explained(url, document)
    text = json.dumps(decision, indent=2, ensure_ascii=False) if as_json else sentence(decision, request_id)
    click.echo(text)


def _chat(prompt: str, model: str | None) -> bytes:
    document: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    if model is not None:
        document["model"] = model
    return json.dumps(document).encode()


def _explained(url: str, body: bytes) -> dict[str, Any]:
    key = os.environ.get(CLIENT_KEY)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    return _answer(lambda client: client.post(url + "/v1/route/explain", content=body, headers=headers), url)


def _recorded(url: str, request_id: str, file: Path | None) -> dict[str, Any]:
    try:
        flags = [ConfigSetting(("admin", "api_key_file"), str(file), "--admin-key-file")] if file else []
        key = admin_key(load(environ=os.environ, flags=flags).config, url)
    except InvalidConfig as error:
        raise CannotRun(str(error)) from error
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = _answer(lambda client: client.get(url + "/admin/decisions?limit=1000", headers=headers), url)
    for decision in answer["decisions"]:
        if decision["request_id"] == request_id:
            return dict(decision)
    raise CannotRun(
        f"the gateway's last {len(answer['decisions'])} decisions have no request {request_id!r}; "
        "the answer's header x-request-id has its id"
    )


def _answer(call: Any, url: str) -> dict[str, Any]:
    try:
        with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as client:
            answer = call(client)
            document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CannotRun(f"{url} cannot be reached: {error}; --url names another gateway") from error
    except ValueError:
        raise CannotRun(f"{url} is not a kvroute gateway") from None
    if not answer.is_success:
        message = document.get("error", {}).get("message") if isinstance(document, dict) else None
        raise CannotRun(f"{url} answered {answer.status_code}: {message or 'no reason given'}")
    return dict(document)


def sentence(decision: Mapping[str, Any], request_id: str | None = None) -> str:
    """One decision in a sentence: the worker, the reason, and what the next best one would have cost."""
    subject = f"Request {request_id} went" if request_id is not None else "The prompt goes"
    ranking = decision.get("ranking") or []
    if not ranking:
        reason = decision.get("error") or "it was refused before a worker was chosen"
        return f"{subject} to no worker: {reason} (status {decision.get('status')})."
    best = ranking[0]
    tokens, matched = decision.get("prompt_tokens") or 0, best["matched_tokens"]
    text = f"{subject} to {best['worker']} by {decision['strategy']} (reason: {decision['reason']})"
    cached = f"{matched:,} of {tokens:,} prompt tokens" if tokens else f"{matched:,} prompt tokens"
    text += (
        f": it is expected to hold {cached}"
        if matched
        else f": no part of the {tokens:,} prompt tokens is cached there"
    )
    if best.get("score_s") is not None:
        text += f", and the estimated cost is {best['score_s']:.3f} s"
    if len(ranking) > 1:
        second = ranking[1]
        text += f"; next is {second['worker']} with {second['matched_tokens']:,} cached tokens"
        if second.get("score_s") is not None:
            text += f" and {second['score_s']:.3f} s"
    served = decision.get("worker")
    if request_id is not None and served not in (None, "-", best["worker"]):
        text += f". After a failed attempt {served} served it"
    return text + "."

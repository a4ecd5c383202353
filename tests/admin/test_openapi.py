"""The OpenAPI description, as far as FastAPI does not write it."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.admin.openapi import complete_schema


def described(needs_key: bool) -> dict[str, Any]:
    operation = {"tags": ["gateway"], "responses": {"200": {}, "422": {}}}
    paths = {path: {"get": dict(operation)} for path in ("/ready", "/health", "/v1/models", "/admin/config")}
    return complete_schema(
        {"paths": paths, "components": {"schemas": {"ValidationError": {}}}}, needs_key=needs_key
    )


@pytest.mark.parametrize("needs_key", [True, False])
def test_each_operation_names_its_errors_and_its_key(needs_key: bool) -> None:
    paths = described(needs_key)["paths"]

    of_clients = [{"clientKey": []}] if needs_key else None
    assert paths["/admin/config"]["get"]["security"] == [{"adminKey": []}]
    assert paths["/v1/models"]["get"].get("security") == of_clients
    assert paths["/v1/chat/completions"]["post"].get("security") == of_clients
    assert "security" not in paths["/health"]["get"]
    assert paths["/v1/models"]["get"]["responses"].keys() == {"200", "4XX"}
    assert paths["/ready"]["get"]["responses"].keys() == {"200", "4XX", "503"}


def test_answers_of_the_framework_that_the_gateway_does_not_give_are_left_out() -> None:
    assert described(False)["components"]["schemas"] == {}

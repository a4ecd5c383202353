"""docs/metrics.md: every family has a question, and the declarations are those of any configuration."""

from __future__ import annotations

from kvroute.app.collectors import declared_families
from kvroute.app.reference import families, label_names, metrics_page, questions
from kvroute.app.runtime import Runtime
from kvroute.config.config import Config


def test_every_family_has_a_question_and_every_question_a_family() -> None:
    """If this fails: add the family to `GROUPS` of `app/reference.py`."""
    assert {family.name for family in families()} == set(questions())


def test_a_gateway_with_a_map_declares_the_same_families_as_one_without() -> None:
    def declared(config: Config) -> dict[str, tuple[str, str, tuple[str, ...]]]:
        return {
            family.name: (family.type, family.documentation, label_names(family))
            for family in Runtime(config).metrics.registry.collect()
        }

    without = declared(Config())
    routing = {"strategy": "kvaware"}
    coordinator = {"coordinator": {"enabled": True}}
    full = Config.model_validate({"routing": routing, "lmcache": coordinator})

    assert declared(full) == without
    assert {family.name for family in declared_families()} <= set(without)


def test_a_family_without_a_question_is_still_on_the_page() -> None:
    class Named:
        name, type, documentation = "kvroute_new", "gauge", "Something new."

    page = metrics_page([*families(), Named()])  # type: ignore[list-item]

    assert "## Other" in page
    assert "Something new." in page.rpartition("## Other")[2]

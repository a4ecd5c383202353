"""Which model names the fleet knows, and what each of them means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvroute.errors import InvalidRequest, ModelNotFound, NoRoutableWorker
from kvroute.fleet.worker import HealthState, Worker

_SHOWN_CHOICES = 20


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """The fleet's models as of one version of it, healthy or not: health decides who serves a model,
    not whether it exists.

    `names` maps every name a client may use (models, adapters, aliases) to the one the workers know;
    `bases` are the choices where no model is named: adapters and second names of one model do not
    count. `is_complete` is False while a worker that was never probed may serve more.
    """

    names: Mapping[str, str]
    bases: tuple[str, ...]
    cards: tuple[Mapping[str, object], ...]
    is_complete: bool

    def resolve(self, model: str | None) -> str:
        """The name under which workers know `model`; None means the fleet's only model.

        Raises ModelNotFound, InvalidRequest (no model named and several to choose from), or
        NoRoutableWorker (it cannot be told yet: no worker has said what it serves).
        """
        if model is None:
            return self._only_model()
        name = self.names.get(model)
        if name is not None:
            return name
        if self.is_complete and self.cards:
            raise ModelNotFound(model)
        raise NoRoutableWorker(
            "No healthy worker has said yet whether it serves this model.", param="model", retry_after_s=1
        )

    def _only_model(self) -> str:
        if len(self.bases) == 1:
            return self.bases[0]
        if not self.bases:
            raise NoRoutableWorker("No healthy worker has said yet which models it serves.", retry_after_s=1)
        shown = ", ".join(self.bases[:_SHOWN_CHOICES])
        more = ", ..." if len(self.bases) > _SHOWN_CHOICES else ""
        raise InvalidRequest(
            f"`model` is missing, and this gateway serves several: {shown}{more}.", param="model"
        )


def catalog_of(workers: Iterable[Worker], aliases: Mapping[str, str], created: int = 0) -> ModelCatalog:
    """Merge what `workers` serve with `aliases` (name -> model or adapter).

    An alias wins over a served model of the same name. Where several workers describe a model, a
    healthy one's card is shown. `created` is the Unix time on cards that no worker wrote.
    """
    ordered = sorted(workers, key=lambda worker: (not worker.is_routable, worker.id))
    cards: dict[str, Mapping[str, object]] = {}
    for worker in ordered:
        for card in worker.facts.model_cards:
            cards.setdefault(str(card["id"]), card)
    for worker in ordered:
        for name in sorted(worker.models):
            cards.setdefault(name, _card(name, created))
    configured = {name for worker in ordered for name in worker.spec.models}
    names = {name: name for name in (*cards, *configured, *aliases.values())} | dict(aliases)
    for name, target in aliases.items():
        if target in cards:
            cards[name] = {**cards[target], "id": name}
    return ModelCatalog(
        names=names,
        bases=tuple(dict.fromkeys(base for worker in ordered for base in _bases(worker))),
        cards=tuple(cards.values()),
        is_complete=not any(worker.state is HealthState.UNKNOWN and not worker.models for worker in ordered),
    )


def _bases(worker: Worker) -> list[str]:
    """Its models without adapters, the first name only where vLLM serves one under several
    (`--served-model-name a b` lists both with one `root`)."""
    adapters = {name for name, _ in worker.facts.adapters}
    roots = {card["id"]: card.get("root") for card in worker.facts.model_cards}
    listed = [str(name) for name in roots] or sorted(worker.models)
    by_root: dict[object, str] = {}
    for name in listed:
        if name not in adapters:
            by_root.setdefault(roots.get(name) or name, name)
    return list(by_root.values())


def _card(name: str, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvroute",
        "root": name,
        "parent": None,
    }

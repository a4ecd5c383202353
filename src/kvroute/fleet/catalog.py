"""The catalog of the fleet's models: served names, bases and adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvroute.errors import InvalidRequest, ModelNotFound, NoRoutableWorker
from kvroute.fleet.worker import (
    HealthState,
    Worker,
)

_SHOWN_CHOICES = 20


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """The models of all workers of one fleet version, healthy or not."""

    # Unhealthy workers count: health decides which worker serves a model, not whether the model exists.

    names: Mapping[str, str]
    """Every name that a client may use (model, adapter, alias) -> the name that the workers know."""
    canonical: Mapping[str, str]
    """Each further name of a model that has several on the workers -> the one that stands for all of them."""
    bases: tuple[str, ...]
    """Models for a request that names none, without adapters: of each one the canonical name."""
    cards: tuple[Mapping[str, object], ...]
    is_complete: bool
    """False while a worker that was never probed may serve other models."""

    def resolve(self, model: str | None) -> str:
        """The name of `model` on the workers; None means the fleet's only model.

        Raises ModelNotFound, InvalidRequest (no model is named and the fleet has several), or
        NoRoutableWorker (unknown yet: no worker has reported its models).
        """
        if model is None:
            return self._only_model()
        name = self.names.get(model)
        if name is not None:
            return name
        if self.is_complete and self.cards:
            raise ModelNotFound(model)
        raise NoRoutableWorker(
            "No healthy worker has reported yet whether it serves this model.",
            param="model",
            retry_after_s=1,
        )

    def _only_model(self) -> str:
        if len(self.bases) == 1:
            return self.bases[0]
        if not self.bases:
            raise NoRoutableWorker("No healthy worker has reported its models yet.", retry_after_s=1)
        shown = ", ".join(self.bases[:_SHOWN_CHOICES])
        more = ", ..." if len(self.bases) > _SHOWN_CHOICES else ""
        raise InvalidRequest(
            f"`model` is missing, and this gateway serves several: {shown}{more}.", param="model"
        )


def catalog_of(
    workers: Iterable[Worker],
    aliases: Mapping[str, str],
    created: int = 0,
    configured_names: Collection[str] = (),
) -> ModelCatalog:
    """Merge the models of `workers` with `aliases` (name -> model or adapter).

    An alias wins over a served model of the same name. If several workers describe a model, the card of a
    healthy one is used. `created` is the Unix time on cards that no worker wrote. `configured_names`: see
    `canonical_names`.
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
    canonical = canonical_names(ordered, configured_names)
    return ModelCatalog(
        names=names,
        canonical=canonical,
        bases=tuple(
            dict.fromkeys(canonical.get(name, name) for worker in ordered for name in _bases(worker))
        ),
        cards=tuple(cards.values()),
        is_complete=not any(worker.state is HealthState.UNKNOWN and not worker.models for worker in ordered),
    )


def _bases(worker: Worker) -> list[str]:
    """The worker's models without adapters, in the order of its list."""
    adapters = {name for name, _ in worker.facts.adapters}
    listed = [str(card["id"]) for card in worker.facts.model_cards] or sorted(worker.models)
    return [name for name in listed if name not in adapters]


def canonical_names(workers: Sequence[Worker], configured: Collection[str] = ()) -> dict[str, str]:
    """The canonical name of each model name that has another one; a pure function of what workers list.

    Names are those of one model if one worker lists them with the same `root` and without `parent`, as vLLM
    does for `--served-model-name a b`; two workers have the same model if they share a name. The canonical
    name is one that is `configured` with options of its own, if there is one; else the name that most workers
    have; else the first one in their lists.
    """
    # Equal roots on two workers say nothing: in most containers every model is at /opt/ml/model.
    models = {(root, frozenset(names)) for worker in workers for root, names in _served_names(worker)}
    sharing: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for model in models:
        for name in model[1]:
            sharing.setdefault(name, []).append(model)
    doubtful = {
        name
        for name, models_of_name in sharing.items()
        if len(models_of_name) > 1 and _are_different(models_of_name)
    }
    joined: dict[str, set[str]] = {}
    for _, names in models:
        whole = set(names - doubtful)
        for name in names - doubtful:
            whole |= joined.get(name, set())
        for name in whole:
            joined[name] = whole
    rank: dict[str, tuple[bool, int, int, str]] = {}
    for worker in workers:
        for position, name in enumerate(_bases(worker)):
            if name in joined:
                _, count, best_position, _ = rank.get(name, (False, 0, position, name))
                rank[name] = name not in configured, count - 1, min(best_position, position), name
    best = {name: min(whole, key=rank.__getitem__) for name, whole in joined.items()}
    return {name: chosen for name, chosen in best.items() if name != chosen}


def _served_names(worker: Worker) -> list[tuple[str, list[str]]]:
    """The worker's models as (root, names)."""
    adapters = {name for name, _ in worker.facts.adapters}
    by_root: dict[str, list[str]] = {}
    for card in worker.facts.model_cards:
        root, name = card.get("root"), str(card["id"])
        if isinstance(root, str) and root and name not in adapters:
            by_root.setdefault(root, []).append(name)
    return list(by_root.items())


def _are_different(models: Sequence[tuple[str, frozenset[str]]]) -> bool:
    """Whether two of these models, which share a name, have different roots and each a name of its own.

    The shared name is then a common name of different models, such as `default`, and joins none of them.
    """
    return any(
        root != other and not (names <= others or names >= others)
        for (root, names), (other, others) in combinations(models, 2)
    )


def _card(name: str, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvroute",
        "root": name,
        "parent": None,
    }

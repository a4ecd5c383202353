"""After any sequence of changes the fleet is consistent."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvroute.errors import InvalidRequest, NotFound
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.worker import Ejection, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec

IDS = st.sampled_from("abcd").map(WorkerId)
MODELS = st.frozensets(st.sampled_from(["m", "n"]))
SPECS = st.builds(
    WorkerSpec,
    IDS,
    st.integers(0, 5).map("http://host:{}".format),
    MODELS.map(lambda names: tuple(sorted(names))),
    st.none() | st.just(100),
    draining=st.booleans(),
)
SOURCES = st.sampled_from(["static", "file"])


class FleetStaysConsistent(RuleBasedStateMachine):
    """A listener's picture, built from changes alone, agrees with the fleet's own."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet({"alias": "m"})
        self.announced: dict[int, Worker] = {}
        self.capacity: dict[int, int] = {}
        self.left: list[Worker] = []
        self.versions = [self.fleet.version]
        self.shown: dict[str, tuple[int, tuple[Worker, ...]]] = {}
        self.fleet.subscribe(self.listen)

    def listen(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.JOINED:
            assert worker.index not in self.announced
            self.announced[worker.index] = worker
            self.capacity[worker.index] = worker.capacity_tokens
        elif change is FleetChange.LEFT:
            assert self.announced.pop(worker.index) is worker
            self.left.append(worker)
        else:
            assert self.announced[worker.index] is worker
            if change is FleetChange.CAPACITY:
                self.capacity[worker.index] = worker.capacity_tokens
            if change is FleetChange.EJECTED:
                assert not worker.is_routable

    def any_worker(self, data: st.DataObject) -> Worker | None:
        """One of the fleet's, or one that has left."""
        known = [*self.fleet.workers(), *self.left[-3:]]
        return data.draw(st.sampled_from(known)) if known else None

    @rule(source=SOURCES, specs=st.lists(SPECS, max_size=4))
    def apply(self, source: str, specs: list[WorkerSpec]) -> None:
        self.fleet.apply(source, specs)

    @rule(spec=SPECS)
    def add(self, spec: WorkerSpec) -> None:
        try:
            assert self.fleet.add(spec).spec == spec
        except InvalidRequest:
            assert any(w.spec.url == spec.url and w.id != spec.id for w in self.fleet.workers())

    @rule(worker_id=IDS, action=st.sampled_from(["remove", "drain", "undrain"]))
    def act(self, worker_id: WorkerId, action: str) -> None:
        known = {worker.id for worker in self.fleet.workers()}
        try:
            getattr(self.fleet, action)(worker_id)
        except NotFound:
            assert worker_id not in known
        else:
            assert worker_id in known

    @rule(data=st.data(), ramp_s=st.sampled_from([0.0, 10.0]))
    def passes(self, data: st.DataObject, ramp_s: float) -> None:
        if worker := self.any_worker(data):
            self.fleet.mark_healthy(worker, 5.0, ramp_start=0.1, ramp_s=ramp_s)

    @rule(data=st.data(), cause=st.sampled_from(Ejection))
    def ejected(self, data: st.DataObject, cause: Ejection) -> None:
        if worker := self.any_worker(data):
            self.fleet.mark_unhealthy(worker, cause, "trouble")

    @rule(data=st.data(), models=MODELS, capacity=st.none() | st.just(200), restarted=st.booleans())
    def describe(
        self, data: st.DataObject, models: frozenset[str], capacity: int | None, restarted: bool
    ) -> None:
        if worker := self.any_worker(data):
            facts = WorkerFacts(models=models, capacity_tokens=capacity)
            self.fleet.update_facts(worker, facts, restarted=restarted)

    @invariant()
    def ids_urls_and_indexes_are_unique(self) -> None:
        workers = self.fleet.workers()
        assert len({worker.id for worker in workers}) == len(workers)
        assert len({worker.spec.url for worker in workers}) == len(workers)
        assert len({worker.index for worker in workers}) == len(workers)
        assert all(worker.index < 4 for worker in workers)

    @invariant()
    def listeners_know_the_fleet(self) -> None:
        assert {id(worker) for worker in self.announced.values()} == {
            id(worker) for worker in self.fleet.workers()
        }
        assert all(self.capacity[worker.index] == worker.capacity_tokens for worker in self.fleet.workers())

    @invariant()
    def a_view_holds_exactly_the_healthy_workers_of_its_model(self) -> None:
        for model in ("m", "n"):
            view = self.fleet.view(model)
            expected = [
                w for w in self.fleet.workers() if w.state is HealthState.HEALTHY and model in w.models
            ]
            assert list(view.workers) == expected
            assert not set(map(id, self.left)) & set(map(id, view.workers))
            version, workers = self.shown.get(model, (-1, ()))
            assert version != view.version or workers == view.workers
            self.shown[model] = view.version, view.workers

    @invariant()
    def versions_only_rise(self) -> None:
        assert self.fleet.version >= self.versions[-1]
        self.versions.append(self.fleet.version)

    @invariant()
    def what_left_is_not_routable(self) -> None:
        assert not any(worker.is_routable for worker in self.left)

    @invariant()
    def every_served_model_is_known_and_listed(self) -> None:
        listed = {card["id"] for card in self.fleet.models()}
        for worker in self.fleet.workers():
            assert worker.models <= listed
            assert all(self.fleet.resolve(model) == model for model in worker.models)
        assert self.fleet.resolve("alias") == "m"

    @invariant()
    def readiness_agrees_with_the_views(self) -> None:
        routable = any(self.fleet.view(model).workers for model in ("m", "n"))
        assert routable == (self.fleet.reasons_not_ready() == [])


FleetStaysConsistent.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFleetStaysConsistent = FleetStaysConsistent.TestCase

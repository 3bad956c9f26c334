"""The use of models, reported to the supervisor."""

from __future__ import annotations

from router.fleet.router import Router


def demand(router: Router) -> dict[str, tuple[int, float]]:
    """Return the demand that decides which models are loaded (`Supervised.demand`)."""
    stranded = {
        model.id: router.dispatcher.wants(model.id)
        for model in router.registry.models.values()
        if not model.engines
    }
    return router.supervised.demand(router.dispatcher.models_in_use, stranded)


def load(router: Router) -> dict[str, tuple[int, float]]:
    """Return, by model, the requests in its queue, and the fraction of its engines' slots in
    use: the supervisor decides from these how many engines are needed."""
    found = {}
    for model in router.registry.models.values():
        places = sum(engine.hello.max_sequences for engine in model.ready_engines)
        taken = sum(len(engine.request_ids) for engine in model.ready_engines)
        queued = router.dispatcher.num_waiting(model.id)
        found[model.id] = (queued, round(taken / places, 3) if places else 0.0)
    return found

"""What the supervisor is told of the use of models."""

from __future__ import annotations

from router.fleet.router import Router


def demand(router: Router) -> dict[str, tuple[int, float]]:
    """Return what decides which models are loaded (`Supervised.demand`)."""
    stranded = {
        model.id: router.dispatcher.wants(model.id)
        for model in router.registry.models.values()
        if not model.engines
    }
    return router.supervised.demand(router.dispatcher.models_in_use, stranded)


def load(router: Router) -> dict[str, tuple[int, float]]:
    """Return, by model, the requests in its queue, and the part of its engines' places that is
    taken: what the supervisor needs to know how many engines are enough."""
    found = {}
    for model in router.registry.models.values():
        places = sum(engine.hello.max_sequences for engine in model.ready_engines)
        taken = sum(len(engine.request_ids) for engine in model.ready_engines)
        queued = router.dispatcher.num_waiting(model.id)
        found[model.id] = (queued, round(taken / places, 3) if places else 0.0)
    return found

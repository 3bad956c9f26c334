"""`/v1/systemone` and `/v1/decisions`: one endpoint for the forms of all clients."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import json_response, read_body
from router.api.endpoints import cancel_on_disconnect
from router.api.images import with_images
from router.api.operations import Operation
from router.decisions import listed, systemone
from router.decisions.asking import Decided, DecisionRun
from router.decisions.errors import PATHS, InvalidDecision
from router.decisions.questions import DecisionTask
from router.decisions.schemas import (
    DecisionErrorResponse,
    DecisionInputDetails,
    DecisionOutputDetails,
    DecisionRequest,
    DecisionResponse,
    DecisionUsage,
)
from router.errors import (
    BODY_ERRORS,
    MODEL_ERRORS,
    EndpointNotSupported,
    EngineLost,
    GenerationTimeout,
)
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant


async def decide(http: Request) -> Response:
    router: Router = http.app.state.router
    state = http.state
    tenant: Tenant = state.tenant
    body, size = await read_body(http, router, DecisionRequest)
    parse = listed.parsed_task if body.is_listed else systemone.parsed_task
    async with cancel_on_disconnect(http.receive):
        task = await router.work.run_large(tenant.share, lambda: parse(body), size)
        model = await router.loaded_model(body.model, tenant)
        _check_task(model)
        async with router.admit(tenant, model, state.limits_left):
            asking = DecisionRun(
                router,
                model,
                tenant,
                task,
                request_id=state.request_id,
                temperature=body.temperature or model.settings.decision_temperature,
                rotations=body.samples or 1,
                priority=body.priority,
                cache_salt=body.cache_salt,
                traceparent=http.scope["state"].get("traceparent", ""),
            )
            replicas, priority = model.replicas, tenant.priority(body.priority)
            queue = router.dispatcher.queue_of(replicas)
            router.admission.check_queue(replicas, queue, tenant, priority=priority, new=1)
            messages, size = await with_images(
                router, task.messages, model, http.state, asking.cache_salt, size
            )
            await router.work.run(tenant.share, lambda: asking.prepare(messages), size)
            await router.rate_limits.admit_prompt(tenant, asking.num_tokens, state.limits_left)
            decided = await asking.decide()
    router.metrics.decisions.labels(model.replicas.id).inc(len(task.questions))
    state.audit = {
        "model": model.names[0],
        "prompt_tokens": decided.input_tokens,
        "cached_tokens": decided.cached_tokens,
        "questions": len(task.questions),
    }
    answer = _answer(body, task, decided, body.model or model.names[0], state.path)
    return await router.work.run_large(tenant.share, lambda: json_response(answer), size)


def _check_task(model: Model) -> None:
    """Raise `EndpointNotSupported` if ``model`` does not generate text."""
    if (task := model.hello.task) != "generate":
        does = "embeds texts" if task == "embed" else "ranks texts"
        raise EndpointNotSupported(
            f"The model '{model.names[0]}' {does}; typed questions need a model that generates "
            "text."
        )


def _answer(
    body: DecisionRequest, task: DecisionTask, decided: Decided, model: str, path: str
) -> DecisionResponse:
    if body.is_listed:
        return DecisionResponse(
            model=model,
            answers=listed.written_answers(task.questions, decided.answers),
            usage=DecisionUsage(
                input_tokens=decided.input_tokens,
                cached_tokens=UNSET,
                input_tokens_details=DecisionInputDetails(cached_tokens=decided.cached_tokens),
                output_tokens_details=DecisionOutputDetails(),
                total_tokens=decided.input_tokens,
            ),
        )
    with_values = path.endswith("decisions") or systemone.has_other_types(task.questions)
    return DecisionResponse(
        model=model,
        answers=systemone.written_answers(task.questions, decided.answers, with_values=with_values),
        usage=DecisionUsage(input_tokens=decided.input_tokens, cached_tokens=decided.cached_tokens),
    )


_operation = partial(
    Operation,
    method="POST",
    tag="Decisions",
    body_type=DecisionRequest,
    response_type=DecisionResponse,
    headers={"x-typesafe-request-id": "The same as `x-request-id`, for TypeSafe's clients."},
    errors=(
        *BODY_ERRORS,
        *MODEL_ERRORS,
        InvalidDecision,
        EngineLost,
        GenerationTimeout,
        EndpointNotSupported,
    ),
    error_type=DecisionErrorResponse,
    example={
        "state": "My card was charged twice.",
        "questions": {"angry": {"type": "noul", "instructions": "Is the writer angry?"}},
    },
)
OPERATIONS = tuple(
    _operation(
        path=path,
        endpoint=decide,
        summary="Answer typed questions with probabilities",
    )
    for path in PATHS
)

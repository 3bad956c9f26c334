"""The adapters of each model by name: those of its engines' settings, and those that an
administrator loads and unloads.

The router decides which adapter has a name. An engine reads an adapter when a request brings its
directory and digest, so an engine that is started again needs to be told nothing. Engines keep the
decisions of administrators for a router that is started again, and for other routers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from router.errors import InvalidRequest, ModelNotFound, Unavailable
from router.fleet.engines.engine import Engine, Model, ModelReplicas
from router.fleet.engines.registry import Registry
from router.fleet.models.supervised import ConfiguredModel, Supervised
from router.fleet.tenants.tenant import EVERYBODY
from shared.adapter_names import MAX_NAMED_ADAPTERS, is_adapter_name
from shared.wire import AdapterChecked, AdapterDecisions, AdapterRef, CheckAdapter, Message

CHECK_TIMEOUT_S = 60.0
"""The longest that engines may take to read an adapter."""
SEPARATOR = ":"
MayUse = Callable[[list[str]], bool]
"""Whether something called by any of these names may be used."""


class ListedAdapter(NamedTuple):
    """An adapter as lists of models have it."""

    model_id: str
    model_names: list[str]
    own_name: str
    adapter: AdapterRef | None = None  # None until its model is loaded

    @property
    def name(self) -> str:
        """The name in requests, unique among all models."""
        return f"{self.model_id}{SEPARATOR}{self.own_name}"

    @property
    def names(self) -> list[str]:
        """The names by which a key may be allowed to use it."""
        return [*self.model_names, self.own_name, self.name]


class ServedAdapter(NamedTuple):
    """An adapter that requests may name."""

    model: ModelReplicas
    adapter: AdapterRef

    @property
    def listed(self) -> ListedAdapter:
        return ListedAdapter(self.model.id, self.model.names, self.adapter.name, self.adapter)


class Adapters:
    """Runs on the event loop."""

    def __init__(
        self,
        registry: Registry,
        supervised: Supervised,
        send: Callable[[Engine, Message], bool],
    ) -> None:
        """``send`` sends a message to an engine, and returns False if it could not."""
        self._registry, self._supervised, self._send = registry, supervised, send
        self._lock = asyncio.Lock()
        self._question = CheckAdapter(name="", path="")  # what engines read now
        self._answers: dict[Engine, asyncio.Future[AdapterChecked]] = {}

    @property
    def listed(self) -> list[ListedAdapter]:
        """All adapters, those of models that are not loaded too."""
        models = self._registry.models
        served = [
            ServedAdapter(model, adapter).listed
            for model in models.values()
            for adapter in model.adapters.values()
        ]
        configured = [
            _unloaded_adapter(model, name) for model in self._unloaded() for name in model.adapters
        ]
        return [*served, *configured]

    def find_listed(self, name: str, may_use: MayUse = EVERYBODY.may_use) -> ListedAdapter | None:
        """Return the adapter called ``name``, with or without its model's name before it, whether
        or not its model is loaded; None if there is none.

        Of several models' adapters of that name, only those count whose names ``may_use`` accepts:
        it is what one key may use. Raises `ModelNotFound` if these are still several."""
        found = self._called(name)
        usable = [each for each in found if may_use(each.names)]
        if len(usable) > 1:
            choices = ", ".join(each.name for each in usable)
            raise ModelNotFound(f"'{name}' is an adapter of several models: {choices}.")
        return next(iter([*usable, *found]), None)

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter called ``name`` as `find_listed` does; None if its model is not
        loaded. Raises what `find_listed` raises."""
        found = self.find_listed(name)
        if found is None or found.adapter is None:
            return None
        return ServedAdapter(self._registry.models[found.model_id], found.adapter)

    def find_configured(
        self, name: str, may_use: MayUse = EVERYBODY.may_use
    ) -> ConfiguredModel | None:
        """Return the configured model called ``name``, or the one with an adapter called so, found
        as by `find_listed`, or else in the configuration. Raises what `find_listed` raises."""
        if (found := self._supervised.find(name)) is not None:
            return found
        if (adapter := self.find_listed(name, may_use)) is not None:
            return self._supervised.find(adapter.model_id)
        base, _, own = name.rpartition(SEPARATOR)
        for model in self._supervised.models.values():
            if own in model.adapters and (not base or base in model.names):
                return model
        return None

    def is_known(self, name: str) -> bool:
        """Return whether any adapter is called ``name``."""
        return bool(self._called(name))

    async def load(self, name: str, path: str, base: str | None) -> ServedAdapter:
        """Let requests name the adapter in ``path``, a directory where the engines are, in place of
        any that has the name now.

        Raises `ModelNotFound`, `InvalidRequest` and `Unavailable`."""
        async with self._lock:
            model = self._model(base)
            self._check_name(name, path, model)
            engines = [each for each in model.engines if each.lost_reason is None]
            if not engines:
                raise Unavailable(f"{model.id} has no engine now that could read the adapter.")
            engines = [each for each in engines if each.takes_adapters]
            if not engines:
                raise _takes_none(model)
            found = await self._check(name, path, engines)
            self._decide(model, name, found)
            return ServedAdapter(model, found)

    def unload(self, name: str) -> ServedAdapter:
        """Take an adapter's name from it. Requests that run go on. Raises `ModelNotFound`."""
        found = self.find(name)
        if found is None:
            raise ModelNotFound(f"There is no adapter '{name}'.", param="name")
        self._decide(found.model, found.adapter.name, None)
        return found

    # -- engines ---------------------------------------------------------------

    def on_checked(self, engine: Engine, message: AdapterChecked) -> None:
        answer = self._answers.get(engine)
        asked = self._question
        is_late = message.number not in (asked.number, 0)
        if is_late or (message.name, message.path) != (asked.name, asked.path):
            return
        if answer is not None and not answer.done():
            answer.set_result(message)

    def on_decisions(self, engine: Engine, message: AdapterDecisions) -> None:
        """Take in what ``engine`` has kept, and tell it, and others, what they may lack."""
        for model in self._registry.versions:
            if engine in model.engines:
                is_news = model.apply(message.decisions)
                if len(model.decisions.all) > len(message.decisions):
                    self._tell([engine], model)
                if is_news:
                    self._tell([each for each in model.engines if each is not engine], model)

    def on_engine_joined(self, engine: Engine) -> None:
        for model in self._registry.versions:
            if engine in model.engines and model.decisions.all:
                self._tell([engine], model)

    def on_engine_lost(self, engine: Engine) -> None:
        answer = self._answers.get(engine)
        if answer is not None and not answer.done():
            answer.set_exception(Unavailable(f"The engine {engine.name} was lost in the meantime."))

    # -- inside ----------------------------------------------------------------

    def _unloaded(self) -> Iterator[ConfiguredModel]:
        """Yield the configured models that are not loaded."""
        loaded = self._registry.models
        return (each for each in self._supervised.models.values() if each.names[0] not in loaded)

    def _called(self, name: str) -> list[ListedAdapter]:
        """Return the adapters called ``name``: of one model, or of all if it names none."""
        base, separator, own = name.rpartition(SEPARATOR)

        def has_it(model: ModelReplicas | ConfiguredModel) -> bool:
            return own in model.adapters and (not separator or base in model.names)

        served = [
            ServedAdapter(model, model.adapters[own]).listed
            for model in self._registry.models.values()
            if has_it(model)
        ]
        configured = [_unloaded_adapter(model, own) for model in self._unloaded() if has_it(model)]
        return [*served, *configured]

    def _decide(self, model: ModelReplicas, name: str, adapter: AdapterRef | None) -> None:
        """Decide for ``model``, and for its versions with the same weights, of which one may be
        about to take its place."""
        decision = model.decisions.next(name, adapter)
        for version in self._registry.versions:
            same = version.hello.fingerprint == model.hello.fingerprint
            if version is model or (version.id == model.id and same):
                version.apply([decision])
                self._tell(version.engines, version)

    def _tell(self, engines: list[Engine], model: ModelReplicas) -> None:
        for engine in engines:
            if engine.lost_reason is None:
                self._send(engine, AdapterDecisions(decisions=model.decisions.all))

    def _model(self, base: str | None) -> ModelReplicas:
        if base is None:
            model = self._registry.default_model(EVERYBODY.may_use)
        else:
            model = self._registry.find_model(base)
        if model is None and (base is None or self._supervised.find(base)):
            raise Unavailable("The model is not loaded, so no engine could read the adapter.")
        if model is None:
            raise ModelNotFound(f"The model '{base}' is not served here.", param="model")
        return model

    def _check_name(self, name: str, path: str, model: ModelReplicas) -> None:
        if not is_adapter_name(name):
            raise InvalidRequest(
                f"'{name:.130}' is not a valid adapter name: use only letters, digits and ._-",
                param="name",
            )
        if self._registry.find_model(name) is not None or self._supervised.find(name):
            raise InvalidRequest(f"There is already a model named {name}.", param="name")
        if not path.startswith("/"):
            raise InvalidRequest("'path' must begin with /.", param="path")
        if name not in model.adapters and len(model.adapters) >= MAX_NAMED_ADAPTERS:
            raise InvalidRequest(
                f"{model.id} already has {MAX_NAMED_ADAPTERS} adapters.", param="name"
            )

    async def _check(self, name: str, path: str, engines: list[Engine]) -> AdapterRef:
        """Have all ``engines`` read an adapter. Raises `InvalidRequest` unless all find the same,
        and `Unavailable` if one does not answer."""
        loop = asyncio.get_running_loop()
        number = self._question.number + 1
        question = self._question = CheckAdapter(name=name, path=path, number=number)
        self._answers = {engine: loop.create_future() for engine in engines}
        try:
            for engine in engines:
                if not self._send(engine, question):
                    raise Unavailable(f"The engine {engine.name} cannot be reached.")
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                answers = await asyncio.gather(*self._answers.values())
        except TimeoutError:
            raise Unavailable("An engine did not read the adapter in time.") from None
        finally:
            self._answers = {}
        if error := next((each.error for each in answers if each.error is not None), None):
            raise InvalidRequest(f"{error}.", param="path")
        found = {each.adapter for each in answers}
        adapter = found.pop()
        if found or adapter is None:
            raise InvalidRequest(
                "The engines found different adapters in this directory.", param="path"
            )
        return adapter


def _unloaded_adapter(model: ConfiguredModel, own_name: str) -> ListedAdapter:
    return ListedAdapter(model.names[0], model.names, own_name)


def with_adapter(model: Model, adapter: AdapterRef) -> Model:
    """Return ``model`` with ``adapter``. Raises `InvalidRequest` if its engines take no adapters
    any more, and none that does may be restarting."""
    replicas = model.replicas
    unready_s = replicas.unready_for_s(time.monotonic(), for_adapters=True)
    if replicas.ready_engines and unready_s > replicas.settings.restart_wait_s:
        raise _takes_none(replicas)
    return replace(model, adapter=adapter)


def _takes_none(model: ModelReplicas) -> InvalidRequest:
    why = f"{model.id} takes no adapters: start it with --max-adapters."
    return InvalidRequest(why, param="model")

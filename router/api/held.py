"""Memory that a request uses for images, from reading its body until it ends."""

from __future__ import annotations

from starlette.datastructures import State

from router.fleet.router import Router
from router.fleet.tenants.tenant import Tenant
from router.images.memory import HeldMemory


def held_memory(router: Router, state: State) -> HeldMemory:
    """Return the object that counts the request's image memory. The middleware closes it."""
    found: HeldMemory | None = getattr(state, "image_memory", None)
    if found is None:
        tenant: Tenant = state.tenant
        found = state.image_memory = HeldMemory(
            router.images.memory, tenant.share, alone=tenant.alone
        )
    return found

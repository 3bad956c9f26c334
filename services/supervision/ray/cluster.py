"""A server whose engines Ray places: the address and keys with which they join its router."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from services.supervision.fleet.engine_pool import SpecMaker
from services.supervision.launcher import ChildSpec, Launcher, MachineNeeds
from services.supervision.output import LogCollector
from shared.network.allow_list import parse_allowed_key, read_allow_list, write_allow_list
from shared.network.curve import ALLOW_LIST, create_pair, load_public
from shared.network.ports import free_ports
from shared.rundir import RunDir
from shared.settings import ModelEntry, Settings

ENGINE_FILES = ("engine.key", "engine.secret", "server.key")
_WILDCARDS = ("0.0.0.0", "*")


class ClusterUnavailable(Exception):
    """Ray is not installed, or there is no cluster; the message is one line for the user."""


class RayCluster:
    """The connection of this server to a Ray cluster."""

    def __init__(self, options: Settings, run_dir: RunDir) -> None:
        """Raises: `ClusterUnavailable`, `CurveError`."""
        try:
            import ray
        except ImportError:
            raise ClusterUnavailable("ray is not installed: install the extra 'ray'") from None
        try:
            ray.init(
                address=options.ray_address,
                namespace=run_dir.path.name,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ClusterUnavailable(f"{options.ray_address}: {reason}") from None
        own = ray.util.get_node_ip_address()
        given = [each for each in options.engine_socket if each.startswith("tcp:")]
        address = given[0] if given else f"tcp://{own}:{free_ports(1, own)[0]}"
        directory = options.curve_dir or run_dir.path / "keys"
        if options.curve_dir is None:
            _make_keys(directory)
        own_key = load_public(directory, "engine")
        allowed = read_allow_list(directory / ALLOW_LIST).get(own_key)
        if allowed is None:
            raise ClusterUnavailable(f"{directory}: its engine.key is not allowed to join")
        self._key_name = allowed.name
        self._keys = {name: (directory / name).read_text() for name in ENGINE_FILES}
        self._address = own
        self._joins = self._reachable(address)
        sockets = options.engine_socket if given else (*options.engine_socket, address)
        self._own: dict[str, Any] = {"engine_socket": sockets, "curve_dir": directory}

    def prepared(self, options: Settings) -> Settings:
        """Return ``options`` with the address where the router accepts engines, and the keys."""
        return dataclasses.replace(options, **self._own, given=options.given | self._own.keys())

    def launcher(self, local: Launcher, output: LogCollector) -> Launcher:
        from services.supervision.ray.launcher import RayLauncher

        return RayLauncher(local, output, self._keys)

    def placed(self, make: SpecMaker, options: Settings) -> SpecMaker:
        """Return a function that converts specs of local engines to specs of engines that Ray
        places."""
        stores = [each for each in options.kvstore_socket if each.startswith("tcp:")]
        store = [f"--kvstore-socket={self._reachable(stores[0])}"] if stores else ["--no-ssd"]

        def make_placed(entry: ModelEntry, name: str, budget_bytes: int) -> ChildSpec:
            spec = make(entry, name, budget_bytes)
            arguments = [f"--engine-socket={self._joins}", *store]
            if budget_bytes:  # what Ray reserves: the node may have other engines
                arguments.append(f"--memory-gb={budget_bytes / 1e9:.9f}")
            labels = dict(each.split("=", 1) for each in entry.settings.ray_label)
            return dataclasses.replace(
                spec,
                command=(*entry.arguments(), *arguments),
                joins_as=f"{self._key_name}.{name}",
                place=MachineNeeds(
                    memory_bytes=budget_bytes, processes=entry.settings.ranks, labels=labels
                ),
            )

        return make_placed

    def _reachable(self, address: str) -> str:
        """Return ``address`` with this machine's own in place of a wildcard."""
        for wildcard in _WILDCARDS:
            address = address.replace(f"//{wildcard}:", f"//{self._address}:")
        return address

    def close(self) -> None:
        import ray

        ray.shutdown()


def _make_keys(directory: Path) -> None:
    """Create keys for this run of the server, and allow engines with them to join."""
    create_pair(directory, "server")
    engine = create_pair(directory, "engine").public
    write_allow_list(directory / ALLOW_LIST, [parse_allowed_key(engine, ["name=ray"])])

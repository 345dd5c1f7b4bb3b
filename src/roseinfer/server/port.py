"""What every port of the server knows, whichever process serves it: its limits, its keys, and the server's state."""

from aiohttp import web

from roseinfer.config.options import ServerConfig
from roseinfer.records import LifecycleState, Observer
from roseinfer.server.connection.api_keys import ApiKeys
from roseinfer.server.connection.body_budget import BodyBudget


class Port:
    """The port of a server in a state; `observer` hears of requests that it refuses."""

    def __init__(self, config: ServerConfig, observer: Observer, api_keys: ApiKeys | None) -> None:
        self.config = config
        self.observer = observer
        self.api_keys = api_keys
        self.state = LifecycleState.STARTING
        self.body_budget = BodyBudget(config.max_bodies_mib << 20)


PORT = web.AppKey("port", Port)

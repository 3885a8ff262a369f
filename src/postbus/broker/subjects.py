"""The subjects that plugins and agents agree on. An agent's id may have dots, as in ``team.ops``, a plugin's not."""

from __future__ import annotations

from postbus.model import Invalid
from postbus.topics import check_topic

__all__ = [
    "ALL_HEALTH",
    "ALL_HEARTBEATS",
    "TASKFLOW_RESUME",
    "agent_events",
    "agent_heartbeat",
    "agent_route",
    "plugin_health",
    "plugin_inbound",
    "plugin_outbound",
]

TASKFLOW_RESUME = "taskflow.resume"
ALL_HEALTH = "plugin.health.*"
ALL_HEARTBEATS = "agent.events.>"
HEARTBEAT = "heartbeat"


def plugin_inbound(plugin: str, instance: str | None = None) -> str:
    """Where a plugin publishes what comes in: ``plugin.inbound.<plugin>[.<instance>]``."""
    return _plugin("inbound", plugin, instance)


def plugin_outbound(plugin: str, instance: str | None = None) -> str:
    """Where a plugin takes what goes out: ``plugin.outbound.<plugin>[.<instance>]``."""
    return _plugin("outbound", plugin, instance)


def plugin_health(plugin: str) -> str:
    """Where a plugin says how it is: ``plugin.health.<plugin>``."""
    return _plugin("health", plugin, None)


def agent_events(agent: str) -> str:
    """Where an agent says what it does: ``agent.events.<id>``."""
    return check_topic(f"agent.events.{_agent(agent)}")


def agent_heartbeat(agent: str) -> str:
    """Where an agent's heart beats: ``agent.events.<id>.heartbeat``."""
    return check_topic(f"agent.events.{_agent(agent)}.{HEARTBEAT}")


def agent_route(agent: str) -> str:
    """Where an agent takes tasks and answers: ``agent.route.<id>``."""
    return check_topic(f"agent.route.{_agent(agent)}")


def _plugin(kind: str, plugin: str, instance: str | None) -> str:
    for what, name in (("plugin", plugin), ("instance", instance)):
        if name is not None and "." in name:
            raise Invalid(f"the {what} {name!r} has a dot", hint="it is one token of a topic: A-Z a-z 0-9 _ -")
    return check_topic(".".join(["plugin", kind, plugin, *([] if instance is None else [instance])]))


def _agent(agent: str) -> str:
    if check_topic(agent).rpartition(".")[2] == HEARTBEAT:
        raise Invalid(f"no agent may be called {agent!r}", hint="its events would look like heartbeats")
    return agent

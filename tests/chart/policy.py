"""Turns NetworkPolicies into an answer: may this source reach that port? Knows ingress alone."""

import ipaddress
from dataclasses import dataclass, field

from tests.chart.helm_process import Object, Rendered


@dataclass(frozen=True)
class Source:
    """Who sends: a pod by its labels and its namespace's, or an address outside of the cluster."""

    labels: Object = field(default_factory=dict)
    namespace: str = "serving"
    address: str = ""


def admits(release: Rendered, source: Source, port: str | int) -> bool:
    """Whether a serving pod takes a connection to a port of its own by name, or to another by number.

    Without a policy it takes all.
    """
    labels = release.pod["metadata"]["labels"]
    policies = [each["spec"] for each in release.of("NetworkPolicy") if _matches(each["spec"]["podSelector"], labels)]
    policies = [each for each in policies if "Ingress" in each["policyTypes"]]
    own = {each["name"]: each["containerPort"] for each in release.server["ports"]}
    number = port if isinstance(port, int) else own[port]
    rules = [rule for policy in policies for rule in policy.get("ingress", [])]
    return not policies or any(_rule_admits(rule, source, {port, number}) for rule in rules)


def _rule_admits(rule: Object, source: Source, ports: set[str | int]) -> bool:
    """A rule without ports means all of them, and one without peers everybody."""
    named = [each["port"] for each in rule.get("ports", [])]
    peers = rule.get("from", [])
    return (not named or not ports.isdisjoint(named)) and (not peers or any(_is(peer, source) for peer in peers))


def _is(peer: Object, source: Source) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        inside = source.address and ipaddress.ip_address(source.address) in ipaddress.ip_network(block["cidr"])
        return bool(inside) and not any(
            ipaddress.ip_address(source.address) in ipaddress.ip_network(hole) for hole in block.get("except", [])
        )
    if source.address:
        return False
    in_namespace = (
        _matches(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
        if "namespaceSelector" in peer
        else source.namespace == "serving"
    )
    return in_namespace and _matches(peer.get("podSelector", {}), source.labels)


def _matches(selector: Object, labels: Object) -> bool:
    assert not selector.get("matchExpressions"), "expressions are not understood here"
    wanted: Object = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()

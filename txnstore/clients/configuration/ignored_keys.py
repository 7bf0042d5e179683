"""This file is librdkafka's configuration keys that mean nothing without brokers.

They are accepted, so that a configuration that worked with Kafka works here, and their values are checked as librdkafka
does; then they are dropped, the secrets among them first of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from txnstore.clients.configuration.values import Boolean, Choice, Integer, Kind, Refused, Text

_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """A key that is accepted and means nothing."""

    name: str
    kind: Kind
    user: str = "*"
    """`P` for producers, `C` for consumers, `*` for both."""

    native_name: str = ""
    secret: bool = False


_TEXTS: Final = (
    "builtin.features topic.blacklist broker.version.fallback ssl.cipher.suites ssl.curves.list ssl.sigalgs.list "
    "ssl.key.location ssl.certificate.location ssl.ca.location https.ca.location ssl.ca.certificate.stores "
    "ssl.crl.location ssl.keystore.location ssl.providers ssl.engine.location ssl.engine.id "
    "sasl.kerberos.service.name sasl.kerberos.principal sasl.kerberos.kinit.cmd sasl.kerberos.keytab sasl.username "
    "sasl.oauthbearer.scope sasl.oauthbearer.extensions sasl.oauthbearer.token.endpoint.url "
    "sasl.oauthbearer.sub.claim.name sasl.oauthbearer.assertion.file sasl.oauthbearer.assertion.claim.aud "
    "sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.sub "
    "sasl.oauthbearer.assertion.jwt.template.file plugin.library.paths client.rack sasl.mechanism "
    "sasl.oauthbearer.client.credentials.client.id group.protocol.type share.acknowledgement.mode offset.store.path"
)
_SECRETS: Final = (
    "ssl.key.password ssl.key.pem ssl.certificate.pem https.ca.pem ssl.ca.pem ssl.keystore.password sasl.password "
    "sasl.oauthbearer.config sasl.oauthbearer.assertion.private.key.file "
    "sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.private.key.pem "
    "sasl.oauthbearer.client.credentials.client.secret"
)
_BOOLEANS: Final = (
    "topic.metadata.refresh.sparse socket.keepalive.enable socket.nagle.disable log.queue log.thread.name "
    "enable.random.seed log.connection.close api.version.request enable.ssl.certificate.verification "
    "enable.sasl.oauthbearer.unsecure.jwt sasl.oauthbearer.assertion.claim.jti.include enable.metrics.push "
    "produce.offset.report"
)
_INTEGERS: Final = {
    "message.copy.max.bytes": (0, 1_000_000_000),
    "receive.message.max.bytes": (1000, _INT32_MAX),
    "metadata.recovery.rebootstrap.trigger.ms": (0, _INT32_MAX),
    "metadata.max.age.ms": (1, 86_400_000),
    "topic.metadata.refresh.fast.interval.ms": (1, 60_000),
    "topic.metadata.refresh.fast.cnt": (0, 1000),
    "topic.metadata.propagation.max.ms": (0, 3_600_000),
    "socket.blocking.max.ms": (1, 60_000),
    "socket.send.buffer.bytes": (0, 100_000_000),
    "socket.receive.buffer.bytes": (0, 100_000_000),
    "socket.max.fails": (0, 1_000_000),
    "broker.address.ttl": (0, 86_400_000),
    "socket.connection.setup.timeout.ms": (1000, _INT32_MAX),
    "connections.max.idle.ms": (0, _INT32_MAX),
    "reconnect.backoff.jitter.ms": (0, 3_600_000),
    "reconnect.backoff.ms": (0, 3_600_000),
    "reconnect.backoff.max.ms": (0, 3_600_000),
    "enabled_events": (0, _INT32_MAX),
    "internal.termination.signal": (0, 128),
    "api.version.request.timeout.ms": (1, 300_000),
    "api.version.fallback.ms": (0, 604_800_000),
    "sasl.kerberos.min.time.before.relogin": (0, 86_400_000),
    "sasl.oauthbearer.assertion.claim.exp.seconds": (1, _INT32_MAX),
    "sasl.oauthbearer.assertion.claim.nbf.seconds": (0, _INT32_MAX),
    "coordinator.query.interval.ms": (1, 3_600_000),
    "max.poll.records": (1, _INT32_MAX),
    "queue.buffering.backpressure.threshold": (1, 1_000_000),
    "offset.store.sync.interval.ms": (-1, 86_400_000),
    "consume.callback.max.messages": (0, 1_000_000),
}
_CHOICES: Final = {
    "metadata.recovery.strategy": "none rebootstrap",
    "broker.address.family": "any v4 v6",
    "security.protocol": "plaintext ssl sasl_plaintext sasl_ssl",
    "ssl.endpoint.identification.algorithm": "none https",
    "sasl.oauthbearer.method": "default oidc",
    "sasl.oauthbearer.grant.type": "client_credentials urn:ietf:params:oauth:grant-type:jwt-bearer",
    "sasl.oauthbearer.assertion.algorithm": "RS256 ES256",
    "sasl.oauthbearer.metadata.authentication.type": "none azure_imds aws_iam",
    "offset.store.method": "none file broker",
    "client.dns.lookup": "use_all_dns_ips resolve_canonical_bootstrap_servers_only",
}
_FUNCTIONS_OF_C: Final = (
    "log_cb background_event_cb socket_cb connect_cb closesocket_cb open_cb resolve_cb opaque default_topic_conf "
    "ssl_key ssl_certificate ssl_ca ssl_engine_callback_data ssl.certificate.verify_cb oauthbearer_token_refresh_cb "
    "interceptors consume_cb rebalance_cb offset_commit_cb dr_cb dr_msg_cb partitioner_cb msg_order_cmp"
)
_INSTEAD: Final = {
    "dr_cb": 'use "on_delivery"',
    "dr_msg_cb": 'use "on_delivery"',
    "offset_commit_cb": 'use "on_commit"',
    "rebalance_cb": "give on_assign and on_revoke to subscribe()",
    "consume_cb": "use poll() or consume()",
    "log_cb": 'use "logger"',
    "oauthbearer_token_refresh_cb": 'use "oauth_cb"',
    "partitioner_cb": "give the partition to produce()",
}
#: Keys for one client only: the other one is warned.
_USERS: Final = {
    "group.protocol.type": "C",
    "coordinator.query.interval.ms": "C",
    "offset.store.method": "C",
    "consume_cb": "C",
    "rebalance_cb": "C",
    "offset_commit_cb": "C",
    "max.poll.records": "C",
    "share.acknowledgement.mode": "C",
    "queue.buffering.backpressure.threshold": "P",
    "dr_cb": "P",
    "dr_msg_cb": "P",
    "produce.offset.report": "P",
    "partitioner_cb": "P",
    "msg_order_cmp": "P",
    "offset.store.path": "C",
    "offset.store.sync.interval.ms": "C",
    "consume.callback.max.messages": "C",
}
_NATIVE_NAMES: Final = {
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}


def _words(text: str) -> MappingProxyType[str, str]:
    return MappingProxyType({word.lower(): word for word in text.split()})


def _kinds() -> dict[str, Kind]:
    kinds: dict[str, Kind] = dict.fromkeys((*_TEXTS.split(), *_SECRETS.split()), Text())
    kinds |= dict.fromkeys(_BOOLEANS.split(), Boolean())
    kinds |= {name: Integer(low, high) for name, (low, high) in _INTEGERS.items()}
    kinds |= {name: Choice(_words(words)) for name, words in _CHOICES.items()}
    kinds |= {name: Refused(_INSTEAD.get(name, "it is a pointer of librdkafka's")) for name in _FUNCTIONS_OF_C.split()}
    return kinds


IGNORED: Final = tuple(
    IgnoredKey(name, kind, _USERS.get(name, "*"), _NATIVE_NAMES.get(name, ""), name in _SECRETS.split())
    for name, kind in _kinds().items()
)

"""The configuration keys: their types, ranges, defaults and other names, and those that mean nothing without brokers.

librdkafka's keys without a meaning here are accepted, so that a configuration that worked with Kafka works, and their
values are checked as librdkafka does; then they are dropped, the secrets among them first of all.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from txnstore.clients.configuration.values import (
    Boolean,
    Callback,
    Choice,
    ConfigurationError,
    Flags,
    Float,
    Instance,
    Integer,
    Kind,
    Name,
    Names,
    Refused,
    Text,
    Token,
)
from txnstore.log.partitioners import PARTITIONERS

_INT32_MAX: Final = 2**31 - 1
_FETCH_BYTES_MAX: Final = _INT32_MAX - 512
#: As in `txnstore.groups` and `txnstore.transactions`: what fits into the index of every database.
_ID_LENGTH_MAX: Final = 1000


class User(enum.Enum):
    """Which clients a key is for."""

    PRODUCER = "P"
    CONSUMER = "C"
    BOTH = "*"


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key."""

    name: str
    """The name by which it is looked up."""

    kind: Kind
    default: Any
    user: User = User.BOTH
    native_name: str = ""
    """The name that librdkafka's errors give it; default: the same."""

    aliases: tuple[str, ...] = ()
    ignored: bool = False
    """Whether it is accepted for the sake of copied configurations, and means nothing here."""

    secret: bool = False
    only_user: bool = False
    """Whether other clients do not even know the name."""

    @property
    def error_name(self) -> str:
        """The name in error texts."""
        return self.native_name or self.name


def _words(*names: str, **others: str) -> Mapping[str, str]:
    return MappingProxyType({name: name for name in names} | others)


_C: Final = User.CONSUMER
_P: Final = User.PRODUCER
_FUNCTION: Final = "expected {key} property as a callable function"
_CALLABLE: Final = "{key} requires a callable object"
_DEBUG_CONTEXTS: Final = (
    "generic broker topic metadata feature queue msg protocol cgrp security fetch interceptor plugin consumer admin eos"
    " mock assignor conf telemetry all"
)
_OFFSET_RESETS: Final = {
    "smallest": "earliest",
    "earliest": "earliest",
    "beginning": "earliest",
    "largest": "latest",
    "latest": "latest",
    "end": "latest",
    "error": "error",
}
_ASSIGNORS: Final = Names(
    frozenset({"range", "roundrobin", "cooperative-sticky"}),
    ("range", "roundrobin"),
    "Failed to create consumer: Unsupported partition.assignment.strategy",
)

_MEANINGFUL: Final = (
    # The database
    Key("bootstrap.servers", Text(), None, native_name="metadata.broker.list", aliases=("database.url",), secret=True),
    Key("txnstore.schema", Text(), "txnstore"),
    Key("txnstore.clock", Instance("now_ms", "a txnstore.clock.Clock"), None),
    Key("txnstore.durability", Choice(_words("full", "database")), "full"),
    Key("client.id", Text(_ID_LENGTH_MAX), "rdkafka"),
    Key("request.timeout.ms", Integer(1, 900_000), 30_000, _P),
    Key("socket.timeout.ms", Integer(10, 300_000), 60_000),
    Key("retry.backoff.ms", Integer(1, 300_000), 100),
    Key("retry.backoff.max.ms", Integer(1, 300_000), 1_000),
    Key("message.max.bytes", Integer(1_000, 1_000_000_000), 1_000_000),
    Key("allow.auto.create.topics", Boolean(), None),
    Key("topic.metadata.refresh.interval.ms", Integer(-1, 3_600_000), 300_000),
    # What is reported
    Key("statistics.interval.ms", Integer(0, 86_400_000), 0),
    Key("debug", Flags(frozenset(_DEBUG_CONTEXTS.split())), ()),
    Key("log_level", Integer(0, 7), 6),
    Key("error_cb", Callback(TypeError, _FUNCTION), None),
    Key("stats_cb", Callback(TypeError, _FUNCTION), None),
    Key("throttle_cb", Callback(ValueError, _FUNCTION), None),
    Key("oauth_cb", Callback(TypeError, _FUNCTION), None),
    Key("logger", Instance("log", "a logging.Logger"), None),
    Key("on_delivery", Callback(ConfigurationError, _CALLABLE), None, _P, only_user=True),
    Key("on_commit", Callback(ConfigurationError, _CALLABLE), None, _C, only_user=True),
    # The producer
    Key("transactional.id", Text(_ID_LENGTH_MAX), None, _P),
    Key("transaction.timeout.ms", Integer(1_000, _INT32_MAX), 60_000, _P),
    Key("transaction.two.phase.commit.enable", Boolean(), False, _P, only_user=True),
    Key("txnstore.transaction.token", Token(), None, _P, only_user=True),
    Key("enable.idempotence", Boolean(), None, _P),
    Key("enable.gapless.guarantee", Boolean(), False, _P),
    Key("acks", Integer(-1, 1_000, {"all": -1}), -1, _P, "request.required.acks"),
    Key("retries", Integer(0, _INT32_MAX), _INT32_MAX, _P, "message.send.max.retries"),
    Key("max.in.flight", Integer(1, 1_000_000), None, _P, "max.in.flight.requests.per.connection"),
    Key("linger.ms", Float(0, 900_000), 5.0, _P, "queue.buffering.max.ms"),
    Key("batch.size", Integer(1, _INT32_MAX), 1_000_000, _P),
    Key("batch.num.messages", Integer(1, 1_000_000), 10_000, _P),
    Key("queue.buffering.max.messages", Integer(0, _INT32_MAX), 100_000, _P),
    Key("queue.buffering.max.kbytes", Integer(1, _INT32_MAX), 1_048_576, _P),
    Key("compression.type", Choice(_words("none", "gzip", "snappy", "lz4", "zstd")), "none", _P, "compression.codec"),
    Key("compression.level", Integer(-1, 12), -1, _P),
    Key("message.timeout.ms", Integer(0, _INT32_MAX), 300_000, _P, aliases=("delivery.timeout.ms",)),
    Key("delivery.report.only.error", Boolean(), False, _P),
    Key("partitioner", Name(frozenset(PARTITIONERS)), "consistent_random", _P),
    Key("sticky.partitioning.linger.ms", Integer(0, 900_000), 10, _P),
    Key("queuing.strategy", Choice(_words("fifo", "lifo")), "fifo", _P),
    # The consumer
    Key("group.id", Text(_ID_LENGTH_MAX), None, _C),
    Key("group.instance.id", Text(_ID_LENGTH_MAX), None, _C),
    Key("group.protocol", Choice(_words("classic", "consumer")), "classic", _C),
    Key("group.remote.assignor", Text(_ID_LENGTH_MAX), None, _C),
    Key("partition.assignment.strategy", _ASSIGNORS, _ASSIGNORS.default, _C),
    Key("session.timeout.ms", Integer(1, 3_600_000), 45_000, _C),
    Key("heartbeat.interval.ms", Integer(1, 3_600_000), 3_000, _C),
    Key("max.poll.interval.ms", Integer(1, 86_400_000), 300_000, _C),
    Key("enable.auto.commit", Boolean(), True, _C, aliases=("auto.commit.enable",)),
    Key("auto.commit.interval.ms", Integer(0, 86_400_000), 5_000, _C),
    Key("enable.auto.offset.store", Boolean(), True, _C),
    Key("auto.offset.reset", Choice(MappingProxyType(_OFFSET_RESETS)), "latest", _C),
    Key("isolation.level", Choice(_words("read_uncommitted", "read_committed")), "read_committed", _C),
    Key("enable.partition.eof", Boolean(), False, _C),
    Key("fetch.min.bytes", Integer(0, _INT32_MAX), 1, _C),
    Key("fetch.wait.max.ms", Integer(0, 300_000), 500, _C),
    Key("fetch.max.bytes", Integer(0, _FETCH_BYTES_MAX), 52_428_800, _C),
    Key("max.partition.fetch.bytes", Integer(1, 1_000_000_000), 1_048_576, _C, "fetch.message.max.bytes"),
    Key("fetch.queue.backoff.ms", Integer(0, 300_000), 1_000, _C),
    Key("fetch.error.backoff.ms", Integer(0, 300_000), 500, _C),
    Key("queued.min.messages", Integer(1, 10_000_000), 100_000, _C),
    Key("queued.max.messages.kbytes", Integer(1, 2_097_151), 65_536, _C),
    Key("check.crcs", Boolean(), False, _C),
    Key("txnstore.commit.ownership", Choice(_words("owned", "member")), "owned", _C),
    Key("txnstore.delivery.order", Choice(_words("offset", "commit")), "offset", _C),
    # Kafka's mock broker
    Key(
        "test.mock.num.brokers",
        Refused("there is no mock: with bootstrap.servers sqlite:// a client has a real store that ends with it"),
        None,
    ),
)

# --- accepted, and without a meaning where there are no brokers -------------------------------------------------------

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
    "group.protocol.type": _C,
    "coordinator.query.interval.ms": _C,
    "offset.store.method": _C,
    "consume_cb": _C,
    "rebalance_cb": _C,
    "offset_commit_cb": _C,
    "max.poll.records": _C,
    "share.acknowledgement.mode": _C,
    "queue.buffering.backpressure.threshold": _P,
    "dr_cb": _P,
    "dr_msg_cb": _P,
    "produce.offset.report": _P,
    "partitioner_cb": _P,
    "msg_order_cmp": _P,
    "offset.store.path": _C,
    "offset.store.sync.interval.ms": _C,
    "consume.callback.max.messages": _C,
}
_NATIVE_NAMES: Final = {
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}


def _ignored_keys() -> dict[str, Key]:
    kinds: dict[str, Kind] = dict.fromkeys((*_TEXTS.split(), *_SECRETS.split()), Text())
    kinds |= dict.fromkeys(_BOOLEANS.split(), Boolean())
    kinds |= {name: Integer(low, high) for name, (low, high) in _INTEGERS.items()}
    kinds |= {name: Choice({word.lower(): word for word in words.split()}) for name, words in _CHOICES.items()}
    kinds |= {name: Refused(_INSTEAD.get(name, "it is a pointer of librdkafka's")) for name in _FUNCTIONS_OF_C.split()}
    secrets = frozenset(_SECRETS.split())
    return {
        name: Key(
            name,
            kind,
            None,
            _USERS.get(name, User.BOTH),
            _NATIVE_NAMES.get(name, ""),
            ignored=True,
            secret=name in secrets,
        )
        for name, kind in kinds.items()
    }


#: Every key by the name by which it is looked up.
KEYS: Final[Mapping[str, Key]] = MappingProxyType({key.name: key for key in _MEANINGFUL} | _ignored_keys())

#: The key of every name that it may be given by.
KEYS_BY_ALIAS: Final[Mapping[str, Key]] = MappingProxyType(
    {alias: key for key in KEYS.values() for alias in (key.name, key.error_name, *key.aliases)}
)

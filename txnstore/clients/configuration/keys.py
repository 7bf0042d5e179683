"""The configuration keys: their types, ranges, defaults and other names, and those without a meaning for a database.

librdkafka's keys without a meaning here are accepted, so that a configuration that worked with Kafka works, and their
values are checked as librdkafka does; then they are dropped, the secrets among them first of all.

Whatever a value's own type, it is its text that is read: `5`, `"5"` and `" 5"` are the same number, `True` is the
same as `"true"` and not a number.  The error texts are librdkafka's: they name a key as it does
(`queue.buffering.max.ms` for `linger.ms`), and repeat a value only if it stands where one of a few words is expected.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from txnstore.errors import InvalidRequest
from txnstore.log.partitioners import PARTITIONERS
from txnstore.model import NAME_BYTES_MAX, is_storable_text
from txnstore.transactions.tokens import TransactionToken

#: An error repeats at most this much of somebody else's text.
_SHOWN_CHARACTERS_MAX: Final = 80

_INT32_MAX: Final = 2**31 - 1
_FETCH_BYTES_MAX: Final = _INT32_MAX - 512
#: Characters, as in `txnstore.groups` and `txnstore.transactions`, and no more than NAME_BYTES_MAX.
_ID_LENGTH_MAX: Final = 1000
#: With what the store puts before it, it is no longer than an id.
_TRANSACTION_GROUP_LENGTH_MAX: Final = 900
_TRANSACTION_GROUP_BYTES_MAX: Final = NAME_BYTES_MAX - 100

_DECIMAL: Final = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_HEXADECIMAL: Final = re.compile(r"[+-]?0[xX][0-9a-fA-F]+")
_TRUE: Final = frozenset({"true", "t", "1"})
_FALSE: Final = frozenset({"false", "f", "0"})


class ConfigurationError(ValueError):
    """The value is not one that the key takes; the text is for the user."""


class ValueType(Protocol):
    """The type of a key's value."""

    def parse(self, key: str, value: object) -> Any:
        """Return what `value` stands for; `key` is the name for error texts.

        Raises:
            ConfigurationError: it is not a value of this type.
        """
        ...


def shown(value: object) -> str:
    """Return `value` as text that may stand in a message: short, on one line, without control characters."""
    text = str(value)
    if len(text) > _SHOWN_CHARACTERS_MAX:
        text = f"{text[:_SHOWN_CHARACTERS_MAX]}..."
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _text_of(key: str, value: object, kind: str) -> str:
    if value is None or value == "":
        raise ConfigurationError(f'{kind}onfiguration property "{key}" cannot be set to empty value')
    return str(value)


def _check_range(key: str, number: float, low: int, high: int) -> None:
    if not low <= number <= high:
        raise ConfigurationError(
            f'Configuration property "{key}" value {number:g} is outside allowed range {low}..{high}'
            if isinstance(number, float)
            else f'Configuration property "{key}" value {shown(number)} is outside allowed range {low}..{high}'
        )


class Integer(NamedTuple):
    """A whole number within a range; `words` are other names for numbers."""

    low: int
    high: int
    words: Mapping[str, int] = MappingProxyType({})

    def parse(self, key: str, value: object) -> int:
        """Return the number; `5.0` and `0x5` are 5, but `5.5`, `5ms`, `True` and `1_000` are refused."""
        text = _text_of(key, value, "Integer c").strip()
        number = self.words.get(text.lower())
        if number is not None:
            return number
        if _DECIMAL.fullmatch(text) and len(text) <= _SHOWN_CHARACTERS_MAX:
            number = int(text.partition(".")[0])
        elif _HEXADECIMAL.fullmatch(text) and len(text) <= _SHOWN_CHARACTERS_MAX:
            number = int(text, 16)
        else:
            raise ConfigurationError(f'Invalid value for configuration property "{key}"')
        _check_range(key, number, self.low, self.high)
        return number


class Float(NamedTuple):
    """A number within a range."""

    low: int
    high: int

    def parse(self, key: str, value: object) -> float:
        """Return the number; NaN is refused."""
        text = _text_of(key, value, "Float c").strip()
        try:
            number = float(int(text, 16) if _HEXADECIMAL.fullmatch(text) else text)
        except (ValueError, OverflowError):
            raise ConfigurationError(f'Invalid value for configuration property "{key}"') from None
        if math.isnan(number) or "_" in text:
            raise ConfigurationError(f'Invalid value for configuration property "{key}"')
        _check_range(key, number, self.low, self.high)
        return number


class Boolean:
    """True or false."""

    def parse(self, key: str, value: object) -> bool:
        """Return the truth value: true, t, 1 or false, f, 0 in any case."""
        text = _text_of(key, value, "Bool c").lower()
        if text not in _TRUE | _FALSE:
            raise ConfigurationError(f'Expected bool value for "{key}": true or false')
        return text in _TRUE


class Choice(NamedTuple):
    """One of a few words, in any case; `words` says what each one stands for."""

    words: Mapping[str, str]

    def parse(self, key: str, value: object) -> str:
        """Return what the word stands for."""
        text = _text_of(key, value, "C")
        word = self.words.get(text.lower())
        if word is None:
            raise ConfigurationError(f'Invalid value "{shown(text)}" for configuration property "{key}"')
        return word


class Flags(NamedTuple):
    """Several of a few words, with commas between them."""

    words: frozenset[str]

    def parse(self, key: str, value: object) -> tuple[str, ...]:
        """Return the words; the tuple is empty if the text is."""
        names = tuple(name.strip() for name in str(value or "").split(",") if name.strip())
        for name in names:
            if name not in self.words:
                raise ConfigurationError(f'Invalid value "{shown(name)}" for configuration property "{key}"')
        return names


class Name(NamedTuple):
    """One of a few names, spelt exactly."""

    names: frozenset[str]

    def parse(self, key: str, value: object) -> str:
        """Return the name."""
        text = "(null)" if value is None or value == "" else str(value)
        if text not in self.names:
            raise ConfigurationError(f'Invalid value for configuration property "{key}": {shown(text)}')
        return text


class Text(NamedTuple):
    """Any text; nothing and empty text are the same: not set."""

    length_max: int | None = None
    """How many characters of text that goes into the database; None: it does not."""

    bytes_max: int = NAME_BYTES_MAX

    def parse(self, key: str, value: object) -> str | None:
        """Return the text, or None.

        Text that goes into the database holds no NUL and no half of a surrogate pair: no database keeps them.
        """
        if value is None or value == "":
            return None
        text = str(value)
        if self.length_max is not None:
            if len(text) > self.length_max:
                raise ConfigurationError(
                    f'Invalid value for configuration property "{key}": longer than {self.length_max} characters'
                )
            if not is_storable_text(text):
                raise ConfigurationError(
                    f'Invalid value for configuration property "{key}": a NUL or half of a surrogate pair'
                )
            if len(text.encode()) > self.bytes_max:
                raise ConfigurationError(
                    f'Invalid value for configuration property "{key}": longer than {self.bytes_max} bytes of UTF-8'
                )
        return text


class Names(NamedTuple):
    """Several names with commas between them."""

    names: frozenset[str]
    default: tuple[str, ...]
    refusal: str
    """What the error says before the name that is not one of them."""

    def parse(self, key: str, value: object) -> tuple[str, ...]:
        """Return the names in their order, each once; the default if the text is empty."""
        names = tuple(dict.fromkeys(name.strip() for name in str(value or "").split(",") if name.strip()))
        for name in names:
            if name not in self.names:
                raise ConfigurationError(f"{self.refusal}: {shown(name)}")
        return names or self.default


class Callback(NamedTuple):
    """A function of the application; `error` is what confluent-kafka raises for something else, with this text."""

    error: type[Exception]
    text: str

    def parse(self, key: str, value: object) -> Callable[..., Any]:
        """Return the function."""
        if not callable(value):
            raise self.error(self.text.format(key=key))
        return value


class Instance(NamedTuple):
    """An object with a method of this name, or None."""

    method: str
    about: str

    def parse(self, key: str, value: object) -> Any:
        """Return the object."""
        if value is not None and not callable(getattr(value, self.method, None)):
            raise TypeError(f"{key} takes {self.about}, not {type(value).__name__}")
        return value


class Token:
    """What `Producer.transaction_token()` returned."""

    def parse(self, key: str, value: object) -> TransactionToken:
        """Return what the token says."""
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"{key} takes the bytes that transaction_token() returned, not {type(value).__name__}")
        try:
            return TransactionToken.parse(bytes(value))
        except InvalidRequest as error:
            raise ConfigurationError(f'Invalid value for configuration property "{key}": {error}') from None


class Refused(NamedTuple):
    """A key that cannot be set from Python; `instead` says what to do."""

    instead: str

    def parse(self, key: str, value: object) -> Any:
        """Refuse any value."""
        raise ConfigurationError(f'Configuration property "{key}" cannot be set from Python; {self.instead}')


class User(enum.Enum):
    """Which clients a key is for."""

    PRODUCER = "P"
    CONSUMER = "C"
    BOTH = "*"


class Key(NamedTuple):
    """One configuration key."""

    name: str
    """The name by which it is looked up."""

    kind: ValueType
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
    Key("txnstore.maintenance", Boolean(), True),
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
    Key(
        "txnstore.transaction.group",
        Text(_TRANSACTION_GROUP_LENGTH_MAX, _TRANSACTION_GROUP_BYTES_MAX),
        None,
        _P,
        only_user=True,
    ),
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
    Key("txnstore.delivery.order", Choice(_words("offset", "commit")), "offset", _C),
    Key("txnstore.delivery.atomic", Boolean(), False, _C),
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
    # Kafka's mock broker
    Key(
        "test.mock.num.brokers",
        Refused(
            "there is no mock cluster: with bootstrap.servers sqlite:// a client has a real store in memory that is"
            " gone when the client is closed"
        ),
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
    kinds: dict[str, ValueType] = dict.fromkeys((*_TEXTS.split(), *_SECRETS.split()), Text())
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

"""The shop of the tests of roles: two tenants in one store, and those who look after it."""

from __future__ import annotations

import psycopg

from txnstore import Consumer, Producer
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.opening import open_store
from txnstore.db.roles import grants
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind
from txnstore.testing.postgres_server import connection_string

PATIENCE_SECONDS = 30.0
#: Unlimited, but for what their kinds are.
ROLES = {
    "writer": (Kind.PRODUCER,),
    "reader": (Kind.CONSUMER,),
    "worker": (Kind.PRODUCER, Kind.CONSUMER),
    "upkeep": (Kind.COORDINATOR,),
    "watcher": (Kind.MONITOR,),
}
#: Limited to what begins with its name.
TENANT = "tenant"
TENANTS_OWN = RoleScope(("tenant.*",), ("tenant-*",), ("tenant-*",))
#: What a role may say of a transaction in SQL.
INTO_TRANSACTIONS = (
    "INSERT INTO txnstore.transactions (transactional_id, producer_id, previous_producer_id, next_producer_id,"
    " producer_epoch, last_producer_epoch, timeout_ms, state, start_ms, last_update_ms, transaction_number,"
    " begin_epoch, deadline_ms) "
)


def metadata_of_nobody_in(group_id):
    """Return what a consumer that is no member of the group hands to a producer."""
    return b"CGMDv2:\xff\xff\xff\xff" + group_id.encode() + b"\x00\x00\x01"


class Shop:
    """A database, its owner's store, and roles whose names begin with that of the database."""

    def __init__(self, server, name):
        self.server, self.name = server, name
        self.store = open_store(server.url(name))
        self.roles = {role: f"{name}_{role}" for role in (*ROLES, TENANT)}
        for role in self.roles.values():
            server.create_role(role, "secret")

    def url(self, role):
        return self.server.url(self.name, self.roles[role], "secret")

    def connect(self, role=None):
        """Connect with the driver alone: as a role, or as the superuser."""
        url = self.server.url(self.name) if role is None else self.url(role)
        return psycopg.connect(connection_string(url), autocommit=True)

    def grant(self, kind, role, bounds=None):
        grants.apply(self.store, grants.grant(self.store, kind, self.roles[role], bounds))

    def grant_all(self):
        for role, kinds in ROLES.items():
            for kind in kinds:
                self.grant(kind, role)
        for kind in (Kind.PRODUCER, Kind.CONSUMER):
            self.grant(kind, TENANT, TENANTS_OWN)

    def create_topics(self, *names):
        with AdminClient({"bootstrap.servers": self.url("upkeep")}) as admin:
            for future in admin.create_topics([NewTopic(name, 1) for name in names]).values():
                future.result(PATIENCE_SECONDS)

    def producer(self, role, **settings):
        return Producer({"bootstrap.servers": self.url(role), **{k.replace("_", "."): v for k, v in settings.items()}})

    def consumer(self, role, group_id, **settings):
        usual = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        return Consumer(
            {
                "bootstrap.servers": self.url(role),
                "group.id": group_id,
                **usual,
                **{k.replace("_", "."): v for k, v in settings.items()},
            }
        )

    def furnish(self):
        """Grant all, and let both tenants have a topic with records, a transaction that is open, and a group."""
        self.grant_all()
        self.create_topics("others", "tenant.orders")
        self.open = [self.work("worker", "others", "others"), self.work(TENANT, "tenant.orders", "tenant")]
        with self.connect() as connection:
            connection.execute("INSERT INTO txnstore.outbox (topic, value) VALUES ('others', 'secret')")
            connection.execute(
                "INSERT INTO txnstore.offset_producers (producer_id, producer_epoch, last_update_ms) VALUES (1, 0, 0)"
            )

    def work(self, role, topic, prefix):
        """Produce a record, consume it, and leave a transaction open that holds its offset."""
        producer = self.producer(role, transactional_id=f"{prefix}-id")
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce(topic, "payload")
        producer.commit_transaction(PATIENCE_SECONDS)
        consumer = self.consumer(role, f"{prefix}-group")
        consumer.subscribe([topic])
        assert consumer.poll(PATIENCE_SECONDS).value() == b"payload"
        consumer.commit(asynchronous=False)
        producer.begin_transaction()
        producer.produce(topic, "open")
        assert producer.flush(PATIENCE_SECONDS) == 0
        # Those of no member are written at once.
        offsets = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(offsets, metadata_of_nobody_in(f"{prefix}-alone"))
        return producer, consumer

    def close(self):
        for client in (client for pair in getattr(self, "open", ()) for client in pair):
            client.close()
        self.store.close()
        self.server.drop_database(self.name)
        for role in self.roles.values():
            self.server.drop_role(role)

"""The checker of histories is checked: histories that are right raise no alarm, each that was spoilt raises its own."""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest

from tests.tools.anomalies import CHECKS, find_anomalies
from tests.tools.histories import Event, History, Kind, read_lines

PARTITIONS = ("p0", "p1")
SEEDS = range(10)


class Simulated:
    """A store in memory, clients that use it rightly, and the history that they leave."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.now_ns = 0
        self.operations = []
        self.free_at = {}
        self.log: dict[str, list] = {name: [] for name in PARTITIONS}
        self.open: dict[str, dict] = {name: {} for name in PARTITIONS}
        self.aborted = set()
        self.positions = {}
        self.producer_ids = itertools.count()
        self.names = itertools.count(1)
        self.epochs = {}
        self.is_certain = False

    def run(self):
        plain = [self.new_producer(f"plain-{index}#1") for index in (1, 2)]
        transactional = [self.init(f"txn-{index}#1") for index in (1, 2)]
        for step in range(80):
            if step == 40:
                self.certainly_commit(transactional[0])
            actor = self.chance.choice([*plain, *transactional, "rc", "ru", "rc", "ru"])
            if isinstance(actor, str):
                self.poll(f"{actor}-reader", actor, self.positions.setdefault(actor, dict.fromkeys(PARTITIONS, 0)))
            elif "txid" in actor:
                self.step_transaction(actor)
            else:
                self.send(actor, f"plain-{next(self.names)}")
        for actor in transactional:
            while actor["name"] is not None:
                self.step_transaction(actor)
        for isolation in ("rc", "ru"):
            self.poll(f"final-{isolation}", isolation, dict.fromkeys(PARTITIONS, 0), final=True)
        self.perform("final-dump", "dump", {}, {"batches": {name: self.dump(name) for name in PARTITIONS}})
        return self.operations

    def certainly_commit(self, actor):
        """Run one transaction over all partitions that commits, and whose answers arrive."""
        while actor["name"] is not None:
            self.step_transaction(actor)
        self.is_certain = True
        for _ in range(3):
            self.step_transaction(actor)
        self.is_certain = False

    def perform(self, process, function, details, answer, kind=Kind.OK):
        """Let an operation take effect now; it was called a little before and is answered a little later."""
        self.now_ns += 100
        invoked = max(self.free_at.get(process, 0) + 1, self.now_ns - self.chance.randint(1, 250))
        completed = max(self.now_ns, invoked) + self.chance.randint(1, 250)
        self.now_ns = max(self.now_ns, invoked)
        self.free_at[process] = completed
        operation = {
            "process": process,
            "function": function,
            "times": [invoked, completed],
            "details": copy.deepcopy(details),
            "kind": kind,
            "answer": copy.deepcopy(answer) if kind is Kind.OK else {},
        }
        self.operations.append(operation)
        return operation

    def new_producer(self, process):
        producer = [next(self.producer_ids), 0]
        self.perform(process, "init", {"transactional_id": None}, {"producer": producer})
        return {"process": process, "producer": producer, "sequences": dict.fromkeys(PARTITIONS, 0)}

    def init(self, process):
        txid = process.partition("#")[0]
        producer_id, epoch = self.epochs.setdefault(txid, [next(self.producer_ids), -1])
        self.epochs[txid] = [producer_id, epoch + 1]
        self.perform(process, "init", {"transactional_id": txid}, {"producer": self.epochs[txid]})
        return {"process": process, "txid": txid, "name": None, "producer": list(self.epochs[txid])}

    def send(self, actor, name):
        """Append; sometimes the answer is lost, and the same is sent again."""
        values = self.values(name)
        details = {
            "transaction": name,
            "transactional_id": actor.get("txid"),
            "producer": list(actor["producer"]),
            "values": values,
        }
        base_offsets = {name: len(self.log[name]) for name in values}
        for partition, of in values.items():
            if "txid" in actor:
                self.open[partition].setdefault(actor["producer"][0], len(self.log[partition]))
            sequence = actor["sequences"][partition]
            actor["sequences"][partition] += len(of)
            for index, value in enumerate(of):
                self.log[partition].append((value, name, list(actor["producer"]), sequence, index, len(of)))
        is_lost = self.chance.random() < 0.15 and not self.is_certain
        answer = {"base_offsets": base_offsets}
        self.perform(actor["process"], "append", details, answer, Kind.UNKNOWN if is_lost else Kind.OK)
        if is_lost:
            self.perform(actor["process"], "append", details, answer)

    def step_transaction(self, actor):
        if actor["name"] is None:
            actor["name"] = f"{actor['process']}/{next(self.names)}"
            actor["sequences"] = dict.fromkeys(PARTITIONS, 0)
            actor["sent"] = 0
        if actor["sent"] < 2:
            actor["sent"] += 1
            self.send(actor, actor["name"])
            return
        commit = self.chance.random() < 0.7 or self.is_certain
        name, producer = actor["name"], actor["producer"]
        actor["name"] = None
        for partition in PARTITIONS:
            if self.open[partition].pop(producer[0], None) is not None:
                self.log[partition].append((None, "COMMIT" if commit else "ABORT", [producer[0], producer[1] + 1]))
        if not commit:
            self.aborted.add(name)
        after = [producer[0], producer[1] + 1]
        details = {"transaction": name, "transactional_id": actor["txid"], "producer": list(producer), "commit": commit}
        is_lost = commit and self.chance.random() < 0.2 and not self.is_certain
        self.perform(actor["process"], "end", details, {"next_producer": after}, Kind.UNKNOWN if is_lost else Kind.OK)
        self.epochs[actor["txid"]] = after
        actor["producer"] = list(after)
        if is_lost:
            life = int(actor["process"].partition("#")[2]) + 1
            process = f"{actor['txid']}#{life}"
            self.free_at[process] = self.free_at[actor["process"]]
            actor.update(self.init(process))
            self.perform(process, "resolve", {"transaction": name}, {"committed": commit})

    def values(self, name):
        number = next(self.names)
        chosen = self.chance.sample(PARTITIONS, 2 if self.is_certain else self.chance.randint(1, 2))
        return {
            partition: [f"{name}/{number}/{index}" for index in range(self.chance.randint(1, 3))]
            for partition in chosen
        }

    def poll(self, process, isolation, positions, *, final=False):
        pages = {}
        for partition in PARTITIONS:
            log, start = self.log[partition], positions[partition]
            stable = min(self.open[partition].values(), default=len(log))
            end = stable if isolation == "rc" else len(log)
            if not final:
                end = max(start, min(end, start + self.chance.choice((2, 4, 100))))
            records = [
                [offset, log[offset][0]]
                for offset in range(start, end)
                if log[offset][0] is not None and not (isolation == "rc" and log[offset][1] in self.aborted)
            ]
            pages[partition] = [start, max(start, end), stable, len(log), records]
            positions[partition] = max(start, end)
        details = {"isolation": isolation, "final": final}
        self.perform(process, "poll", details, {"pages": pages})

    def dump(self, partition):
        rows = []
        for offset, entry in enumerate(self.log[partition]):
            if entry[0] is None:
                rows.append([offset, offset, *entry[2], -1, True, entry[1]])
            elif entry[4] == 0:
                rows.append([offset, offset + entry[5] - 1, *entry[2], entry[3], entry[1].startswith("txn"), None])
        return rows


def events_of(operations):
    events = []
    for each in operations:
        invoked, completed = each["times"]
        events.append(Event(invoked, each["process"], Kind.INVOKE, each["function"], each["details"]))
        if each["kind"] is not Kind.INVOKE:
            events.append(Event(completed, each["process"], each["kind"], each["function"], each["answer"]))
    return events


def names_of(operations):
    return {anomaly.name for anomaly in find_anomalies(History.of(events_of(operations)))}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(100))
def test_a_right_history_raises_no_alarm(seed):
    assert find_anomalies(History.of(events_of(Simulated(seed).run()))) == []


def test_a_history_is_the_same_after_it_was_written_and_read_and_cut_in_the_middle_of_a_line():
    events = events_of(Simulated(1).run())
    text = "".join(event.to_line() for event in events)
    assert read_lines(text) == events
    assert read_lines(text[:-9]) == events[:-1]


# Each of what follows spoils a right history in place, by chance; the anomaly that must be found is the key. Nothing
# else in the history may undo it, so what it needs is looked for, and is there in every simulated history.


class Spoiler:
    """Looks for what a mutation needs in the operations of one history."""

    def __init__(self, operations, chance):
        self.operations = operations
        self.chance = chance
        self.history = History.of(events_of(operations))

    def of(self, function, kind=Kind.OK):
        return [each for each in self.operations if (each["function"], each["kind"]) == (function, kind)]

    def polls(self, isolation="rc", *, final):
        return [
            each
            for each in self.of("poll")
            if (each["details"]["isolation"], each["details"]["final"]) == (isolation, final)
        ]

    def pages(self, isolation="rc", *, final, at_least=1):
        return [
            (poll, partition, page)
            for poll in self.polls(isolation, final=final)
            for partition, page in poll["answer"]["pages"].items()
            if len(page[4]) >= at_least
        ]

    def a_page(self, **wanted):
        return self.chance.choice(self.pages(**wanted))

    def committed(self, **wanted):
        """Return the end of a committed transaction whose records stand in both partitions."""
        ends = [
            end
            for end in self.of("end")
            if end["details"]["commit"]
            and {partition for partition, _ in self.transaction(end).records} == set(PARTITIONS)
        ]
        return self.chance.choice(ends)

    def transaction(self, end):
        return self.history.transactions[end["details"]["transaction"]]

    def add(self, process, function, at_ns, details, answer, kind=Kind.OK):
        self.operations.append(
            {
                "process": process,
                "function": function,
                "times": [at_ns, at_ns],
                "details": details,
                "kind": kind,
                "answer": answer,
            }
        )

    def end_ns(self):
        return max(completed for each in self.operations for completed in each["times"]) + 10

    def final_pages(self, isolation="rc"):
        (final,) = self.polls(isolation, final=True)
        return copy.deepcopy(final["answer"]["pages"])

    def batches(self):
        (dumped,) = self.of("dump")
        return dumped["answer"]["batches"]


def one_offset_two_values(it):
    _, _, page = it.a_page(final=True, at_least=2)
    page[4][0][1] = page[4][1][1]


def one_value_twice(it):
    _, _, page = it.a_page(final=True)
    page[4].append([page[3], page[4][0][1]])


def a_value_that_nobody_wrote(it):
    _, _, page = it.a_page(final=False)
    page[4][-1][1] = "garbage"


def never_read(it):
    """Choose an acknowledged value with others behind it, and take it out of every poll."""
    (final,) = it.polls(final=True)
    partition, page = it.chance.choice([each for each in final["answer"]["pages"].items() if len(each[1][4]) > 1])
    acknowledged = [
        value for _, value in page[4][:-1] if it.history.writers[partition, value].records[partition, value] is Kind.OK
    ]
    lost = it.chance.choice(acknowledged)
    for _, _, other in it.pages(final=False) + it.pages(final=True):
        other[4] = [record for record in other[4] if record[1] != lost]


def half_of_a_transaction_is_gone(it):
    transaction = it.transaction(it.committed())
    partition = it.chance.choice(PARTITIONS)
    for _, of, page in it.pages(final=True):
        if of == partition:
            page[4] = [record for record in page[4] if (partition, record[1]) not in transaction.records]


def a_whole_transaction_is_gone(it):
    transaction = it.transaction(it.committed())
    for _, partition, page in it.pages(final=True):
        page[4] = [record for record in page[4] if (partition, record[1]) not in transaction.records]


def a_record_left_out_of_one_poll(it):
    _, _, page = it.a_page(isolation="ru", final=False)
    page[4].pop(it.chance.randrange(len(page[4])))


def records_out_of_order(it):
    _, _, page = it.a_page(isolation="ru", final=True, at_least=2)
    page[4].reverse()


def a_poll_left_out(it):
    polls = it.polls("ru", final=False)
    # Nobody knows what came before the first one.
    poll = it.chance.choice([of for of, _, _ in it.pages(isolation="ru", final=False) if of is not polls[0]])
    if poll is polls[-1]:
        pages = it.final_pages("ru")
        ends = {name: [page[3], page[3], page[2], page[3], []] for name, page in pages.items()}
        it.add("ru-reader", "poll", it.end_ns(), poll["details"], {"pages": ends})
    it.operations.remove(poll)


def a_poll_twice(it):
    poll, _, _ = it.a_page(isolation="ru", final=False)
    it.add(poll["process"], "poll", it.end_ns(), poll["details"], poll["answer"])


def sent_in_another_order(it):
    appends = [
        each
        for each in it.of("append")
        if each["details"]["transactional_id"] is None and it.history.is_committed(*next(records_of(each)))
    ]
    pairs = [
        (first, second, partition)
        for first, second in itertools.combinations(appends, 2)
        if first["process"] == second["process"]
        and it.history.transactions[first["details"]["transaction"]].ends[0].kind is Kind.OK
        and it.history.transactions[second["details"]["transaction"]].ends[0].kind is Kind.OK
        for partition in first["details"]["values"].keys() & second["details"]["values"].keys()
    ]
    first, second, partition = it.chance.choice(pairs)
    for what, of in (("details", "values"), ("answer", "base_offsets")):
        first[what][of][partition], second[what][of][partition] = (
            second[what][of][partition],
            first[what][of][partition],
        )


def records_of(operation):
    return ((partition, value) for partition, values in operation["details"]["values"].items() for value in values)


def aborted_but_read(it):
    it.committed()["details"]["commit"] = False


def read_before_the_commit(it):
    end = it.committed()
    it.add("early#1", "poll", end["times"][0] - 1, {"isolation": "rc", "final": False}, {"pages": it.final_pages()})


def read_behind_an_open_transaction(it):
    def without(end):
        """Return everything but the transaction's own records, and whether there is some behind them."""
        pages, records = it.final_pages(), it.transaction(end).records
        for partition, page in pages.items():
            page[4] = [record for record in page[4] if (partition, record[1]) not in records]
        return pages, any(
            offset < pages[partition][4][-1][0]
            for partition, value in records
            for offset in it.history.offsets[partition, value]
            if pages[partition][4]
        )

    ends = [end for end in it.of("end") if end["details"]["commit"] and without(end)[1]]
    end = it.chance.choice(ends)
    pages, _ = without(end)
    it.add("early#1", "poll", end["times"][0] - 1, {"isolation": "rc", "final": False}, {"pages": pages})


def read_at_the_bound(it):
    _, _, page = it.a_page(final=False)
    page[2] = page[4][-1][0]


def stable_above_high(it):
    _, _, page = it.a_page(isolation="ru", final=False)
    page[2] = page[3] + 1


def bounds_that_go_back(it):
    poll, _, _ = it.a_page(isolation="ru", final=False)
    ahead = {name: [page[3], page[3], math.inf, math.inf, []] for name, page in poll["answer"]["pages"].items()}
    it.add("ahead#1", "poll", poll["times"][0] - 1, poll["details"], {"pages": ahead})


def half_of_a_transaction_in_one_poll(it):
    transaction = it.transaction(it.committed())
    partition = it.chance.choice(PARTITIONS)
    pages = it.final_pages()
    page = pages[partition]
    page[4] = [record for record in page[4] if (partition, record[1]) not in transaction.records]
    it.add("half#1", "poll", it.end_ns(), {"isolation": "rc", "final": False}, {"pages": pages})


def half_of_a_transaction_seems_open(it):
    transaction = it.transaction(it.committed())
    partition = it.chance.choice(PARTITIONS)
    pages = it.final_pages()
    page = pages[partition]
    first = min(
        offset for record in transaction.records if record[0] == partition for offset in it.history.offsets[record]
    )
    page[1] = page[2] = first
    page[4] = [record for record in page[4] if record[0] < first]
    it.add("half#1", "poll", it.end_ns(), {"isolation": "rc", "final": False}, {"pages": pages})


def another_order_for_others(it):
    committed = {record[1] for page in it.final_pages().values() for record in page[4]}
    _, _, page = it.a_page(isolation="ru", final=True, at_least=2)
    first, second = it.chance.choice(
        [(first, second) for first, second in itertools.combinations(page[4], 2) if first[1] in committed]
    )
    first[1], second[1] = second[1], first[1]


def nothing_new_after_an_append(it):
    _, _, page = it.a_page(final=True)
    page[:] = [0, 0, 0, 0, []]


def held_by_what_is_over(it):
    transaction = it.transaction(it.committed())
    partition = it.chance.choice(PARTITIONS)
    first = min(
        offset for record in transaction.records if record[0] == partition for offset in it.history.offsets[record]
    )
    pages = it.final_pages()
    page = pages[partition]
    page[1] = page[2] = first
    page[4] = [record for record in page[4] if record[0] < first]
    it.add("held#1", "poll", it.end_ns(), {"isolation": "rc", "final": False}, {"pages": pages})


def nobody_knows(it):
    end = it.committed()
    end["kind"], end["answer"] = Kind.UNKNOWN, {}


def said_to_be_aborted(it):
    end = it.committed()
    it.add("other#1", "resolve", it.end_ns(), {"transaction": end["details"]["transaction"]}, {"committed": False})


def a_sequence_number_left_out(it):
    rows = [row for rows in it.batches().values() for row in rows if row[6] is None]
    it.chance.choice(rows)[4] += 1


def moved_by_sending_again(it):
    append = it.chance.choice(it.of("append"))
    moved = {name: offset + 1_000 for name, offset in append["answer"]["base_offsets"].items()}
    it.add("again#1", "append", it.end_ns(), append["details"], {"base_offsets": moved})


def accepted_after_a_newer_one(it):
    end = it.committed()
    details = {**end["details"], "values": {}, "producer": [end["details"]["producer"][0], -1]}
    it.add("zombie#1", "append", it.end_ns(), details, {"base_offsets": {}})


def the_same_producer_twice(it):
    end = it.committed()
    details = {"transactional_id": end["details"]["transactional_id"]}
    it.add("other#1", "init", it.end_ns(), details, {"producer": end["answer"]["next_producer"]})


def an_older_producer_later(it):
    init = next(each for each in it.of("init") if each["details"]["transactional_id"] is not None)
    producer_id, _ = init["answer"]["producer"]
    it.add("other#1", "init", it.end_ns(), init["details"], {"producer": [producer_id - 1, 7]})


def an_epoch_above_the_last(it):
    it.committed()["answer"]["next_producer"][1] = 2**15 - 1


def a_new_producer_id_with_an_old_epoch(it):
    it.committed()["answer"]["next_producer"] = [10_000, 3]


def a_batch_missing(it):
    rows = it.chance.choice([rows for rows in it.batches().values() if len(rows) > 1])
    rows.pop(it.chance.randrange(len(rows) - 1))


def one_marker_the_other_way(it):
    transaction = it.transaction(it.committed())
    producer_id, epoch = transaction.ends[0].producer
    partition = it.chance.choice(PARTITIONS)
    (marker,) = [row for row in it.batches()[partition] if row[6] and row[2:4] == [producer_id, epoch + 1]]
    marker[6] = "ABORT"


def one_marker_missing(it):
    transaction = it.transaction(it.committed())
    producer_id, epoch = transaction.ends[0].producer
    rows = it.batches()[it.chance.choice(PARTITIONS)]
    rows[:] = [row for row in rows if row[2] != producer_id or row[3] <= epoch]


def one_marker_twice(it):
    rows = it.chance.choice([rows for rows in it.batches().values() if any(row[6] for row in rows)])
    marker = next(row for row in rows if row[6])
    rows.append([rows[-1][1] + 1, rows[-1][1] + 1, *marker[2:]])


MUTATIONS = {
    "L1 inconsistent-offsets": (one_offset_two_values,),
    "L2 duplicate": (one_value_twice, one_offset_two_values),
    "L3 garbage-read": (a_value_that_nobody_wrote,),
    "L4 lost-write": (never_read,),
    "L5 torn-transaction": (half_of_a_transaction_is_gone,),
    "L6 unseen": (never_read, a_whole_transaction_is_gone),
    "L7 skip-within-poll": (a_record_left_out_of_one_poll, records_out_of_order),
    "L8 skip-between-polls": (a_poll_left_out, a_poll_twice),
    "L9 nonmonotonic-send": (sent_in_another_order,),
    "A1 aborted-read": (aborted_but_read,),
    "A2 early-read": (read_before_the_commit,),
    "A5 lso-violation": (read_behind_an_open_transaction,),
    "A6 boundary": (read_at_the_bound,),
    "A7 bounds-order": (stable_above_high, bounds_that_go_back),
    "A8 fractured-read": (half_of_a_transaction_in_one_poll, half_of_a_transaction_seems_open),
    "A10 order-differs": (another_order_for_others,),
    "A11 stale-poll": (nothing_new_after_an_append, held_by_what_is_over),
    "V1 unresolved": (nobody_knows,),
    "V1 decision-divergence": (said_to_be_aborted,),
    "I1 sequence-gap": (a_sequence_number_left_out,),
    "I2 moved-by-retry": (moved_by_sending_again,),
    "F1 zombie-accepted": (accepted_after_a_newer_one,),
    "F2 epoch-reused": (the_same_producer_twice, an_older_producer_later),
    "F3 epoch-exhausted": (an_epoch_above_the_last, a_new_producer_id_with_an_old_epoch),
    "G3 offset-gap": (a_batch_missing,),
    "G6 divided-decision": (one_marker_the_other_way, one_marker_missing),
    "G6 marker-twice": (one_marker_twice,),
}


def test_every_kind_of_anomaly_is_tried():
    assert set(MUTATIONS) == set(CHECKS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("name", "mutation"),
    [(name, mutation) for name, mutations in MUTATIONS.items() for mutation in mutations],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_spoilt_history_is_found_by_the_name_of_what_is_wrong(name, mutation):
    for seed in SEEDS:
        operations = Simulated(seed).run()
        mutation(Spoiler(operations, random.Random(seed)))
        assert name in names_of(operations), f"seed {seed}"


def test_a_crashed_commit_that_one_read_has_proved_makes_its_missing_half_an_anomaly():
    (name,) = {"L5 torn-transaction"}
    transaction = {"transaction": "t", "transactional_id": "x", "producer": [0, 0]}
    appended = {**transaction, "values": {"p0": ["a"], "p1": ["b"]}}
    polled = {"pages": {"p0": [0, 1, 2, 2, [[0, "a"]]], "p1": [0, 2, 2, 2, []]}}
    events = [
        Event(1, "w", Kind.INVOKE, "append", appended),
        Event(2, "w", Kind.OK, "append", {"base_offsets": {"p0": 0, "p1": 0}}),
        Event(3, "w", Kind.INVOKE, "end", {**transaction, "commit": True}),
        Event(5, "r", Kind.INVOKE, "poll", {"isolation": "rc", "final": True}),
        Event(6, "r", Kind.OK, "poll", polled),
    ]
    found = {anomaly.name for anomaly in find_anomalies(History.of(events))}
    assert {name, "A8 fractured-read", "V1 unresolved"} <= found


def test_an_append_that_was_refused_and_is_read_all_the_same_is_an_aborted_read():
    sent = {"transaction": "t", "transactional_id": None, "producer": [0, 0], "values": {"p0": ["a"]}}
    events = [
        Event(1, "w", Kind.INVOKE, "append", sent),
        Event(2, "w", Kind.FAIL, "append", {}),
        Event(3, "r", Kind.INVOKE, "poll", {"isolation": "rc", "final": False}),
        Event(4, "r", Kind.OK, "poll", {"pages": {"p0": [0, 1, 1, 1, [[0, "a"]]]}}),
    ]
    assert "A1 aborted-read" in {anomaly.name for anomaly in find_anomalies(History.of(events))}

/* The bulk paths of the producer in C: a record's way into its queue.
 *
 * What is here does what the same in Python does, in the cases that make up nearly all records, and leaves every other
 * one alone, nothing changed, for Python to go on with: wrong arguments, topics that are not known, queues that are full,
 * new, or of which the sender is to hear.  So each error has one place, which is in Python.
 *
 * Nothing runs between the first change and the last one: no code of Python, so neither Ctrl-C nor another thread.
 */

#include "_bulk.h"
#include <limits.h>
#include <stddef.h>
#include <structmember.h>

/* The places of a record in a queue, as producer/queue.py has them: value, key, timestamp, headers, callback, when it was
 * queued, and its size. */
enum { PLACES = 7 };

/* --- what a queue counts ------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *places; /* a list: the values of its records */
    long long size_bytes;
    long long notify_at_bytes;
} Queue;

static int
queue_traverse(Queue *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->places);
    return 0;
}

static int
queue_clear(Queue *self)
{
    Py_CLEAR(self->places);
    return 0;
}

static void
queue_dealloc(Queue *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    queue_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef queue_members[] = {
    {"places", T_OBJECT_EX, offsetof(Queue, places), 0, NULL},
    {"size_bytes", T_LONGLONG, offsetof(Queue, size_bytes), 0, NULL},
    {"notify_at_bytes", T_LONGLONG, offsetof(Queue, notify_at_bytes), 0, NULL},
    {0},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, "What changes of a queue with each record."},
    {Py_tp_traverse, queue_traverse},
    {Py_tp_clear, queue_clear},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, queue_members},
    {0, NULL},
};

static PyType_Spec queue_spec = {
    .name = "txnstore._bulk.QueueFields",
    .basicsize = sizeof(Queue),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = queue_slots,
};

typedef struct {
    PyObject_HEAD
    PyObject *queues;     /* a dict: by topic and partition */
    PyObject *unassigned; /* a dict: by topic, those that nobody has looked up yet */
    PyObject *gate;       /* the transaction that records belong to, or None */
    long long record_count;
    long long size_bytes;
    long long records_max;
    long long size_bytes_max;
    long long batch_places_max;
} Accumulator;

static int
accumulator_traverse(Accumulator *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->queues);
    Py_VISIT(self->unassigned);
    Py_VISIT(self->gate);
    return 0;
}

static int
accumulator_clear(Accumulator *self)
{
    Py_CLEAR(self->queues);
    Py_CLEAR(self->unassigned);
    Py_CLEAR(self->gate);
    return 0;
}

static void
accumulator_dealloc(Accumulator *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    accumulator_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef accumulator_members[] = {
    {"queues", T_OBJECT_EX, offsetof(Accumulator, queues), 0, NULL},
    {"_unassigned", T_OBJECT_EX, offsetof(Accumulator, unassigned), 0, NULL},
    {"gate", T_OBJECT_EX, offsetof(Accumulator, gate), 0, NULL},
    {"record_count", T_LONGLONG, offsetof(Accumulator, record_count), 0, NULL},
    {"size_bytes", T_LONGLONG, offsetof(Accumulator, size_bytes), 0, NULL},
    {"records_max", T_LONGLONG, offsetof(Accumulator, records_max), 0, NULL},
    {"size_bytes_max", T_LONGLONG, offsetof(Accumulator, size_bytes_max), 0, NULL},
    {"_batch_places_max", T_LONGLONG, offsetof(Accumulator, batch_places_max), 0, NULL},
    {0},
};

static PyType_Slot accumulator_slots[] = {
    {Py_tp_doc, "What each record looks at in the queues of a producer."},
    {Py_tp_traverse, accumulator_traverse},
    {Py_tp_clear, accumulator_clear},
    {Py_tp_dealloc, accumulator_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_members, accumulator_members},
    {0, NULL},
};

static PyType_Spec accumulator_spec = {
    .name = "txnstore._bulk.AccumulatorFields",
    .basicsize = sizeof(Accumulator),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = accumulator_slots,
};

/* --- the way into the queue --------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Accumulator *accumulator;
    PyObject *acquire; /* the lock's methods */
    PyObject *release;
    PyObject *entries; /* a dict: the topics that are known, each as an entry that never changes */
    PyObject *ticks;
    PyObject *monotonic;
    PyObject *choose;     /* chooses the same again for a record without a key, or None: it would not be the same */
    PyObject *hash;       /* a key's hash, or None: its partition is not by it */
    PyObject *open_stage; /* the stage in which a transaction takes records */
    PyObject *stage_name;
    int is_empty_keyless; /* whether an empty key is none */
    long long record_bytes_max;
    /* Remembered of the record before. */
    PyObject *entry; /* the topic's; and how many partitions it has */
    Py_ssize_t partition_count;
    PyObject *place; /* the topic and the partition as a tuple; and its number once more */
    Py_ssize_t place_partition;
    PyObject *tick_ms; /* the time in milliseconds; and until when it is right */
    double tick_until_seconds;
} Intake;

/* A record on its way; what is in `owned` is to be let go. */
typedef struct {
    PyObject *topic;
    PyObject *places[PLACES];
    PyObject *owned[PLACES];
    Py_ssize_t partition;
    long long size_bytes;
} Arrival;

enum { VALUE, KEY, TIMESTAMP, HEADERS, CALLBACK, QUEUED, SIZE };

/* What became of an attempt. */
enum { FAILED = -1, LEFT_ALONE = 0, DONE = 1 };

static int
intake_traverse(Intake *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->accumulator);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->entries);
    Py_VISIT(self->ticks);
    Py_VISIT(self->monotonic);
    Py_VISIT(self->choose);
    Py_VISIT(self->hash);
    Py_VISIT(self->open_stage);
    Py_VISIT(self->entry);
    Py_VISIT(self->place);
    return 0;
}

static int
intake_clear(Intake *self)
{
    Py_CLEAR(self->stage_name); /* first: intake_add asks it */
    Py_CLEAR(self->accumulator);
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->entries);
    Py_CLEAR(self->ticks);
    Py_CLEAR(self->monotonic);
    Py_CLEAR(self->choose);
    Py_CLEAR(self->hash);
    Py_CLEAR(self->open_stage);
    Py_CLEAR(self->entry);
    Py_CLEAR(self->place);
    Py_CLEAR(self->tick_ms);
    return 0;
}

static void
intake_dealloc(Intake *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    intake_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *
intake_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"accumulator", "lock", "entries",          "ticks",      "monotonic",
                            "choose",      "key_hash", "is_empty_keyless", "open_stage", "record_bytes_max",
                            NULL};
    const State *state = PyType_GetModuleState(type);
    PyObject *accumulator, *lock, *entries, *ticks, *monotonic, *choose, *hash, *open_stage;
    int is_empty_keyless;
    long long record_bytes_max;
    if (state == NULL || !PyArg_ParseTupleAndKeywords(arguments, keywords, "O!OO!OOOOpOL", names, state->accumulator_type,
                                                      &accumulator, &lock, &PyDict_Type, &entries, &ticks, &monotonic,
                                                      &choose, &hash, &is_empty_keyless, &open_stage,
                                                      &record_bytes_max)) {
        return NULL;
    }
    Intake *self = (Intake *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->accumulator = (Accumulator *)Py_NewRef(accumulator);
    self->entries = Py_NewRef(entries);
    self->ticks = Py_NewRef(ticks);
    self->monotonic = Py_NewRef(monotonic);
    self->choose = Py_NewRef(choose);
    self->hash = Py_NewRef(hash);
    self->open_stage = Py_NewRef(open_stage);
    self->is_empty_keyless = is_empty_keyless;
    self->record_bytes_max = record_bytes_max;
    self->tick_until_seconds = -HUGE_VAL;
    self->acquire = PyObject_GetAttrString(lock, "acquire");
    self->release = PyObject_GetAttrString(lock, "release");
    self->stage_name = PyUnicode_InternFromString("stage");
    if (self->acquire == NULL || self->release == NULL || self->stage_name == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Take a key or a value as bytes. */
static int
arrival_content(Arrival *arrival, int place, PyObject *given)
{
    if (PyUnicode_CheckExact(given)) {
        given = arrival->owned[place] = PyUnicode_AsUTF8String(given);
        if (given == NULL) {
            /* Half of a surrogate pair, which Python says in its turn. */
            if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) {
                return FAILED;
            }
            PyErr_Clear();
            return LEFT_ALONE;
        }
    }
    if (given != Py_None) {
        if (!PyBytes_CheckExact(given)) {
            return LEFT_ALONE;
        }
        arrival->size_bytes += PyBytes_GET_SIZE(given);
    }
    arrival->places[place] = given;
    return DONE;
}

/* Return how many partitions a topic has, or 0: it is not known. */
static Py_ssize_t
intake_partition_count(Intake *self, PyObject *topic)
{
    PyObject *entry = PyDict_GetItemWithError(self->entries, topic);
    if (entry == NULL) {
        return PyErr_Occurred() ? FAILED : 0;
    }
    if (entry == self->entry) {
        return self->partition_count;
    }
    Py_ssize_t count = FAILED;
    Py_INCREF(entry);
    PyObject *known = PyObject_GetAttrString(entry, "topic");
    PyObject *partition_ids = known == NULL ? NULL : PyObject_GetAttrString(known, "partition_ids");
    if (partition_ids != NULL) {
        count = PyObject_Size(partition_ids);
    }
    if (count >= 0) {
        PyObject *before = self->entry;
        self->entry = Py_NewRef(entry);
        self->partition_count = count;
        Py_XDECREF(before);
    }
    Py_XDECREF(partition_ids);
    Py_XDECREF(known);
    Py_DECREF(entry);
    return count;
}

/* Set when the record was queued, and its timestamp: the one that was given, but for 0, which is now. */
static int
intake_stamp(Intake *self, Arrival *arrival, PyObject *timestamp)
{
    int overflow;
    const long long given_ms = PyLong_AsLongLongAndOverflow(timestamp, &overflow);
    if (overflow != 0 || given_ms == LLONG_MIN) {
        return LEFT_ALONE;
    }
    PyObject *now = arrival->places[QUEUED] = arrival->owned[QUEUED] = PyObject_CallNoArgs(self->monotonic);
    if (now == NULL) {
        return FAILED;
    }
    if (!PyFloat_CheckExact(now)) {
        return LEFT_ALONE;
    }
    if (given_ms != 0) {
        arrival->places[TIMESTAMP] = timestamp;
        return DONE;
    }
    if (PyFloat_AS_DOUBLE(now) < self->tick_until_seconds) {
        arrival->places[TIMESTAMP] = arrival->owned[TIMESTAMP] = Py_NewRef(self->tick_ms);
        return DONE;
    }
    PyObject *name = PyUnicode_InternFromString("next");
    if (name == NULL) {
        return FAILED;
    }
    PyObject *now_ms = PyObject_CallMethodOneArg(self->ticks, name, now);
    Py_DECREF(name);
    arrival->places[TIMESTAMP] = arrival->owned[TIMESTAMP] = now_ms;
    if (now_ms == NULL) {
        return FAILED;
    }
    /* In this order: whoever finds the new end finds the new time. */
    PyObject *until = PyObject_GetAttrString(self->ticks, "until_seconds");
    PyObject *tick_ms = until == NULL ? NULL : PyObject_GetAttrString(self->ticks, "now_ms");
    if (tick_ms == NULL || !PyFloat_CheckExact(until) || !PyLong_CheckExact(now_ms)) {
        const int became = tick_ms == NULL ? FAILED : LEFT_ALONE;
        Py_XDECREF(until);
        Py_XDECREF(tick_ms);
        return became;
    }
    Py_XSETREF(self->tick_ms, tick_ms);
    self->tick_until_seconds = PyFloat_AS_DOUBLE(until);
    Py_DECREF(until);
    return DONE;
}

/* Choose the partition of a record that came without one. */
static int
intake_choose(Intake *self, Arrival *arrival, Py_ssize_t count)
{
    PyObject *key = arrival->places[KEY];
    PyObject *answer;
    const int is_hashed = key != Py_None && (PyBytes_GET_SIZE(key) > 0 || !self->is_empty_keyless);
    if ((is_hashed ? self->hash : self->choose) == Py_None) {
        return LEFT_ALONE;
    }
    if (is_hashed) {
        answer = PyObject_CallOneArg(self->hash, key);
    } else {
        PyObject *partition_count = PyLong_FromSsize_t(count);
        if (partition_count == NULL) {
            return FAILED;
        }
        answer = PyObject_CallFunctionObjArgs(self->choose, arrival->topic, key, partition_count,
                                              arrival->places[QUEUED], NULL);
        Py_DECREF(partition_count);
    }
    if (answer == NULL) {
        return FAILED;
    }
    int overflow = 1;
    const long long number = PyLong_CheckExact(answer) ? PyLong_AsLongLongAndOverflow(answer, &overflow) : 0;
    Py_DECREF(answer);
    if (overflow != 0 || number < 0 || (!is_hashed && number >= count)) {
        return LEFT_ALONE;
    }
    arrival->partition = (Py_ssize_t)(number % count);
    return DONE;
}

/* Return the key of the record's queue, a new reference. */
static PyObject *
intake_place(Intake *self, const Arrival *arrival)
{
    if (self->place != NULL && self->place_partition == arrival->partition &&
        PyTuple_GET_ITEM(self->place, 0) == arrival->topic) {
        return Py_NewRef(self->place);
    }
    PyObject *place = Py_BuildValue("On", arrival->topic, arrival->partition);
    if (place != NULL) {
        Py_XSETREF(self->place, Py_NewRef(place));
        self->place_partition = arrival->partition;
    }
    return place;
}

/* Put the record into a queue, and count it; nothing in here runs any other code. */
static int
intake_append(Accumulator *accumulator, Queue *queue, const Arrival *arrival)
{
    PyObject *places = queue->places;
    if (places == NULL || !PyList_CheckExact(places) || accumulator->unassigned == NULL ||
        !PyDict_CheckExact(accumulator->unassigned) || PyDict_GET_SIZE(accumulator->unassigned) != 0) {
        return LEFT_ALONE;
    }
    const Py_ssize_t before = PyList_GET_SIZE(places);
    const long long waiting_bytes = queue->size_bytes + arrival->size_bytes;
    if (accumulator->record_count >= accumulator->records_max ||
        accumulator->size_bytes + arrival->size_bytes > accumulator->size_bytes_max ||
        waiting_bytes >= queue->notify_at_bytes || before + PLACES == accumulator->batch_places_max) {
        return LEFT_ALONE;
    }
    for (int place = 0; place < PLACES; place++) {
        if (PyList_Append(places, arrival->places[place]) < 0) {
            /* No memory: what came before it goes again. */
            PyObject *type, *value, *traceback;
            PyErr_Fetch(&type, &value, &traceback);
            PyList_SetSlice(places, before, before + place, NULL);
            PyErr_Restore(type, value, traceback);
            return FAILED;
        }
    }
    accumulator->record_count += 1;
    accumulator->size_bytes += arrival->size_bytes;
    queue->size_bytes = waiting_bytes;
    return DONE;
}

/* Find the record's queue, under the lock. */
static int
intake_put(Intake *self, const State *state, const Arrival *arrival)
{
    Accumulator *accumulator = self->accumulator;
    /* Before the gate is looked at: where memory is asked for, the collector of garbage may run what closes it. */
    PyObject *place = intake_place(self, arrival);
    if (place == NULL) {
        return FAILED;
    }
    int became = LEFT_ALONE;
    PyObject *queues = NULL;
    if (accumulator->gate == NULL) {
        goto done;
    }
    if (accumulator->gate != Py_None) {
        PyObject *stage = PyObject_GetAttr(accumulator->gate, self->stage_name);
        Py_XDECREF(stage);
        if (stage != self->open_stage) {
            became = stage == NULL ? FAILED : LEFT_ALONE;
            goto done;
        }
    }
    queues = Py_XNewRef(accumulator->queues);
    if (queues != NULL && PyDict_CheckExact(queues)) {
        PyObject *queue = Py_XNewRef(PyDict_GetItemWithError(queues, place));
        if (queue == NULL) {
            became = PyErr_Occurred() ? FAILED : LEFT_ALONE;
        } else if (queues == accumulator->queues && PyObject_TypeCheck(queue, state->queue_type)) {
            became = intake_append(accumulator, (Queue *)queue, arrival);
        }
        Py_XDECREF(queue);
    }
done:
    Py_XDECREF(queues);
    Py_DECREF(place);
    return became;
}

static int
intake_take(Intake *self, Arrival *arrival, PyObject *const *given)
{
    PyObject *partition = given[3], *callback = given[4], *timestamp = given[5], *headers = given[6];
    arrival->topic = given[0];
    if (!PyUnicode_CheckExact(arrival->topic) || !PyLong_CheckExact(partition) || !PyLong_CheckExact(timestamp)) {
        return LEFT_ALONE;
    }
    int became = arrival_content(arrival, VALUE, given[1]);
    if (became == DONE) {
        became = arrival_content(arrival, KEY, given[2]);
    }
    if (became != DONE) {
        return became;
    }
    if (headers != Py_None) {
        if (!PyUnicode_CheckExact(headers)) {
            return LEFT_ALONE;
        }
        arrival->size_bytes += PyUnicode_GET_LENGTH(headers);
    }
    arrival->places[HEADERS] = headers;
    if (callback != Py_None && !PyCallable_Check(callback)) {
        return LEFT_ALONE;
    }
    arrival->places[CALLBACK] = callback;
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(partition, &overflow);
    if (overflow != 0 || number < -1 || arrival->size_bytes > self->record_bytes_max) {
        return LEFT_ALONE;
    }
    arrival->places[SIZE] = arrival->owned[SIZE] = PyLong_FromLongLong(arrival->size_bytes);
    if (arrival->places[SIZE] == NULL) {
        return FAILED;
    }
    const Py_ssize_t count = intake_partition_count(self, arrival->topic);
    if (count <= 0 || number >= count) {
        return count < 0 ? FAILED : LEFT_ALONE;
    }
    became = intake_stamp(self, arrival, timestamp);
    if (became != DONE) {
        return became;
    }
    arrival->partition = number < 0 ? 0 : (Py_ssize_t)number;
    return number < 0 && count > 1 ? intake_choose(self, arrival, count) : DONE;
}

static PyObject *
intake_add(Intake *self, PyObject *const *given, Py_ssize_t given_count)
{
    if (given_count != PLACES) {
        PyErr_Format(PyExc_TypeError, "add takes %d arguments, not %zd", PLACES, given_count);
        return NULL;
    }
    const State *state = PyType_GetModuleState(Py_TYPE(self));
    if (state == NULL) {
        return NULL;
    }
    if (self->stage_name == NULL) {
        /* It is being made, or has been taken apart. */
        Py_RETURN_FALSE;
    }
    Arrival arrival = {0};
    int became = intake_take(self, &arrival, given);
    if (became == DONE) {
        PyObject *answer = PyObject_CallNoArgs(self->acquire);
        Py_XDECREF(answer);
        became = answer == NULL ? FAILED : intake_put(self, state, &arrival);
        if (answer != NULL) {
            PyObject *type, *value, *traceback;
            PyErr_Fetch(&type, &value, &traceback);
            answer = PyObject_CallNoArgs(self->release);
            if (answer == NULL) {
                became = FAILED;
                Py_XDECREF(type);
                Py_XDECREF(value);
                Py_XDECREF(traceback);
            } else {
                Py_DECREF(answer);
                PyErr_Restore(type, value, traceback);
            }
        }
    }
    for (int place = 0; place < PLACES; place++) {
        Py_XDECREF(arrival.owned[place]);
    }
    return became == FAILED ? NULL : PyBool_FromLong(became);
}

static PyMethodDef intake_methods[] = {
    {"add", (PyCFunction)(void (*)(void))intake_add, METH_FASTCALL,
     "add($self, topic, value, key, partition, callback, timestamp, headers, /)\n--\n\n"
     "Queue a record, its headers packed, and return whether that was done; if not, nothing has changed."},
    {0},
};

static PyType_Slot intake_slots[] = {
    {Py_tp_doc, "Takes records into the queues of a producer."},
    {Py_tp_traverse, intake_traverse},
    {Py_tp_clear, intake_clear},
    {Py_tp_dealloc, intake_dealloc},
    {Py_tp_new, intake_new},
    {Py_tp_methods, intake_methods},
    {0, NULL},
};

static PyType_Spec intake_spec = {
    .name = "txnstore._bulk.Intake",
    .basicsize = sizeof(Intake),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = intake_slots,
};

/* --- the module --------------------------------------------------------------------------------------------------- */

int
bulk_add_produce(PyObject *module, State *state)
{
    state->queue_type = bulk_add_type(module, &queue_spec);
    if (state->queue_type == NULL) {
        return -1;
    }
    state->accumulator_type = bulk_add_type(module, &accumulator_spec);
    if (state->accumulator_type == NULL) {
        return -1;
    }
    PyTypeObject *intake_type = bulk_add_type(module, &intake_spec);
    Py_XDECREF(intake_type);
    return intake_type == NULL ? -1 : 0;
}

/* The bulk paths of the producer in C: the messages of delivery reports. */

#include "_bulk.h"
#include <limits.h>

/* An iterator over pairs: a record's callback, and its message, which is made when it is asked for. */
typedef struct {
    PyObject_HEAD
    PyTypeObject *type;       /* of the messages */
    PyObject *callbacks;      /* an iterator: who takes what is left of it ends this one too */
    PyObject *sources;        /* a tuple that all have in common, or a list of one for each */
    PyObject *offset;         /* the first one's, and they follow each other, or below zero: of none it is known */
    PyObject *timestamps_ms;  /* a list, or the number that all have in common */
    PyObject *keys;           /* lists */
    PyObject *values;
    PyObject *queued_seconds; /* a list: when each was queued */
    PyObject *error;
    PyObject *unknown; /* a number below zero */
    double done_seconds;
    Py_ssize_t index; /* of the next record */
} Deliveries;

static int
deliveries_traverse(Deliveries *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->type);
    Py_VISIT(self->callbacks);
    Py_VISIT(self->sources);
    Py_VISIT(self->timestamps_ms);
    Py_VISIT(self->keys);
    Py_VISIT(self->values);
    Py_VISIT(self->queued_seconds);
    Py_VISIT(self->error);
    return 0;
}

static int
deliveries_clear(Deliveries *self)
{
    Py_CLEAR(self->callbacks);
    Py_CLEAR(self->type);
    Py_CLEAR(self->sources);
    Py_CLEAR(self->offset);
    Py_CLEAR(self->timestamps_ms);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->values);
    Py_CLEAR(self->queued_seconds);
    Py_CLEAR(self->error);
    Py_CLEAR(self->unknown);
    return 0;
}

static void
deliveries_dealloc(Deliveries *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    deliveries_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *
deliveries_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"message_type", "callbacks", "sources", "offset",       "timestamps_ms", "keys",
                            "values",       "queued_seconds", "error", "done_seconds", NULL};
    const State *state = PyType_GetModuleState(type);
    PyTypeObject *message_type;
    PyObject *callbacks, *sources, *offset, *timestamps_ms, *keys, *values, *queued_seconds, *error;
    double done_seconds;
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(arguments, keywords, "O!OOO!OO!O!O!Od", names, &PyType_Type, &message_type, &callbacks,
                                     &sources, &PyLong_Type, &offset, &timestamps_ms, &PyList_Type, &keys, &PyList_Type,
                                     &values, &PyList_Type, &queued_seconds, &error, &done_seconds) ||
        bulk_check_message_type(state, message_type) < 0 ||
        (!PyList_Check(sources) && bulk_check_tuple(sources, SOURCE_SIZE_MIN, PY_SSIZE_T_MAX, "sources") < 0)) {
        return NULL;
    }
    if (!PyIter_Check(callbacks) || (!PyList_Check(timestamps_ms) && !PyLong_Check(timestamps_ms))) {
        PyErr_SetString(PyExc_TypeError, "the callbacks are an iterator, the timestamps a list or a number");
        return NULL;
    }
    Deliveries *self = (Deliveries *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->type = (PyTypeObject *)Py_NewRef(message_type);
    self->callbacks = Py_NewRef(callbacks);
    self->sources = Py_NewRef(sources);
    self->offset = Py_NewRef(offset);
    self->timestamps_ms = Py_NewRef(timestamps_ms);
    self->keys = Py_NewRef(keys);
    self->values = Py_NewRef(values);
    self->queued_seconds = Py_NewRef(queued_seconds);
    self->error = Py_NewRef(error);
    self->done_seconds = done_seconds;
    self->unknown = PyLong_FromLong(-1);
    if (self->unknown == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Return what a list holds for a record, borrowed; what is no list is the same for all. */
static PyObject *
deliveries_cell(PyObject *list, Py_ssize_t index)
{
    if (!PyList_Check(list)) {
        return list;
    }
    /* A list may have become shorter. */
    if (index >= PyList_GET_SIZE(list)) {
        PyErr_SetString(PyExc_ValueError, "a column is shorter than the batch");
        return NULL;
    }
    return PyList_GET_ITEM(list, index);
}

/* Return error, latency, leader epoch and delivery count of the next record. */
static PyObject *
deliveries_details(const Deliveries *self, Py_ssize_t index)
{
    PyObject *queued = deliveries_cell(self->queued_seconds, index);
    if (queued == NULL) {
        return NULL;
    }
    const double queued_seconds = PyFloat_AsDouble(queued);
    if (queued_seconds == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    PyObject *details = PyTuple_New(DETAILS_SIZE);
    PyObject *latency = details == NULL ? NULL : PyFloat_FromDouble(self->done_seconds - queued_seconds);
    if (latency == NULL) {
        Py_XDECREF(details);
        return NULL;
    }
    PyTuple_SET_ITEM(details, 0, Py_NewRef(self->error));
    PyTuple_SET_ITEM(details, 1, latency);
    PyTuple_SET_ITEM(details, 2, Py_NewRef(self->unknown));
    PyTuple_SET_ITEM(details, 3, Py_NewRef(self->unknown));
    return details;
}

/* Return the offset of the next record. */
static PyObject *
deliveries_offset(const Deliveries *self, Py_ssize_t index)
{
    const long long first = PyLong_AsLongLong(self->offset);
    if (first < 0) {
        return PyErr_Occurred() ? NULL : Py_NewRef(self->offset);
    }
    if (first > LLONG_MAX - index) {
        PyErr_SetString(PyExc_OverflowError, "no record has such an offset");
        return NULL;
    }
    return PyLong_FromLongLong(first + index);
}

static PyObject *
deliveries_next(Deliveries *self)
{
    if (self->callbacks == NULL) {
        return NULL;
    }
    PyObject *callback = PyIter_Next(self->callbacks);
    if (callback == NULL) {
        return NULL;
    }
    /* At once: where memory is asked for, the collector of garbage may run whatever takes the next report. */
    const Py_ssize_t index = self->index++;
    PyObject *pair = NULL;
    Fields *message = bulk_new_message(self->type);
    if (message != NULL) {
        PyObject_GC_Track(message);
        message->source = Py_XNewRef(deliveries_cell(self->sources, index));
        message->timestamp_ms = Py_XNewRef(deliveries_cell(self->timestamps_ms, index));
        message->key = Py_XNewRef(deliveries_cell(self->keys, index));
        message->value = Py_XNewRef(deliveries_cell(self->values, index));
        message->headers = Py_NewRef(Py_None);
        /* In this order: a tuple that is made may have the collector of garbage run anything. */
        message->offset = deliveries_offset(self, index);
        message->details = PyErr_Occurred() ? NULL : deliveries_details(self, index);
        if (message->details != NULL &&
            bulk_check_tuple(message->source, SOURCE_SIZE_MIN, PY_SSIZE_T_MAX, "a source") == 0) {
            pair = PyTuple_Pack(2, callback, message);
        }
        Py_DECREF(message);
    }
    Py_DECREF(callback);
    return pair;
}

static PyType_Slot deliveries_slots[] = {
    {Py_tp_doc, "Makes the messages of the delivery reports of a batch, one after the other."},
    {Py_tp_traverse, deliveries_traverse},
    {Py_tp_clear, deliveries_clear},
    {Py_tp_dealloc, deliveries_dealloc},
    {Py_tp_new, deliveries_new},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, deliveries_next},
    {0, NULL},
};

static PyType_Spec deliveries_spec = {
    .name = "txnstore._bulk.Deliveries",
    .basicsize = sizeof(Deliveries),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = deliveries_slots,
};

int
bulk_add_reports(PyObject *module)
{
    PyTypeObject *deliveries_type = bulk_add_type(module, &deliveries_spec);
    Py_XDECREF(deliveries_type);
    return deliveries_type == NULL ? -1 : 0;
}

/* The bulk paths of the consumer in C: poll(), as long as records are at hand and nothing else is to be done.
 *
 * Whoever holds the consumer's lock opens the outlet over the messages of one batch, and closes it before anything
 * changes.  In between poll() takes the next message without the lock: one call of C that no thread comes into, but where
 * memory is asked for, which may run anything.  So the message is made first, and counts as taken only if nothing has
 * changed by then.
 */

#include "_bulk.h"
#include <stddef.h>
#include <structmember.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    Messages *messages;    /* NULL: closed */
    PyObject *events;      /* a deque: what is served before any record */
    long long last_offset; /* from which on messages are left to the long way */
    long clock_id;
    int is_timed; /* whether each poll() is noted, and the lease looked at */
    double polled_at;
    double lease_ends_at;
} Outlet;

static int
outlet_traverse(Outlet *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->messages);
    Py_VISIT(self->events);
    return 0;
}

static int
outlet_clear(Outlet *self)
{
    Py_CLEAR(self->messages);
    Py_CLEAR(self->events);
    return 0;
}

static void
outlet_dealloc(Outlet *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    outlet_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *
outlet_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"events", "clock_id", NULL};
    PyObject *events;
    long clock_id;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "Ol", names, &events, &clock_id) ||
        PyObject_Size(events) < 0) {
        return NULL;
    }
    Outlet *self = (Outlet *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->events = Py_NewRef(events);
        self->clock_id = clock_id;
        self->lease_ends_at = Py_HUGE_VAL;
    }
    return (PyObject *)self;
}

static PyObject *
outlet_open(Outlet *self, PyObject *arguments)
{
    PyObject *messages;
    long long last_offset;
    int is_timed;
    if (!PyArg_ParseTuple(arguments, "OLp:open", &messages, &last_offset, &is_timed)) {
        return NULL;
    }
    if (!bulk_are_messages(messages)) {
        PyErr_SetString(PyExc_TypeError, "what is handed out are Messages");
        return NULL;
    }
    self->last_offset = last_offset;
    self->is_timed = is_timed;
    Py_XSETREF(self->messages, (Messages *)Py_NewRef(messages));
    Py_RETURN_NONE;
}

static PyObject *
outlet_close(Outlet *self, PyObject *ignored)
{
    Py_CLEAR(self->messages);
    Py_RETURN_NONE;
}

/* Note that somebody polls, and return whether the records are the consumer's still. */
static int
outlet_is_in_time(Outlet *self)
{
    struct timespec now;
    if (clock_gettime((clockid_t)self->clock_id, &now) != 0) {
        return 0;
    }
    self->polled_at = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    return self->polled_at < self->lease_ends_at;
}

/* Return the next message; NULL without an error: the long way is to be taken. */
static PyObject *
outlet_next(Outlet *self)
{
    for (;;) {
        if (self->events == NULL || PyObject_Size(self->events) != 0) {
            return NULL;
        }
        Messages *messages = self->messages;
        if (messages == NULL) {
            return NULL;
        }
        const Py_ssize_t index = messages->index;
        const long long offset = index < messages->count ? bulk_message_offset(messages, index) : -1;
        if (offset < 0 || offset >= self->last_offset || (self->is_timed && !outlet_is_in_time(self))) {
            return NULL;
        }
        Py_INCREF(messages);
        PyObject *message = bulk_make_message(messages, index);
        /* An interrupt that has come by now would keep the message from the caller once this returns. */
        if (message != NULL && PyErr_CheckSignals() < 0) {
            Py_CLEAR(message);
        }
        const int is_as_before = self->messages == messages && messages->index == index;
        if (message != NULL && is_as_before) {
            messages->index = index + 1;
        }
        Py_DECREF(messages);
        if (message == NULL || is_as_before) {
            return message;
        }
        Py_DECREF(message);
    }
}

static PyMethodDef outlet_methods[] = {
    {"open", (PyCFunction)outlet_open, METH_VARARGS,
     "open($self, messages, last_offset, is_timed, /)\n--\n\n"
     "Hand these messages out, up to the one before that with the last offset."},
    {"close", (PyCFunction)outlet_close, METH_NOARGS,
     "close($self, /)\n--\n\nHand nothing out any more, until it is opened again."},
    {0},
};

static PyMemberDef outlet_members[] = {
    {"polled_at", T_DOUBLE, offsetof(Outlet, polled_at), 0, NULL},
    {"lease_ends_at", T_DOUBLE, offsetof(Outlet, lease_ends_at), 0, NULL},
    {0},
};

static PyType_Slot outlet_slots[] = {
    {Py_tp_doc, "What poll() hands out without the consumer's lock, and the times that it keeps."},
    {Py_tp_traverse, outlet_traverse},
    {Py_tp_clear, outlet_clear},
    {Py_tp_dealloc, outlet_dealloc},
    {Py_tp_new, outlet_new},
    {Py_tp_methods, outlet_methods},
    {Py_tp_members, outlet_members},
    {0, NULL},
};

static PyType_Spec outlet_spec = {
    .name = "txnstore._bulk.Outlet",
    .basicsize = sizeof(Outlet),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = outlet_slots,
};

/* --- poll() ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *outlet; /* NULL: none yet */
} Polls;

static int
polls_traverse(Polls *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->outlet);
    return 0;
}

static int
polls_clear(Polls *self)
{
    Py_CLEAR(self->outlet);
    return 0;
}

static void
polls_dealloc(Polls *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    polls_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int
polls_set_outlet(Polls *self, PyObject *given, void *closure)
{
    if (given == NULL || Py_TYPE(given)->tp_dealloc != (destructor)outlet_dealloc) {
        PyErr_SetString(PyExc_TypeError, "_outlet must be an Outlet");
        return -1;
    }
    Py_XSETREF(self->outlet, Py_NewRef(given));
    return 0;
}

static PyObject *
polls_get_outlet(Polls *self, void *closure)
{
    return self->outlet == NULL ? bulk_unset("_outlet") : Py_NewRef(self->outlet);
}

/* No doubt about it: the long way says what is wrong with any other. */
static int
is_plain_timeout(PyObject *timeout)
{
    if (PyFloat_CheckExact(timeout)) {
        return PyFloat_AS_DOUBLE(timeout) <= 1e6;
    }
    if (!PyLong_CheckExact(timeout)) {
        return 0;
    }
    int overflow;
    long seconds = PyLong_AsLongAndOverflow(timeout, &overflow);
    return overflow == 0 && seconds <= 1000000;
}

static PyObject *
polls_poll(Polls *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    if (self->outlet != NULL && (keywords == NULL || PyTuple_GET_SIZE(keywords) == 0) &&
        (count == 0 || (count == 1 && is_plain_timeout(arguments[0])))) {
        PyObject *outlet = Py_NewRef(self->outlet);
        PyObject *message = outlet_next((Outlet *)outlet);
        Py_DECREF(outlet);
        if (message != NULL || PyErr_Occurred()) {
            return message;
        }
    }
    PyObject *poll_at_length = PyObject_GetAttrString((PyObject *)self, "_poll_at_length");
    if (poll_at_length == NULL) {
        return NULL;
    }
    PyObject *message = PyObject_Vectorcall(poll_at_length, arguments, count, keywords);
    Py_DECREF(poll_at_length);
    if (message != NULL && message != Py_None && PyErr_CheckSignals() < 0) {
        /* As in outlet_next. */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *answer = PyObject_CallMethod((PyObject *)self, "_not_returned", "O", message);
        Py_CLEAR(message);
        if (answer == NULL) {
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(traceback);
        } else {
            Py_DECREF(answer);
            PyErr_Restore(type, value, traceback);
        }
    }
    return message;
}

static PyMethodDef polls_methods[] = {
    {"poll", (PyCFunction)(void (*)(void))polls_poll, METH_FASTCALL | METH_KEYWORDS,
     "poll($self, /, timeout=-1)\n--\n\n"
     "Return the next record or event, or None once the time is up; serve the callbacks that are due.\n\n"
     "What has gone wrong comes as a message whose `error()` is not None.\n\n"
     "Raises:\n"
     "    RuntimeError: the consumer is closed.\n"
     "    KafkaException: `_STATE`: the process was forked after the consumer had been made.\n"
     "    Exception: whatever a callback raised."},
    {0},
};

static PyGetSetDef polls_attributes[] = {
    {"_outlet", (getter)polls_get_outlet, (setter)polls_set_outlet, NULL, NULL},
    {0},
};

static PyType_Slot polls_slots[] = {
    {Py_tp_doc, "A consumer, as far as poll() goes."},
    {Py_tp_traverse, polls_traverse},
    {Py_tp_clear, polls_clear},
    {Py_tp_dealloc, polls_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_methods, polls_methods},
    {Py_tp_getset, polls_attributes},
    {0, NULL},
};

static PyType_Spec polls_spec = {
    .name = "txnstore._bulk.Polls",
    .basicsize = sizeof(Polls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = polls_slots,
};

int
bulk_add_poll(PyObject *module)
{
    PyTypeObject *outlet_type = bulk_add_type(module, &outlet_spec);
    Py_XDECREF(outlet_type);
    if (outlet_type == NULL) {
        return -1;
    }
    PyTypeObject *polls_type = bulk_add_type(module, &polls_spec);
    Py_XDECREF(polls_type);
    return polls_type == NULL ? -1 : 0;
}

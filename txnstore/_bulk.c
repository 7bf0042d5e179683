/* The bulk paths of the clients in C: what a message holds, and the module.
 *
 * `bulk.py` chooses between this and the same in Python.  What costs nothing for each record stands in Python alone, as
 * the class Message, on top of what is here (clients/model/message.py).
 */

#include "_bulk.h"

/* --- what a message holds --------------------------------------------------------------------------------------- */

static int
fields_traverse(Fields *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->source);
    Py_VISIT(self->details);
    Py_VISIT(self->offset);
    Py_VISIT(self->timestamp_ms);
    Py_VISIT(self->key);
    Py_VISIT(self->value);
    Py_VISIT(self->headers);
    return 0;
}

static int
fields_clear(Fields *self)
{
    Py_CLEAR(self->source);
    Py_CLEAR(self->details);
    /* First of a record: with them, all of it is taken to be there. */
    Py_CLEAR(self->headers);
    Py_CLEAR(self->offset);
    Py_CLEAR(self->timestamp_ms);
    Py_CLEAR(self->key);
    Py_CLEAR(self->value);
    return 0;
}

/* The memory of messages that are gone, with nothing in it, for the next ones.  It is common to all interpreters that can
 * import this: see `module_slots`. */
enum { SPARE_MAX = 512 };
static Fields *spare_messages[SPARE_MAX];
static int spare_count = 0;

static int
is_of_plain_layout(const PyTypeObject *type)
{
    return type->tp_basicsize == (Py_ssize_t)sizeof(Fields) && type->tp_dictoffset == 0 && type->tp_weaklistoffset == 0;
}

static void
fields_dealloc(Fields *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fields_clear(self);
    /* What had a finalizer is marked as finalized. */
    if (spare_count < SPARE_MAX && is_of_plain_layout(type) && type->tp_finalize == NULL) {
        spare_messages[spare_count++] = self;
    } else {
        type->tp_free((PyObject *)self);
    }
    Py_DECREF(type);
}

Fields *
bulk_new_message(PyTypeObject *message_type)
{
    if (spare_count > 0) {
        return (Fields *)PyObject_Init((PyObject *)spare_messages[--spare_count], message_type);
    }
    Fields *message = (Fields *)message_type->tp_alloc(message_type, 0);
    if (message != NULL) {
        PyObject_GC_UnTrack(message);
    }
    return message;
}

/* A message that a batch was made into holds bytes, numbers and text alone, so the collector of garbage has nothing to
 * look for in it.  From the first change on it may hold anything. */
static void
fields_track(Fields *self)
{
    if (!PyObject_GC_IsTracked((PyObject *)self)) {
        PyObject_GC_Track(self);
    }
}

PyObject *
bulk_unset(const char *name)
{
    PyErr_SetString(PyExc_AttributeError, name);
    return NULL;
}

int
bulk_check_tuple(PyObject *given, Py_ssize_t size_min, Py_ssize_t size_max, const char *name)
{
    if (given == NULL || !PyTuple_Check(given) || PyTuple_GET_SIZE(given) < size_min ||
        PyTuple_GET_SIZE(given) > size_max) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of %zd", name, size_min);
        return -1;
    }
    return 0;
}

/* Which of the two tuples an attribute is. */
static PyObject **
fields_tuple(Fields *self, void *is_source)
{
    return is_source != NULL ? &self->source : &self->details;
}

static PyObject *
fields_get_tuple(Fields *self, void *is_source)
{
    PyObject *held = *fields_tuple(self, is_source);
    return held == NULL ? bulk_unset(is_source != NULL ? "_source" : "_details") : Py_NewRef(held);
}

static int
fields_set_tuple(Fields *self, PyObject *given, void *is_source)
{
    if (is_source != NULL ? bulk_check_tuple(given, SOURCE_SIZE_MIN, PY_SSIZE_T_MAX, "_source") < 0
                          : bulk_check_tuple(given, DETAILS_SIZE, DETAILS_SIZE, "_details") < 0) {
        return -1;
    }
    fields_track(self);
    Py_XSETREF(*fields_tuple(self, is_source), Py_NewRef(given));
    return 0;
}

static PyObject *
made_number(PyObject *made, long long number)
{
    return made == NULL ? PyLong_FromLongLong(number) : Py_NewRef(made);
}

static PyObject *
fields_get_record(Fields *self, void *closure)
{
    if (self->headers == NULL) {
        return bulk_unset("_record");
    }
    /* First: where memory is asked for, the collector of garbage may run what sets another record. */
    PyObject *record = PyTuple_New(RECORD_SIZE);
    PyObject *offset = record == NULL ? NULL : made_number(self->offset, self->offset_number);
    PyObject *timestamp_ms = offset == NULL ? NULL : made_number(self->timestamp_ms, self->timestamp_number);
    if (timestamp_ms == NULL) {
        Py_XDECREF(offset);
        Py_XDECREF(record);
        return NULL;
    }
    PyTuple_SET_ITEM(record, 0, offset);
    PyTuple_SET_ITEM(record, 1, timestamp_ms);
    PyTuple_SET_ITEM(record, 2, Py_NewRef(self->key));
    PyTuple_SET_ITEM(record, 3, Py_NewRef(self->value));
    PyTuple_SET_ITEM(record, 4, Py_NewRef(self->headers));
    return record;
}

static int
fields_set_record(Fields *self, PyObject *given, void *closure)
{
    if (bulk_check_tuple(given, RECORD_SIZE, RECORD_SIZE, "_record") < 0) {
        return -1;
    }
    fields_track(self);
    PyObject **places[RECORD_SIZE] = {&self->offset, &self->timestamp_ms, &self->key, &self->value, &self->headers};
    PyObject *before[RECORD_SIZE];
    for (int place = 0; place < RECORD_SIZE; place++) {
        before[place] = *places[place];
        *places[place] = Py_NewRef(PyTuple_GET_ITEM(given, place));
    }
    /* Only now: what is let go may run anything, and is to find all of the record. */
    for (int place = 0; place < RECORD_SIZE; place++) {
        Py_XDECREF(before[place]);
    }
    return 0;
}

/* Return a number, or None if it is below zero: nothing is known. */
static PyObject *
known(PyObject *number)
{
    if (PyLong_CheckExact(number)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (value == -1 && PyErr_Occurred()) {
            return NULL;
        }
        return Py_NewRef(overflow < 0 || (overflow == 0 && value < 0) ? Py_None : number);
    }
    PyObject *zero = PyLong_FromLong(0);
    if (zero == NULL) {
        return NULL;
    }
    /* A comparison of its own may change the message that it stands in. */
    Py_INCREF(number);
    int is_known = PyObject_RichCompareBool(number, zero, Py_GE);
    Py_DECREF(zero);
    if (is_known <= 0) {
        Py_DECREF(number);
        return is_known < 0 ? NULL : Py_NewRef(Py_None);
    }
    return number;
}

static PyObject *
fields_topic(Fields *self, PyObject *ignored)
{
    return self->source == NULL ? bulk_unset("_source") : Py_NewRef(PyTuple_GET_ITEM(self->source, 0));
}

static PyObject *
fields_partition(Fields *self, PyObject *ignored)
{
    return self->source == NULL ? bulk_unset("_source") : known(PyTuple_GET_ITEM(self->source, 1));
}

static PyObject *
fields_offset(Fields *self, PyObject *ignored)
{
    if (self->offset != NULL) {
        return known(self->offset);
    }
    if (self->headers == NULL) {
        return bulk_unset("_record");
    }
    return self->offset_number < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(self->offset_number);
}

static PyObject *
fields_key(Fields *self, PyObject *ignored)
{
    return self->key == NULL ? bulk_unset("_record") : Py_NewRef(self->key);
}

static PyObject *
fields_value(Fields *self, PyObject *ignored)
{
    return self->value == NULL ? bulk_unset("_record") : Py_NewRef(self->value);
}

static PyObject *
fields_headers(Fields *self, PyObject *ignored)
{
    if (self->headers == NULL) {
        return bulk_unset("_record");
    }
    if (!PyTuple_Check(self->headers)) {
        return Py_NewRef(self->headers);
    }
    /* Held: where memory is asked for, the collector of garbage may run what sets others. */
    PyObject *held = Py_NewRef(self->headers);
    PyObject *headers = PySequence_List(held);
    Py_DECREF(held);
    if (headers != NULL && PyList_GET_SIZE(headers) == 0) {
        Py_SETREF(headers, Py_NewRef(Py_None));
    }
    return headers;
}

static PyObject *
fields_error(Fields *self, PyObject *ignored)
{
    return self->details == NULL ? bulk_unset("_details") : Py_NewRef(PyTuple_GET_ITEM(self->details, 0));
}

static PyObject *
fields_timestamp(Fields *self, PyObject *ignored)
{
    if (self->source == NULL || self->headers == NULL) {
        return bulk_unset(self->source == NULL ? "_source" : "_record");
    }
    /* First, as in fields_get_record. */
    PyObject *timestamp = PyTuple_New(2);
    PyObject *timestamp_ms = timestamp == NULL ? NULL : made_number(self->timestamp_ms, self->timestamp_number);
    if (timestamp_ms == NULL) {
        Py_XDECREF(timestamp);
        return NULL;
    }
    PyTuple_SET_ITEM(timestamp, 0, Py_NewRef(PyTuple_GET_ITEM(self->source, 2)));
    PyTuple_SET_ITEM(timestamp, 1, timestamp_ms);
    return timestamp;
}

static Py_ssize_t
fields_length(Fields *self)
{
    if (self->value == NULL) {
        bulk_unset("_record");
        return -1;
    }
    /* Held: a length of its own may change the message that it stands in. */
    PyObject *value = Py_NewRef(self->value);
    const Py_ssize_t length = value == Py_None ? 0 : PyObject_Size(value);
    Py_DECREF(value);
    return length;
}

/* What `inspect` reads the arguments from: none.  The texts are those of the methods in Python. */
#define SIGNATURE(name) name "($self, /)\n--\n\n"

static PyMethodDef fields_methods[] = {
    {"topic", (PyCFunction)fields_topic, METH_NOARGS,
     SIGNATURE("topic")
     "Return the topic's name, or None."},
    {"partition", (PyCFunction)fields_partition, METH_NOARGS,
     SIGNATURE("partition")
     "Return the partition's number, or None."},
    {"offset", (PyCFunction)fields_offset, METH_NOARGS,
     SIGNATURE("offset")
     "Return the offset, or None if there is none: the record was not delivered, or not from the log."},
    {"key", (PyCFunction)fields_key, METH_NOARGS,
     SIGNATURE("key")
     "Return the key, or what `set_key` has set; None and empty are not the same."},
    {"value", (PyCFunction)fields_value, METH_NOARGS,
     SIGNATURE("value")
     "Return the value, or what `set_value` has set; None and empty are not the same.\n\n"
     "The value of an event, whose `error()` is not None, is a text about it."},
    {"headers", (PyCFunction)fields_headers, METH_NOARGS,
     SIGNATURE("headers")
     "Return the headers in their order, duplicates included, or None if there are none.\n\n"
     "The message of a delivery report has no headers."},
    {"error", (PyCFunction)fields_error, METH_NOARGS,
     SIGNATURE("error")
     "Return what the message is about, or None: it is a record."},
    {"timestamp", (PyCFunction)fields_timestamp, METH_NOARGS,
     SIGNATURE("timestamp")
     "Return the kind of the timestamp, one of the constants `TIMESTAMP_...`, and milliseconds since 1970."},
    {0},
};

static PyGetSetDef fields_attributes[] = {
    {"_source", (getter)fields_get_tuple, (setter)fields_set_tuple, NULL, "_source"},
    {"_record", (getter)fields_get_record, (setter)fields_set_record, NULL, NULL},
    {"_details", (getter)fields_get_tuple, (setter)fields_set_tuple, NULL, NULL},
    {0},
};

static PyType_Slot fields_slots[] = {
    {Py_tp_doc, "What a message holds, and what is asked of very many."},
    {Py_tp_traverse, fields_traverse},
    {Py_tp_clear, fields_clear},
    {Py_tp_dealloc, fields_dealloc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_methods, fields_methods},
    {Py_tp_getset, fields_attributes},
    {Py_sq_length, fields_length},
    {0, NULL},
};

static PyType_Spec fields_spec = {
    .name = "txnstore._bulk.MessageFields",
    .basicsize = sizeof(Fields),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = fields_slots,
};

int
bulk_check_message_type(const State *state, PyTypeObject *message_type)
{
    /* With attributes of their own the messages might be part of a circle: see fields_track. */
    if (!PyType_IsSubtype(message_type, state->fields_type) || !is_of_plain_layout(message_type)) {
        PyErr_SetString(PyExc_TypeError, "the messages are to be MessageFields without further attributes");
        return -1;
    }
    return 0;
}

/* --- the module ------------------------------------------------------------------------------------------------- */

static PyObject *
ascends(PyObject *module, PyObject *given)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(given, &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const int32_t *numbers = buffer.buf;
    const Py_ssize_t count = buffer.len / (Py_ssize_t)sizeof(int32_t);
    int is_ascending = 1;
    for (Py_ssize_t index = 1; index < count; index++) {
        is_ascending &= numbers[index - 1] <= numbers[index];
    }
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(is_ascending);
}

/* The interpreter calls a method in C by a shorter way if it is one of the object's very class. */
static PyObject *
own_method(PyObject *module, PyObject *arguments)
{
    PyTypeObject *type;
    PyObject *method;
    if (!PyArg_ParseTuple(arguments, "O!O!:own_method", &PyType_Type, &type, &PyMethodDescr_Type, &method)) {
        return NULL;
    }
    if (!PyType_IsSubtype(type, PyDescr_TYPE(method))) {
        PyErr_SetString(PyExc_TypeError, "the method is not one of a base of the class");
        return NULL;
    }
    return PyDescr_NewMethod(type, ((PyMethodDescrObject *)method)->d_method);
}

static PyMethodDef functions[] = {
    {"own_method", own_method, METH_VARARGS,
     "own_method(kind, method, /)\n--\n\nReturn a method in C of a base of this class as one of its own."},
    {"ascends", ascends, METH_O,
     "ascends(numbers, /)\n--\n\nReturn whether no number of 32 bits is below the one before it."},
    {0},
};

PyTypeObject *
bulk_add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

static int
add_number(PyObject *module, const char *name, unsigned long value)
{
    PyObject *number = PyLong_FromUnsignedLong(value);
    const int added = number == NULL ? -1 : PyModule_AddObjectRef(module, name, number);
    Py_XDECREF(number);
    return added;
}

static int
module_execute(PyObject *module)
{
    if (add_number(module, "SOURCES", TXNSTORE_SOURCES) < 0 || add_number(module, "INTERFACE", TXNSTORE_INTERFACE) < 0) {
        return -1;
    }
    State *state = PyModule_GetState(module);
    state->fields_type = bulk_add_type(module, &fields_spec);
    if (state->fields_type == NULL) {
        return -1;
    }
    if (bulk_add_messages(module) < 0 || bulk_add_checksum(module) < 0 || bulk_add_poll(module) < 0 ||
        bulk_add_pack(module) < 0 || bulk_add_produce(module, state) < 0) {
        return -1;
    }
    return bulk_add_reports(module);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_VISIT(state->fields_type);
        Py_VISIT(state->queue_type);
        Py_VISIT(state->accumulator_type);
    }
    return 0;
}

static int
module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (state != NULL) {
        Py_CLEAR(state->fields_type);
        Py_CLEAR(state->queue_type);
        Py_CLEAR(state->accumulator_type);
    }
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_execute},
#if PY_VERSION_HEX >= 0x030C0000
    /* Those with a lock or with memory of their own do without. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "txnstore._bulk",
    .m_doc = "The bulk paths of the clients in C.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__bulk(void)
{
    return PyModuleDef_Init(&module_definition);
}

/* The bulk paths of the clients in C: what a message holds, and the messages of a record batch.
 *
 * `bulk.py` chooses between this and the same in Python.  What costs nothing for each record stands in Python alone: the
 * class Message, on top of what is here (clients/model/message.py), and the columns of a batch, which are unpacked and
 * checked before they come here (log/codec.py, log/columns.py).  Each access is checked here all the same.
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
    Py_CLEAR(self->offset);
    Py_CLEAR(self->timestamp_ms);
    Py_CLEAR(self->key);
    Py_CLEAR(self->value);
    Py_CLEAR(self->headers);
    return 0;
}

static void
fields_dealloc(Fields *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fields_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
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
fields_get_record(Fields *self, void *closure)
{
    if (self->offset == NULL) {
        return bulk_unset("_record");
    }
    /* First: where memory is asked for, the collector of garbage may run what sets another record. */
    PyObject *record = PyTuple_New(RECORD_SIZE);
    if (record != NULL) {
        PyTuple_SET_ITEM(record, 0, Py_NewRef(self->offset));
        PyTuple_SET_ITEM(record, 1, Py_NewRef(self->timestamp_ms));
        PyTuple_SET_ITEM(record, 2, Py_NewRef(self->key));
        PyTuple_SET_ITEM(record, 3, Py_NewRef(self->value));
        PyTuple_SET_ITEM(record, 4, Py_NewRef(self->headers));
    }
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
    return self->offset == NULL ? bulk_unset("_record") : known(self->offset);
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
    if (self->source == NULL || self->timestamp_ms == NULL) {
        return bulk_unset(self->source == NULL ? "_source" : "_record");
    }
    /* First, as in fields_get_record. */
    PyObject *timestamp = PyTuple_New(2);
    if (timestamp != NULL) {
        PyTuple_SET_ITEM(timestamp, 0, Py_NewRef(PyTuple_GET_ITEM(self->source, 2)));
        PyTuple_SET_ITEM(timestamp, 1, Py_NewRef(self->timestamp_ms));
    }
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

/* --- the messages of a batch ------------------------------------------------------------------------------------ */

/* Take a column: None, or (data, positions, indexes of nulls). */
static int
column_init(Column *self, PyObject *given, Py_ssize_t count)
{
    PyObject *data, *positions, *nulls;
    if (given == Py_None) {
        return 0;
    }
    if (!PyArg_ParseTuple(given, "SOO!;a column is None or (data, positions, nulls)", &data, &positions, &PyTuple_Type,
                          &nulls)) {
        return -1;
    }
    if (PyObject_GetBuffer(positions, &self->positions, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    if (self->positions.len != (count + 1) * (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "the positions are not one more than there are records");
        return -1;
    }
    self->data = Py_NewRef(data);
    if (PyTuple_GET_SIZE(nulls) == 0) {
        return 0;
    }
    self->is_null = PyMem_Calloc(count, 1);
    if (self->is_null == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(nulls); place++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(nulls, place));
        if (index == -1 && PyErr_Occurred()) {
            return -1;
        }
        if (index < 0 || index >= count) {
            PyErr_SetString(PyExc_ValueError, "the nulls name records that are not there");
            return -1;
        }
        self->is_null[index] = 1;
    }
    return 0;
}

static void
column_clear(Column *self)
{
    Py_CLEAR(self->data);
    PyBuffer_Release(&self->positions);
    PyMem_Free(self->is_null);
    self->is_null = NULL;
}

/* Return bytes or None; `index` is that of a record. */
static PyObject *
column_cell(const Column *self, Py_ssize_t index)
{
    if (self->data == NULL || (self->is_null != NULL && self->is_null[index])) {
        return Py_NewRef(Py_None);
    }
    /* Whoever holds the buffer could still write to it. */
    const int32_t *positions = self->positions.buf;
    const int32_t start = positions[index], end = positions[index + 1];
    if (start < 0 || end < start || end > PyBytes_GET_SIZE(self->data)) {
        PyErr_SetString(PyExc_ValueError, "the positions do not ascend within the data");
        return NULL;
    }
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self->data) + start, end - start);
}

/* Return what stands in a list that may be None; then it is `otherwise`. */
static PyObject *
list_cell(PyObject *list, Py_ssize_t index, PyObject *otherwise)
{
    if (list == Py_None) {
        return Py_NewRef(otherwise);
    }
    /* A list may have become shorter. */
    if (index >= PyList_GET_SIZE(list)) {
        PyErr_SetString(PyExc_ValueError, "a column is shorter than the batch");
        return NULL;
    }
    return Py_NewRef(PyList_GET_ITEM(list, index));
}

static int
messages_traverse(Messages *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->type);
    Py_VISIT(self->source);
    Py_VISIT(self->details);
    Py_VISIT(self->offsets);
    Py_VISIT(self->timestamps_ms);
    Py_VISIT(self->timestamp_ms);
    Py_VISIT(self->headers);
    Py_VISIT(self->no_headers);
    Py_VISIT(self->keys.positions.obj);
    Py_VISIT(self->values.positions.obj);
    return 0;
}

static int
messages_clear(Messages *self)
{
    /* What is left of it has come to its end. */
    self->index = self->count = 0;
    Py_CLEAR(self->type);
    Py_CLEAR(self->source);
    Py_CLEAR(self->details);
    Py_CLEAR(self->offsets);
    Py_CLEAR(self->timestamps_ms);
    Py_CLEAR(self->timestamp_ms);
    Py_CLEAR(self->headers);
    Py_CLEAR(self->no_headers);
    column_clear(&self->keys);
    column_clear(&self->values);
    return 0;
}

static void
messages_dealloc(Messages *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    messages_clear(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int
is_list_or_none(PyObject *given)
{
    return given == Py_None || PyList_Check(given);
}

int
bulk_check_message_type(const State *state, PyTypeObject *message_type)
{
    /* With attributes of their own the messages might be part of a circle: see fields_track. */
    if (!PyType_IsSubtype(message_type, state->fields_type) ||
        message_type->tp_basicsize != (Py_ssize_t)sizeof(Fields) || message_type->tp_dictoffset != 0) {
        PyErr_SetString(PyExc_TypeError, "the messages are to be MessageFields without further attributes");
        return -1;
    }
    return 0;
}

static PyObject *
messages_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"message_type", "source",       "details",       "index", "count",  "first_offset", "offsets",
                            "timestamp_ms", "timestamps_ms", "keys",          "values", "headers", NULL};
    PyTypeObject *message_type;
    PyObject *source, *details, *offsets, *timestamp_ms, *timestamps_ms, *keys, *values, *headers;
    Py_ssize_t index, count;
    long long first_offset;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!OOnnLOOOOOO", names, &PyType_Type, &message_type, &source,
                                     &details, &index, &count, &first_offset, &offsets, &timestamp_ms, &timestamps_ms,
                                     &keys, &values, &headers)) {
        return NULL;
    }
    const State *state = PyType_GetModuleState(type);
    if (state == NULL) {
        return NULL;
    }
    if (bulk_check_message_type(state, message_type) < 0) {
        return NULL;
    }
    if (bulk_check_tuple(source, SOURCE_SIZE_MIN, PY_SSIZE_T_MAX, "source") < 0 ||
        bulk_check_tuple(details, DETAILS_SIZE, DETAILS_SIZE, "details") < 0) {
        return NULL;
    }
    if (index < 0 || count < 1 || count > INT32_MAX || first_offset < 0 || first_offset > LLONG_MAX - (count - 1)) {
        PyErr_SetString(PyExc_ValueError, "no batch has so many records, or such offsets");
        return NULL;
    }
    if (!is_list_or_none(offsets) || !is_list_or_none(timestamps_ms) || !is_list_or_none(headers)) {
        PyErr_SetString(PyExc_TypeError, "offsets, timestamps and headers are a list or None each");
        return NULL;
    }
    Messages *self = (Messages *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->type = (PyTypeObject *)Py_NewRef(message_type);
    self->source = Py_NewRef(source);
    self->details = Py_NewRef(details);
    self->offsets = Py_NewRef(offsets);
    self->timestamps_ms = Py_NewRef(timestamps_ms);
    self->timestamp_ms = Py_NewRef(timestamp_ms);
    self->headers = Py_NewRef(headers);
    self->no_headers = PyTuple_New(0);
    self->first_offset = first_offset;
    self->begin = self->index = index;
    self->count = count;
    if (self->no_headers == NULL || column_init(&self->keys, keys, count) < 0 ||
        column_init(&self->values, values, count) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

long long
bulk_message_offset(const Messages *self, Py_ssize_t index)
{
    if (self->offsets == Py_None) {
        return self->first_offset + index;
    }
    PyObject *offset = index < PyList_GET_SIZE(self->offsets) ? PyList_GET_ITEM(self->offsets, index) : NULL;
    int overflow;
    return offset != NULL && PyLong_CheckExact(offset) ? PyLong_AsLongLongAndOverflow(offset, &overflow) : -1;
}

PyObject *
bulk_make_message(Messages *self, Py_ssize_t index)
{
    Fields *message = (Fields *)self->type->tp_alloc(self->type, 0);
    if (message == NULL) {
        return NULL;
    }
    /* See fields_track. */
    PyObject_GC_UnTrack(message);
    message->source = Py_NewRef(self->source);
    message->details = Py_NewRef(self->details);
    message->offset = self->offsets == Py_None ? PyLong_FromLongLong(self->first_offset + index)
                                               : list_cell(self->offsets, index, NULL);
    message->timestamp_ms = list_cell(self->timestamps_ms, index, self->timestamp_ms);
    message->key = column_cell(&self->keys, index);
    message->value = column_cell(&self->values, index);
    message->headers = list_cell(self->headers, index, self->no_headers);
    if (message->offset == NULL || message->timestamp_ms == NULL || message->key == NULL || message->value == NULL ||
        message->headers == NULL) {
        Py_DECREF(message);
        return NULL;
    }
    return (PyObject *)message;
}

static PyObject *
messages_next(Messages *self)
{
    for (;;) {
        const Py_ssize_t index = self->index;
        if (index >= self->count) {
            return NULL;
        }
        PyObject *message = bulk_make_message(self, index);
        if (message == NULL) {
            return NULL;
        }
        /* Where memory is asked for, the collector of garbage may run whatever takes this one. */
        if (self->index == index) {
            self->index = index + 1;
            return message;
        }
        Py_DECREF(message);
    }
}

int
bulk_are_messages(PyObject *given)
{
    return Py_TYPE(given)->tp_iternext == (iternextfunc)messages_next;
}

static PyObject *
messages_taken_offset(Messages *self, void *closure)
{
    return PyLong_FromLongLong(self->index > self->begin ? bulk_message_offset(self, self->index - 1) : -1);
}

static PyGetSetDef messages_attributes[] = {
    {"taken_offset", (getter)messages_taken_offset, NULL, "The offset of the last message that was taken, or -1.", NULL},
    {0},
};

static PyType_Slot messages_slots[] = {
    {Py_tp_doc, "Makes the messages of a record batch, one after the other."},
    {Py_tp_traverse, messages_traverse},
    {Py_tp_clear, messages_clear},
    {Py_tp_dealloc, messages_dealloc},
    {Py_tp_new, messages_new},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, messages_next},
    {Py_tp_getset, messages_attributes},
    {0, NULL},
};

static PyType_Spec messages_spec = {
    .name = "txnstore._bulk.Messages",
    .basicsize = sizeof(Messages),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = messages_slots,
};

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

static PyMethodDef functions[] = {
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
    PyTypeObject *messages_type = bulk_add_type(module, &messages_spec);
    Py_XDECREF(messages_type);
    if (messages_type == NULL || bulk_add_poll(module) < 0 || bulk_add_pack(module) < 0 ||
        bulk_add_produce(module, state) < 0) {
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

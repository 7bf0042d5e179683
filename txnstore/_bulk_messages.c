/* The bulk paths of the consumer in C: the messages of a record batch.
 *
 * The columns are unpacked and checked before they come here (log/codec.py, log/columns.py).  Each access is checked here
 * all the same.
 */

#include "_bulk.h"
#include <string.h>

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
    const int are_packed = PyBytes_CheckExact(timestamps_ms);
    if (!is_list_or_none(offsets) || !(are_packed || is_list_or_none(timestamps_ms)) || !is_list_or_none(headers)) {
        PyErr_SetString(PyExc_TypeError, "offsets, timestamps and headers are a list or None each");
        return NULL;
    }
    if (are_packed && PyBytes_GET_SIZE(timestamps_ms) != count * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "there are not as many timestamps as records");
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
    /* The collector of garbage is not told of it: see fields_track. */
    Fields *message = bulk_new_message(self->type);
    if (message == NULL) {
        return NULL;
    }
    message->source = Py_NewRef(self->source);
    message->details = Py_NewRef(self->details);
    message->offset_number = self->first_offset + index;
    message->offset = self->offsets == Py_None ? NULL : list_cell(self->offsets, index, NULL);
    const int has_number = PyBytes_CheckExact(self->timestamps_ms);
    if (has_number) {
        int64_t timestamp_ms;
        memcpy(&timestamp_ms, PyBytes_AS_STRING(self->timestamps_ms) + index * sizeof(timestamp_ms), sizeof(timestamp_ms));
        message->timestamp_number = timestamp_ms;
    } else {
        message->timestamp_ms = list_cell(self->timestamps_ms, index, self->timestamp_ms);
    }
    message->key = column_cell(&self->keys, index);
    message->value = column_cell(&self->values, index);
    message->headers = list_cell(self->headers, index, self->no_headers);
    if ((message->offset == NULL && self->offsets != Py_None) || (message->timestamp_ms == NULL && !has_number) ||
        message->key == NULL || message->value == NULL || message->headers == NULL) {
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

int
bulk_add_messages(PyObject *module)
{
    PyTypeObject *messages_type = bulk_add_type(module, &messages_spec);
    Py_XDECREF(messages_type);
    return messages_type == NULL ? -1 : 0;
}

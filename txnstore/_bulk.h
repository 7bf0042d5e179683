/* What the files in C have in common: what a message holds, and what the module remembers. */

#ifndef TXNSTORE_BULK_H
#define TXNSTORE_BULK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef Py_GIL_DISABLED
#error "what is here relies on the global interpreter lock"
#endif

#include <stdint.h>

/* NULL is what an attribute is that was never set. */
typedef struct {
    PyObject_HEAD
    PyObject *source;  /* a tuple: topic, partition, kind of timestamp, and what else its maker put there */
    PyObject *details; /* a tuple: error, latency, leader epoch, delivery count */
    PyObject *offset;  /* of the five that make `_record`, set if `headers` is; NULL then: it is offset_number */
    PyObject *timestamp_ms; /* likewise: it is timestamp_number */
    PyObject *key;
    PyObject *value;
    PyObject *headers;
    long long offset_number; /* made into an object when it is asked for, as few are */
    long long timestamp_number;
} Fields;

enum { SOURCE_SIZE_MIN = 3, DETAILS_SIZE = 4, RECORD_SIZE = 5 };

/* The keys or the values of a batch. */
typedef struct {
    PyObject *data;      /* bytes, or NULL: all of them are null */
    Py_buffer positions; /* int32_t: where each begins, and where the last one ends */
    char *is_null;       /* for each; NULL: none is */
} Column;

/* An iterator that makes each message when it is asked for it. */
typedef struct {
    PyObject_HEAD
    PyTypeObject *type; /* of the messages */
    PyObject *source;   /* what all of them have in common */
    PyObject *details;
    PyObject *offsets;       /* a list, or None: they follow each other from first_offset on */
    PyObject *timestamps_ms; /* a list; or bytes, an int64_t for each; or None: all have timestamp_ms */
    PyObject *timestamp_ms;
    PyObject *headers; /* a list, or None: none has any */
    PyObject *no_headers;
    Column keys;
    Column values;
    long long first_offset;
    Py_ssize_t begin; /* the index of the first record */
    Py_ssize_t index; /* of the next one */
    Py_ssize_t count;
} Messages;

typedef struct {
    PyTypeObject *fields_type;
    PyTypeObject *queue_type;
    PyTypeObject *accumulator_type;
} State;

/* Which sources this was built of, and which interface they have for the Python files, as build_bulk.py says and bulk.py
 * asks; 0: nobody knows. */
#ifndef TXNSTORE_SOURCES
#define TXNSTORE_SOURCES 0
#endif
#ifndef TXNSTORE_INTERFACE
#define TXNSTORE_INTERFACE 0
#endif

/* Of _bulk.c: refuse what is no tuple of such a size; whether a type makes messages with no attributes of their own; make
 * an empty message of such a type, of which the collector of garbage does not know yet; the error of an attribute that was
 * never set; make a type and add it to the module. */
int bulk_check_tuple(PyObject *given, Py_ssize_t size_min, Py_ssize_t size_max, const char *name);
int bulk_check_message_type(const State *state, PyTypeObject *message_type);
Fields *bulk_new_message(PyTypeObject *message_type);
PyObject *bulk_unset(const char *name);
PyTypeObject *bulk_add_type(PyObject *module, PyType_Spec *spec);

/* Of _bulk_messages.c: whether they are Messages; the offset of a message, -1 if it cannot be told; the message of a
 * record that is there. */
int bulk_are_messages(PyObject *given);
long long bulk_message_offset(const Messages *self, Py_ssize_t index);
PyObject *bulk_make_message(Messages *self, Py_ssize_t index);

/* Of the file of that name each: add what it has to the module. */
int bulk_add_checksum(PyObject *module);
int bulk_add_messages(PyObject *module);
int bulk_add_pack(PyObject *module);
int bulk_add_poll(PyObject *module);
int bulk_add_produce(PyObject *module, State *state);
int bulk_add_reports(PyObject *module);

#endif

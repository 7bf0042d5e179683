/* The bulk paths of the log in C: the columns that a record batch is packed into, and their numbers as they are read.
 *
 * Each function returns None of what is not as it nearly always is, lists of exactly bytes, None and integers of 64 bits,
 * and texts as they are packed; Python goes on with that, or says what is wrong with it.  No code of Python runs in
 * between, so no list changes meanwhile.
 */

#include "_bulk.h"
#include <limits.h>
#include <string.h>

/* Return 1 with an integer of 64 bits, or 0: it is none. */
static int
integer_of(PyObject *given, long long *number)
{
    int overflow;
    if (!PyLong_CheckExact(given)) {
        return 0;
    }
    *number = PyLong_AsLongLongAndOverflow(given, &overflow);
    return overflow == 0;
}

/* Return 1 with the smallest and the largest number of a list, or 0: it is no list of integers, or has none. */
static int
bounds_of(PyObject *list, long long *smallest, long long *largest)
{
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) == 0 || !integer_of(PyList_GET_ITEM(list, 0), smallest)) {
        return 0;
    }
    *largest = *smallest;
    for (Py_ssize_t index = 1; index < PyList_GET_SIZE(list); index++) {
        /* Most are the same object as the one before. */
        if (PyList_GET_ITEM(list, index) != PyList_GET_ITEM(list, index - 1)) {
            long long number;
            if (!integer_of(PyList_GET_ITEM(list, index), &number)) {
                return 0;
            }
            *smallest = number < *smallest ? number : *smallest;
            *largest = number > *largest ? number : *largest;
        }
    }
    return 1;
}

static PyObject *
bounds(PyObject *module, PyObject *numbers)
{
    long long smallest, largest;
    if (!bounds_of(numbers, &smallest, &largest)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("LL", smallest, largest);
}

/* --- integers ------------------------------------------------------------------------------------------------------- */

/* Return 1 with a difference, or 0: it does not fit. */
static int
difference_of(long long number, long long base, long long *difference)
{
    if (base < 0 ? number > LLONG_MAX + base : number < LLONG_MIN + base) {
        return 0;
    }
    *difference = number - base;
    return 1;
}

/* Write the digits of a number in front of `end`, its sign before them, and return where they begin. */
static char *
write_before(char *end, long long number)
{
    unsigned long long rest = number < 0 ? 0ULL - (unsigned long long)number : (unsigned long long)number;
    do {
        *--end = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest != 0);
    if (number < 0) {
        *--end = '-';
    }
    return end;
}

enum { DIGITS_MAX = 20 };

static Py_ssize_t
width_of(long long number)
{
    char digits[DIGITS_MAX];
    return digits + DIGITS_MAX - write_before(digits + DIGITS_MAX, number);
}

static PyObject *
pack_differences(PyObject *module, PyObject *const *given, Py_ssize_t given_count)
{
    if (given_count != 2) {
        PyErr_Format(PyExc_TypeError, "pack_differences takes 2 arguments, not %zd", given_count);
        return NULL;
    }
    PyObject *numbers = given[0];
    long long smallest, largest, base;
    if (!bounds_of(numbers, &smallest, &largest) || !integer_of(given[1], &base) ||
        !difference_of(smallest, base, &smallest) || !difference_of(largest, base, &largest)) {
        Py_RETURN_NONE;
    }
    const Py_ssize_t count = PyList_GET_SIZE(numbers);
    const Py_ssize_t of_smallest = width_of(smallest), of_largest = width_of(largest);
    const Py_ssize_t width = of_smallest > of_largest ? of_smallest : of_largest;
    if (count > (PY_SSIZE_T_MAX - 1) / (width + 1)) {
        Py_RETURN_NONE;
    }
    PyObject *text = PyUnicode_New(count * (width + 1) + 1, 127);
    if (text == NULL) {
        return NULL;
    }
    /* Every number, with what stands before it: the bracket or a comma. */
    char *place = (char *)PyUnicode_1BYTE_DATA(text);
    for (Py_ssize_t index = 0; index < count; index++, place += width + 1) {
        if (index > 0 && PyList_GET_ITEM(numbers, index) == PyList_GET_ITEM(numbers, index - 1)) {
            memcpy(place, place - (width + 1), (size_t)(width + 1));
        } else {
            long long number = 0;
            integer_of(PyList_GET_ITEM(numbers, index), &number);
            const char *first = write_before(place + width + 1, number - base);
            memset(place, ' ', (size_t)(first - place));
        }
        *place = index == 0 ? '[' : ',';
    }
    *place = ']';
    return text;
}

/* Read one number, as JSON has it, with spaces in front; return what follows it, or NULL: it is none, or has more digits
 * than surely fit 64 bits.  The text ends with NUL, which is neither space nor digit. */
static const char *
read_number(const char *place, long long *number)
{
    enum { DIGITS_THAT_FIT = 18 };
    while (*place == ' ') {
        place++;
    }
    const int is_negative = *place == '-';
    const char *first = place + is_negative, *end = first;
    long long found = 0;
    while (*end >= '0' && *end <= '9' && end - first < DIGITS_THAT_FIT) {
        found = 10 * found + (*end++ - '0');
    }
    if (end == first || (*end >= '0' && *end <= '9') || (*first == '0' && end - first > 1)) {
        return NULL;
    }
    *number = is_negative ? -found : found;
    return end;
}

static PyObject *
unpack_sums(PyObject *module, PyObject *const *given, Py_ssize_t given_count)
{
    if (given_count != 3) {
        PyErr_Format(PyExc_TypeError, "unpack_sums takes 3 arguments, not %zd", given_count);
        return NULL;
    }
    PyObject *text = given[0];
    long long base, count;
    if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text) ||
        !integer_of(given[1], &base) || !integer_of(given[2], &count) || count < 1 ||
        count > PyUnicode_GET_LENGTH(text) / 2) {
        Py_RETURN_NONE;
    }
    PyObject *sums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * (Py_ssize_t)sizeof(int64_t));
    if (sums == NULL) {
        return NULL;
    }
    const char *place = (const char *)PyUnicode_1BYTE_DATA(text), *end = place + PyUnicode_GET_LENGTH(text);
    char *sum_place = PyBytes_AS_STRING(sums);
    int is_so = *place == '[';
    for (long long index = 0; is_so && index < count; index++, sum_place += sizeof(int64_t)) {
        long long number = 0;
        place = read_number(place + 1, &number);
        is_so = place != NULL && *place == (index < count - 1 ? ',' : ']') &&
                (base < 0 ? number >= LLONG_MIN - base : number <= LLONG_MAX - base);
        if (is_so) {
            const int64_t sum = base + number;
            memcpy(sum_place, &sum, sizeof(sum));
        }
    }
    if (!is_so || place + 1 != end) {
        Py_DECREF(sums);
        Py_RETURN_NONE;
    }
    return sums;
}

/* --- byte strings --------------------------------------------------------------------------------------------------- */

/* Write a position, the first byte the highest. */
static char *
write_position(char *place, Py_ssize_t position)
{
    for (int shift = 24; shift >= 0; shift -= 8) {
        *place++ = (char)((unsigned long)position >> shift & 0xff);
    }
    return place;
}

static PyObject *
pack_cells(PyObject *module, PyObject *const *given, Py_ssize_t given_count)
{
    if (given_count != 2) {
        PyErr_Format(PyExc_TypeError, "pack_cells takes 2 arguments, not %zd", given_count);
        return NULL;
    }
    PyObject *cells = given[0];
    long long size_bytes_max;
    if (!PyList_CheckExact(cells) || !integer_of(given[1], &size_bytes_max) || size_bytes_max > INT32_MAX) {
        Py_RETURN_NONE;
    }
    /* Only here may the collector of garbage run anything: it has nothing to do for bytes and numbers. */
    PyObject *nulls = PyList_New(0);
    if (nulls == NULL) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(cells);
    PyObject *positions = NULL, *data = NULL, *packed = NULL;
    Py_ssize_t size_bytes = 0, null_count = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *cell = PyList_GET_ITEM(cells, index);
        if (cell == Py_None) {
            null_count += 1;
        } else if (PyBytes_CheckExact(cell) && PyBytes_GET_SIZE(cell) <= size_bytes_max - size_bytes) {
            size_bytes += PyBytes_GET_SIZE(cell);
        } else {
            null_count = count; /* as good as nothing */
            break;
        }
    }
    if (null_count == count) {
        packed = Py_NewRef(Py_None);
        goto done;
    }
    positions = PyBytes_FromStringAndSize(NULL, (count + 1) * (Py_ssize_t)sizeof(int32_t));
    data = PyBytes_FromStringAndSize(NULL, size_bytes);
    if (positions == NULL || data == NULL) {
        goto done;
    }
    char *place = PyBytes_AS_STRING(positions), *content = PyBytes_AS_STRING(data);
    const char *begin = content;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *cell = PyList_GET_ITEM(cells, index);
        place = write_position(place, content - begin);
        if (cell == Py_None) {
            PyObject *number = PyLong_FromSsize_t(index);
            const int failed = number == NULL || PyList_Append(nulls, number) < 0;
            Py_XDECREF(number);
            if (failed) {
                goto done;
            }
        } else {
            memcpy(content, PyBytes_AS_STRING(cell), (size_t)PyBytes_GET_SIZE(cell));
            content += PyBytes_GET_SIZE(cell);
        }
    }
    write_position(place, content - begin);
    packed = PyTuple_Pack(3, positions, nulls, data);
done:
    Py_XDECREF(nulls);
    Py_XDECREF(positions);
    Py_XDECREF(data);
    return packed;
}

/* --- the size of a batch -------------------------------------------------------------------------------------------- */

/* Return how many cells of a list are null, or -1: it is no such list. */
static Py_ssize_t
count_nulls(PyObject *list, Py_ssize_t count)
{
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != count) {
        return -1;
    }
    Py_ssize_t nulls = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        nulls += PyList_GET_ITEM(list, index) == Py_None;
    }
    return nulls;
}

static PyObject *
survey(PyObject *module, PyObject *const *given, Py_ssize_t given_count)
{
    if (given_count != 5) {
        PyErr_Format(PyExc_TypeError, "survey takes 5 arguments, not %zd", given_count);
        return NULL;
    }
    PyObject *sizes_bytes = given[0];
    long long earliest_ms, latest_ms, content_bytes = 0;
    if (!PyList_CheckExact(sizes_bytes) || !bounds_of(given[3], &earliest_ms, &latest_ms)) {
        Py_RETURN_NONE;
    }
    const Py_ssize_t count = PyList_GET_SIZE(sizes_bytes);
    const Py_ssize_t null_keys = count_nulls(given[1], count), null_values = count_nulls(given[2], count);
    const Py_ssize_t headerless = count_nulls(given[4], count);
    if (null_keys < 0 || null_values < 0 || headerless < 0 || PyList_GET_SIZE(given[3]) != count) {
        Py_RETURN_NONE;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        long long size_bytes;
        if (!integer_of(PyList_GET_ITEM(sizes_bytes, index), &size_bytes) || size_bytes < 0 ||
            size_bytes > LLONG_MAX - content_bytes) {
            Py_RETURN_NONE;
        }
        content_bytes += size_bytes;
    }
    return Py_BuildValue("LnnLLO", content_bytes, null_keys, null_values, earliest_ms, latest_ms,
                         headerless < count ? Py_True : Py_False);
}

#define FUNCTION(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef pack_functions[] = {
    {"bounds", bounds, METH_O,
     "bounds(numbers, /)\n--\n\nReturn the smallest and the largest of these numbers."},
    {"pack_differences", FUNCTION(pack_differences),
     "pack_differences(numbers, base, /)\n--\n\n"
     "Return how much larger each number is than `base` as a flat JSON array of numbers of one width."},
    {"unpack_sums", FUNCTION(unpack_sums),
     "unpack_sums(text, base, count, /)\n--\n\n"
     "Return `base` plus each of the `count` numbers of such an array, as this machine has numbers of 64 bits."},
    {"pack_cells", FUNCTION(pack_cells),
     "pack_cells(cells, size_bytes_max, /)\n--\n\n"
     "Return the positions of keys or values as a column, the indexes of those that are null, and what they hold."},
    {"survey", FUNCTION(survey),
     "survey(sizes_bytes, keys, values, timestamps_ms, packed_headers, /)\n--\n\n"
     "Return what all sizes come to, how many keys and values are null, the first and the last moment, and whether a "
     "record has headers."},
    {0},
};

int
bulk_add_pack(PyObject *module)
{
    return PyModule_AddFunctions(module, pack_functions);
}

/* The checksum of record batches in C: CRC-32 as zlib has it, by the processor's multiplication of polynomials.
 *
 * A checksum is what is left of all bits, as one long polynomial, divided by the checksum's own.  So bits that stand far
 * in front may be replaced by their remainder: what two halves of 16 bytes times a power of x come to is added to 16
 * bytes further behind, until no more than 16 are left, whose checksum takes a table.  Powers and table are calculated
 * when the module is loaded.  Where the processor does not multiply so there is no such function, and zlib's is called.
 */

#include "_bulk.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#define BY_PRODUCTS __attribute__((target("pclmul,sse2")))

/* The polynomial of zlib, its lowest bit the highest power; x to the power of 0 in that order. */
static const uint32_t POLYNOMIAL = 0xEDB88320, ONE = 0x80000000;

/* Bytes of a register, and those that are taken in at once. */
enum { BLOCK_BYTES = 16, STEP_BYTES = 4 * BLOCK_BYTES };
/* From how many bytes on other threads may run meanwhile: to get the lock back may take as long as a few megabytes. */
enum { UNLOCKED_BYTES = 1 << 20 };

static uint32_t remainders[256];
/* The remainders of the powers of x that bring 16 bytes to the place a step, or a block, behind: of both their halves. */
static uint64_t to_next_step[2], to_next_block[2];

static uint32_t
times_x(uint32_t polynomial)
{
    return (polynomial >> 1) ^ (polynomial & 1 ? POLYNOMIAL : 0);
}

static uint64_t
power_of_x(int exponent)
{
    uint32_t power = ONE;
    while (exponent-- > 0) {
        power = times_x(power);
    }
    /* In a number of 64 bits it stands 31 bits too high, and a product of two of them one bit. */
    return (uint64_t)power << 1;
}

static void
prepare(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;
        for (int bit = 0; bit < 8; bit++) {
            remainder = times_x(remainder);
        }
        remainders[byte] = remainder;
    }
    /* The first half stands 64 bits before the second; 32 of what is wanted come with `power_of_x`. */
    to_next_step[0] = power_of_x(8 * STEP_BYTES + 32);
    to_next_step[1] = power_of_x(8 * STEP_BYTES - 32);
    to_next_block[0] = power_of_x(8 * BLOCK_BYTES + 32);
    to_next_block[1] = power_of_x(8 * BLOCK_BYTES - 32);
}

static uint32_t
by_table(const unsigned char *data, Py_ssize_t size, uint32_t crc)
{
    while (size-- > 0) {
        crc = remainders[(crc ^ *data++) & 0xFF] ^ (crc >> 8);
    }
    return crc;
}

BY_PRODUCTS static inline __m128i
moved(__m128i block, __m128i powers)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(block, powers, 0x00), _mm_clmulepi64_si128(block, powers, 0x11));
}

BY_PRODUCTS static inline __m128i
block_at(const unsigned char *data)
{
    return _mm_loadu_si128((const __m128i *)data);
}

/* Of at least STEP_BYTES bytes. */
BY_PRODUCTS static uint32_t
by_products(const unsigned char *data, Py_ssize_t size, uint32_t crc)
{
    const __m128i step = _mm_loadu_si128((const __m128i *)to_next_step);
    const __m128i next = _mm_loadu_si128((const __m128i *)to_next_block);
    /* By themselves, for a product takes several cycles; by name, for few compilers would keep an array in registers. */
    __m128i first = _mm_xor_si128(block_at(data), _mm_cvtsi32_si128((int)crc));
    __m128i second = block_at(data + BLOCK_BYTES);
    __m128i third = block_at(data + 2 * BLOCK_BYTES);
    __m128i fourth = block_at(data + 3 * BLOCK_BYTES);
    data += STEP_BYTES;
    size -= STEP_BYTES;
    for (; size >= STEP_BYTES; size -= STEP_BYTES, data += STEP_BYTES) {
        first = _mm_xor_si128(moved(first, step), block_at(data));
        second = _mm_xor_si128(moved(second, step), block_at(data + BLOCK_BYTES));
        third = _mm_xor_si128(moved(third, step), block_at(data + 2 * BLOCK_BYTES));
        fourth = _mm_xor_si128(moved(fourth, step), block_at(data + 3 * BLOCK_BYTES));
    }
    __m128i all = _mm_xor_si128(moved(first, next), second);
    all = _mm_xor_si128(moved(all, next), third);
    all = _mm_xor_si128(moved(all, next), fourth);
    for (; size >= BLOCK_BYTES; size -= BLOCK_BYTES, data += BLOCK_BYTES) {
        all = _mm_xor_si128(moved(all, next), block_at(data));
    }
    unsigned char left[BLOCK_BYTES];
    _mm_storeu_si128((__m128i *)left, all);
    return by_table(data, size, by_table(left, BLOCK_BYTES, 0));
}

static uint32_t
checksum(const unsigned char *data, Py_ssize_t size, uint32_t crc)
{
    return ~(size < STEP_BYTES ? by_table(data, size, ~crc) : by_products(data, size, ~crc));
}

static PyObject *
crc32(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "crc32() takes the data and the checksum before it");
        return NULL;
    }
    const unsigned long before = PyLong_AsUnsignedLongMask(arguments[1]);
    Py_buffer data;
    if ((before == (unsigned long)-1 && PyErr_Occurred()) ||
        PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    uint32_t crc = (uint32_t)before;
    if (data.len < UNLOCKED_BYTES) {
        crc = checksum(data.buf, data.len, crc);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = checksum(data.buf, data.len, crc);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef functions[] = {
    {"crc32", (PyCFunction)(void (*)(void))crc32, METH_FASTCALL,
     "crc32(data, crc, /)\n--\n\nReturn the CRC-32 of bytes that follow those with this one, as zlib's."},
    {0},
};

int
bulk_add_checksum(PyObject *module)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul")) {
        return PyModule_AddObjectRef(module, "crc32", Py_None);
    }
    prepare();
    return PyModule_AddFunctions(module, functions);
}

#else

int
bulk_add_checksum(PyObject *module)
{
    return PyModule_AddObjectRef(module, "crc32", Py_None);
}

#endif

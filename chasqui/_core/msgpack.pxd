# The little of msgpack that envelopes and columns need, bounds-checked, as inline functions: each read takes the
# offset to read at and gives the offset behind, or -1 with the fault set; each put writes the shortest form.

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    NIL = 0xC0
    STACK = 128                 # the deepest nesting that `skip_value` follows


cdef struct Fault:
    const char* what            # why the bytes were refused; NULL while all is well
    Py_ssize_t at               # the offset that it was noticed at


cdef inline int refuse(Fault* fault, const char* what, Py_ssize_t at) noexcept nogil:
    fault.what = what
    fault.at = at
    return -1


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────

cdef inline uint64_t big_endian(const unsigned char* data, int width) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(width):
        value = (value << 8) | data[i]
    return value


cdef inline Py_ssize_t read_length(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, int width,
                                   uint64_t* length, Fault* fault) noexcept nogil:
    """The `width` bytes behind the type byte at `at`."""
    if size - at - 1 < width:
        return refuse(fault, "cut short in a length", at)
    length[0] = big_endian(data + at + 1, width)
    return at + 1 + width


cdef inline Py_ssize_t read_array(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, uint64_t* count,
                                  Fault* fault, const char* expected) noexcept nogil:
    cdef unsigned char kind
    cdef Py_ssize_t start = at
    if at >= size:
        return refuse(fault, "cut short", at)
    kind = data[at]
    if kind & 0xF0 == 0x90:
        count[0] = kind & 0x0F
        at += 1
    elif kind == 0xDC or kind == 0xDD:
        at = read_length(data, at, size, 2 if kind == 0xDC else 4, count, fault)
        if at < 0:
            return -1
    else:
        return refuse(fault, expected, at)
    if count[0] > <uint64_t>(size - at):
        return refuse(fault, "an array promises more elements than bytes are left", start)
    return at


cdef inline Py_ssize_t read_run(Py_ssize_t at, Py_ssize_t size, uint64_t length, Py_ssize_t* run_at,
                                Py_ssize_t* run_size, Fault* fault) noexcept nogil:
    if length > <uint64_t>(size - at):
        return refuse(fault, "promises more bytes than are left", at)
    run_at[0] = at
    run_size[0] = <Py_ssize_t>length
    return at + <Py_ssize_t>length


cdef inline Py_ssize_t read_str(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t* run_at,
                                Py_ssize_t* run_size, Fault* fault, const char* expected) noexcept nogil:
    cdef unsigned char kind
    cdef uint64_t length
    if at >= size:
        return refuse(fault, "cut short", at)
    kind = data[at]
    if kind & 0xE0 == 0xA0:
        length = kind & 0x1F
        at += 1
    elif 0xD9 <= kind <= 0xDB:
        at = read_length(data, at, size, 1 << (kind - 0xD9), &length, fault)
        if at < 0:
            return -1
    else:
        return refuse(fault, expected, at)
    return read_run(at, size, length, run_at, run_size, fault)


cdef inline Py_ssize_t read_bin(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, Py_ssize_t* run_at,
                                Py_ssize_t* run_size, Fault* fault, const char* expected) noexcept nogil:
    cdef unsigned char kind
    cdef uint64_t length
    if at >= size:
        return refuse(fault, "cut short", at)
    kind = data[at]
    if not 0xC4 <= kind <= 0xC6:
        return refuse(fault, expected, at)
    at = read_length(data, at, size, 1 << (kind - 0xC4), &length, fault)
    if at < 0:
        return -1
    return read_run(at, size, length, run_at, run_size, fault)


cdef inline Py_ssize_t read_uint(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, uint64_t* number,
                                 Fault* fault, const char* expected) noexcept nogil:
    """An integer of any width and sign form, as long as it is not negative."""
    cdef unsigned char kind
    cdef Py_ssize_t start = at
    cdef int width
    if at >= size:
        return refuse(fault, "cut short", at)
    kind = data[at]
    if kind < 0x80:
        number[0] = kind
        return at + 1
    if not 0xCC <= kind <= 0xD3:
        return refuse(fault, expected, at)
    width = 1 << ((kind - 0xCC) & 3)
    at = read_length(data, at, size, width, number, fault)
    if at >= 0 and kind >= 0xD0 and number[0] >> (8 * width - 1):
        return refuse(fault, expected, start)
    return at


cdef inline Py_ssize_t read_float(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, double* number,
                                  Fault* fault, const char* expected) noexcept nogil:
    """A float of either width, or an unsigned integer."""
    cdef uint64_t bits
    cdef uint32_t short_bits
    cdef float short_number
    if at < size and data[at] == 0xCB:
        at = read_length(data, at, size, 8, &bits, fault)
        if at >= 0:
            memcpy(number, &bits, 8)
        return at
    if at < size and data[at] == 0xCA:
        at = read_length(data, at, size, 4, &bits, fault)
        if at >= 0:
            short_bits = <uint32_t>bits
            memcpy(&short_number, &short_bits, 4)
            number[0] = short_number
        return at
    at = read_uint(data, at, size, &bits, fault, expected)
    if at >= 0:
        number[0] = <double>bits
    return at


cdef inline Py_ssize_t skip_value(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, int max_depth,
                                  bint allow_ext, Fault* fault) noexcept nogil:
    """The offset behind one whole value of any type, without recursion."""
    cdef uint64_t left[STACK + 1]  # values still to come, per open container
    cdef int depth = 0
    cdef unsigned char kind
    cdef uint64_t count
    cdef Py_ssize_t start
    left[0] = 1
    while True:
        while left[depth] == 0:
            if depth == 0:
                return at
            depth -= 1
        left[depth] -= 1
        if at >= size:
            return refuse(fault, "cut short", at)
        kind = data[at]
        start = at
        count = 0
        if kind < 0x80 or kind >= 0xE0 or kind == 0xC0 or kind == 0xC2 or kind == 0xC3:
            at += 1
            continue
        if kind & 0xE0 == 0xA0:
            count = kind & 0x1F
            at += 1
        elif kind & 0xF0 == 0x90 or kind & 0xF0 == 0x80 or kind >= 0xDC:
            if kind < 0xA0:
                count = kind & 0x0F
                at += 1
            else:
                at = read_length(data, at, size, 4 if kind & 1 else 2, &count, fault)
                if at < 0:
                    return -1
            if kind & 0xF0 == 0x80 or kind >= 0xDE:
                count *= 2
            if count > <uint64_t>(size - at):
                return refuse(fault, "a container promises more than bytes are left", start)
            if depth >= max_depth:
                return refuse(fault, "nested too deeply", start)
            depth += 1
            left[depth] = count
            continue
        elif 0xC4 <= kind <= 0xC6:
            at = read_length(data, at, size, 1 << (kind - 0xC4), &count, fault)
        elif 0xD9 <= kind <= 0xDB:
            at = read_length(data, at, size, 1 << (kind - 0xD9), &count, fault)
        elif kind == 0xCA or kind == 0xCB:
            at += 1
            count = 4 if kind == 0xCA else 8
        elif 0xCC <= kind <= 0xD3:
            at += 1
            count = 1 << ((kind - 0xCC) & 3)
        elif kind == 0xC1:
            return refuse(fault, "0xc1 is no msgpack type", at)
        elif not allow_ext:
            return refuse(fault, "ext types are not allowed", at)
        elif 0xD4 <= kind <= 0xD8:
            at += 1
            count = (1 << (kind - 0xD4)) + 1
        else:                                   # 0xC7..0xC9
            at = read_length(data, at, size, 1 << (kind - 0xC7), &count, fault)
            count += 1
        if at < 0:
            return -1
        if count > <uint64_t>(size - at):
            return refuse(fault, "promises more bytes than are left", start)
        at += <Py_ssize_t>count


# ── Reading what was found whole ─────────────────────────────────────────────────────────────────

cdef enum Found:                # what the bytes at a place are
    NO
    WHOLE
    TOO_LARGE                   # a whole number beyond 63 bits
    REAL
    STR
    BIN
    ARRAY
    PAIRS


cdef inline int run_at(const unsigned char* data, Py_ssize_t* at, Py_ssize_t* size) noexcept nogil:
    """STR or BIN, with `at` moved to its bytes; else NO."""
    cdef unsigned char head = data[at[0]]
    cdef int width
    if head & 0xE0 == 0xA0:
        size[0] = head & 0x1F
        at[0] += 1
        return STR
    if 0xD9 <= head <= 0xDB:
        width = 1 << (head - 0xD9)
    elif 0xC4 <= head <= 0xC6:
        width = 1 << (head - 0xC4)
    else:
        return NO
    size[0] = <Py_ssize_t>big_endian(data + at[0] + 1, width)
    at[0] += 1 + width
    return STR if head >= 0xD9 else BIN


cdef inline bint text_at(const unsigned char* data, Py_ssize_t* at, Py_ssize_t* size) noexcept nogil:
    """Whether it is STR, with `at` moved to its bytes; else `at` stays."""
    cdef Py_ssize_t start = at[0]
    if run_at(data, at, size) == STR:
        return True
    at[0] = start
    return False


cdef inline int many_at(const unsigned char* data, Py_ssize_t* at, Py_ssize_t* count) noexcept nogil:
    """ARRAY or PAIRS, with `at` moved to the first inside; else NO."""
    cdef unsigned char head = data[at[0]]
    cdef int width
    if head & 0xE0 == 0x80:
        count[0] = head & 0x0F
        at[0] += 1
        return ARRAY if head & 0x10 else PAIRS
    if not 0xDC <= head <= 0xDF:
        return NO
    width = 4 if head & 1 else 2
    count[0] = <Py_ssize_t>big_endian(data + at[0] + 1, width)
    at[0] += 1 + width
    return ARRAY if head <= 0xDD else PAIRS


cdef inline int number_at(const unsigned char* data, Py_ssize_t* at, int64_t* whole, double* real) noexcept nogil:
    """WHOLE, TOO_LARGE or REAL, with `at` moved behind it; else NO. `real` is set for each of them."""
    cdef unsigned char head = data[at[0]]
    cdef uint64_t bits
    cdef uint32_t short_bits
    cdef float small
    cdef int width
    if head < 0x80 or head >= 0xE0:
        whole[0] = <int8_t>head
        at[0] += 1
    elif head == 0xCA:
        short_bits = <uint32_t>big_endian(data + at[0] + 1, 4)
        memcpy(&small, &short_bits, 4)
        real[0] = small
        at[0] += 5
        return REAL
    elif head == 0xCB:
        bits = big_endian(data + at[0] + 1, 8)
        memcpy(real, &bits, 8)
        at[0] += 9
        return REAL
    elif 0xCC <= head <= 0xD3:
        width = 1 << ((head - 0xCC) & 3)
        bits = big_endian(data + at[0] + 1, width)
        at[0] += 1 + width
        if head == 0xCF and bits >> 63:
            real[0] = <double>bits
            return TOO_LARGE
        whole[0] = <int64_t>bits
        if head == 0xD0:
            whole[0] = <int8_t>bits
        elif head == 0xD1:
            whole[0] = <int16_t>bits
        elif head == 0xD2:
            whole[0] = <int32_t>bits
    else:
        return NO
    real[0] = <double>whole[0]
    return WHOLE


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────

cdef inline char* put_big_endian(char* out, int kind, uint64_t number, int width) noexcept nogil:
    cdef int i
    out[0] = <char>kind
    for i in range(width):
        out[1 + i] = <char>(number >> (8 * (width - 1 - i)))
    return out + 1 + width


cdef inline char* put_nil(char* out) noexcept nogil:
    out[0] = <char>NIL
    return out + 1


cdef inline Py_ssize_t uint_size(uint64_t number) noexcept nogil:
    if number < 0x80:
        return 1
    if number <= 0xFF:
        return 2
    if number <= 0xFFFF:
        return 3
    return 5 if number <= <uint64_t>0xFFFFFFFF else 9


cdef inline char* put_uint(char* out, uint64_t number) noexcept nogil:
    if number < 0x80:
        out[0] = <char>number
        return out + 1
    if number <= 0xFF:
        return put_big_endian(out, 0xCC, number, 1)
    if number <= 0xFFFF:
        return put_big_endian(out, 0xCD, number, 2)
    if number <= <uint64_t>0xFFFFFFFF:
        return put_big_endian(out, 0xCE, number, 4)
    return put_big_endian(out, 0xCF, number, 8)


cdef inline char* put_int(char* out, int64_t number) noexcept nogil:
    """The shortest form of either sign."""
    if number >= 0:
        return put_uint(out, number)
    if number >= -32:
        out[0] = <char>number
        return out + 1
    if number >= -0x80:
        return put_big_endian(out, 0xD0, number, 1)
    if number >= -0x8000:
        return put_big_endian(out, 0xD1, number, 2)
    if number >= -<int64_t>0x80000000:
        return put_big_endian(out, 0xD2, number, 4)
    return put_big_endian(out, 0xD3, number, 8)


cdef inline char* put_float(char* out, double number) noexcept nogil:
    cdef uint64_t bits
    memcpy(&bits, &number, 8)
    return put_big_endian(out, 0xCB, bits, 8)


cdef inline Py_ssize_t str_header_size(Py_ssize_t size) noexcept nogil:
    if size < 32:
        return 1
    if size <= 0xFF:
        return 2
    return 3 if size <= 0xFFFF else 5


cdef inline char* put_str_header(char* out, Py_ssize_t size) noexcept nogil:
    if size < 32:
        out[0] = <char>(0xA0 | size)
        return out + 1
    if size <= 0xFF:
        return put_big_endian(out, 0xD9, size, 1)
    if size <= 0xFFFF:
        return put_big_endian(out, 0xDA, size, 2)
    return put_big_endian(out, 0xDB, size, 4)


cdef inline Py_ssize_t bin_header_size(Py_ssize_t size) noexcept nogil:
    if size <= 0xFF:
        return 2
    return 3 if size <= 0xFFFF else 5


cdef inline char* put_bin_header(char* out, Py_ssize_t size) noexcept nogil:
    if size <= 0xFF:
        return put_big_endian(out, 0xC4, size, 1)
    if size <= 0xFFFF:
        return put_big_endian(out, 0xC5, size, 2)
    return put_big_endian(out, 0xC6, size, 4)


cdef inline char* put_count(char* out, int short_kind, int wide_kind, Py_ssize_t count) noexcept nogil:
    """Beyond 32 bits there is no header, and no memory for the elements either."""
    if count < 16:
        out[0] = <char>(short_kind | count)
        return out + 1
    if count <= 0xFFFF:
        return put_big_endian(out, wide_kind, count, 2)
    return put_big_endian(out, wide_kind + 1, count, 4)


cdef inline char* put_map_header(char* out, Py_ssize_t count) noexcept nogil:
    return put_count(out, 0x80, 0xDE, count)


cdef inline char* put_array_header(char* out, Py_ssize_t count) noexcept nogil:
    return put_count(out, 0x90, 0xDC, count)

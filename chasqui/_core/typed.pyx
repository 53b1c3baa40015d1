"""msgpack into columns in Arrow's layout, by a schema: no Python object per value, however deep it is.

The forms are those that maps.pyx writes; other texts and numbers that mean the same are read by Python. A value that
does not fit its column costs its row, and is told with its place.
"""

import datetime
import decimal

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.math cimport isinf
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcmp, memcpy

from chasqui._core.column cimport is_ascii, read_number
from chasqui._core.envelope cimport MAX_DEPTH, fault_text
from chasqui._core.fields cimport Field, Lent
from chasqui._core.forms cimport DECIMAL_BYTES, read_clock, read_date, read_decimal, read_moment
from chasqui._core.maps cimport (
    BINARY, BOOL, CLOCK, DATE, DECIMAL, DOUBLE, FLOAT, INT8, INT64, LIST, MAP, MOMENT, NOTHING, STRUCT, TEXT,
)
from chasqui._core.msgpack cimport (
    ARRAY, BIN, NIL, NO, PAIRS, REAL, TOO_LARGE, Fault, big_endian, many_at, number_at, run_at, skip_value, text_at,
)


cdef enum:
    MISFIT = -1                 # instead of an offset: a value does not fit, and was told

cdef object EPOCH = datetime.datetime(1970, 1, 1)
cdef object MICROSECOND = datetime.timedelta(microseconds=1)


def unpack_column(tuple shape not None, Py_ssize_t rows, Py_ssize_t offset, bitmap, ends, values):
    """A column of msgpack in Arrow's layout, as the column of its values, and why rows do not fit.

    A shape is `(name, kind, expected, is_nullable, precision, scale, shapes)`; the last are those inside it, as in
    `pack_maps`, and `expected` is the word for its type. A column is `(rows, buffers, columns inside)`. Rows that do
    not fit are null, and have their reason by their number.
    """
    cdef Unpacker unpacker = Unpacker(shape)
    cdef Lent there = Lent(bitmap), bounds = Lent(ends), data = Lent(values)
    cdef const uint8_t* bits = NULL
    cdef int32_t at[2]
    cdef Py_ssize_t row, place
    cdef dict reasons = {}
    if bitmap is not None:
        bits = <const uint8_t*>there.buffer.buf
    if offset < 0 or rows < 0 or rows and bounds.buffer.len < 4 * (offset + rows + 1) \
            or bits != NULL and there.buffer.len < (offset + rows + 7) // 8:
        raise ValueError("the buffers are shorter than promised")
    for row in range(rows):
        place = offset + row
        if bits != NULL and not bits[place >> 3] >> (place & 7) & 1:
            unpacker.root.put_null()
            continue
        memcpy(at, <const char*>bounds.buffer.buf + 4 * place, 8)
        if not 0 <= at[0] <= at[1] <= data.buffer.len:
            raise ValueError("a column whose ends do not rise")
        reason = unpacker.row(<const unsigned char*>data.buffer.buf + at[0], at[1] - at[0])
        if reason is not None:
            reasons[row] = reason
    return unpacker.root.take(), reasons


cdef class Unpacker:
    """The value under way, and what is wrong with it."""

    def __cinit__(self, tuple shape not None):
        self.root = Typed(shape)

    cdef str row(self, const unsigned char* data, Py_ssize_t size):
        """The next row; why it does not fit, or None."""
        cdef Fault fault
        cdef Py_ssize_t end, known = self.root.rows
        fault.what = NULL
        end = skip_value(data, 0, size, MAX_DEPTH, False, &fault)
        if end >= 0 and end != size:
            fault.what = "bytes after the value"
            fault.at = end
        if fault.what != NULL:
            self.root.put_null()
            return f"{self.root.name}: {fault_text(&fault)}"
        self.data, self.size = data, size
        if self.root.put(self, 0) != MISFIT:
            return None
        self.root.cut(known)
        self.root.put_null()
        return f"{self.root.name}{self.place}: {self.reason}"

    cdef Py_ssize_t refuse(self, Typed field, str got) except -2:
        """A value does not fit."""
        self.reason = f"expected {field.expected}, got {got}"
        self.place = ""
        return MISFIT

    cdef Py_ssize_t step_out(self, str step) except -2:
        """One level up from what does not fit."""
        self.place = step + self.place
        return MISFIT

    cdef Py_ssize_t skip(self, Py_ssize_t at) noexcept:
        cdef Fault fault
        return skip_value(self.data, at, self.size, MAX_DEPTH, False, &fault)


cdef class Typed(Field):
    """A column that reads its values out of msgpack."""

    cdef Py_ssize_t put(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """The value at a place; the offset behind it, or MISFIT."""
        if unpacker.data[at] == NIL:
            if not self.is_nullable:
                return unpacker.refuse(self, "null")
            self.put_null()
            return at + 1
        if self.kind == TEXT or self.kind == BINARY:
            return self.put_run(unpacker, at)
        if self.kind >= INT8 and self.kind <= DOUBLE:
            return self.put_number(unpacker, at)
        if self.kind == STRUCT:
            return self.put_struct(unpacker, at)
        if self.kind == LIST or self.kind == MAP:
            return self.put_many(unpacker, at)
        if self.kind == BOOL:
            return self.put_bool(unpacker, at)
        if self.kind == NOTHING:
            return unpacker.refuse(self, shown(unpacker.data[at]))
        return self.put_form(unpacker, at)

    cdef Py_ssize_t put_bool(self, Unpacker unpacker, Py_ssize_t at) except -2:
        cdef unsigned char head = unpacker.data[at]
        cdef char truth = head == 0xC3
        if head != 0xC2 and head != 0xC3:
            return unpacker.refuse(self, shown(head))
        self.put_bytes(&truth, 1)
        return at + 1

    cdef Py_ssize_t put_run(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """A text or bytes. Bytes may come as a text, as those do who know no other."""
        cdef Py_ssize_t size
        cdef int found = run_at(unpacker.data, &at, &size)
        cdef const char* text = <const char*>unpacker.data + at
        if found == NO or found == BIN and self.kind == TEXT:
            return unpacker.refuse(self, shown(unpacker.data[at]) if found == NO else "bytes")
        if self.kind == TEXT and not is_utf8(text, size):
            return unpacker.refuse(self, "text that is no UTF-8")
        self.put_bytes(text, size)
        return at + size

    cdef Py_ssize_t put_number(self, Unpacker unpacker, Py_ssize_t at) except -2:
        cdef int64_t whole = 0
        cdef double real = 0
        cdef float small
        cdef unsigned char head = unpacker.data[at]
        cdef int found = number_at(unpacker.data, &at, &whole, &real)
        if found == NO:
            return unpacker.refuse(self, shown(head))
        if self.kind == DOUBLE:
            self.put_bytes(&real, 8)
        elif self.kind == FLOAT:
            small = <float>real
            if isinf(small) and not isinf(real):
                return unpacker.refuse(self, "float out of range")
            self.put_bytes(&small, 4)
        else:
            if found == REAL:
                if not -9.2233720368547758e18 <= real < 9.2233720368547758e18 or real != <double><int64_t>real:
                    return unpacker.refuse(self, "float")
                whole = <int64_t>real
            if found == TOO_LARGE or not self.holds(whole):
                return unpacker.refuse(self, "int out of range")
            self.put_bytes(&whole, self.width)
        return at

    cdef bint holds(self, int64_t number) noexcept:
        """Whether a whole number has room in the column."""
        if self.width == 8:
            return True
        return -(<int64_t>1 << (8 * self.width - 1)) <= number < <int64_t>1 << (8 * self.width - 1)

    cdef Py_ssize_t put_form(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """A date, a time or a decimal."""
        cdef Py_ssize_t size, start = at
        cdef int64_t number = 0
        cdef char value[DECIMAL_BYTES]
        cdef const char* text
        cdef bint is_read = False
        if text_at(unpacker.data, &at, &size):
            text = <const char*>unpacker.data + at
            if self.kind == DECIMAL:
                is_read = read_decimal(text, size, self.precision, self.scale, value)
            elif self.kind == DATE:
                is_read = read_date(text, size, &number)
            elif self.kind == CLOCK:
                is_read = read_clock(text, size, &number)
                number *= 1000
            else:
                is_read = read_moment(text, size, self.kind == MOMENT, &number)
        if is_read:
            if self.kind != DECIMAL:
                memcpy(value, &number, sizeof(number))
            self.put_bytes(value, self.width)           # little endian, as Arrow is
            return at + size
        return self.put_odd(unpacker, start)

    cdef Py_ssize_t put_odd(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """The same, in a form that we do not write."""
        cdef Py_ssize_t size, start = at
        cdef int64_t whole = 0
        cdef double real = 0
        cdef object given, number
        cdef bytes value
        cdef unsigned char head = unpacker.data[at]
        if text_at(unpacker.data, &at, &size):
            try:
                given = PyUnicode_DecodeUTF8(<const char*>unpacker.data + at, size, NULL)
            except UnicodeDecodeError:
                return unpacker.refuse(self, "text that is no UTF-8")
            at += size
        elif self.kind == DECIMAL:
            found = number_at(unpacker.data, &at, &whole, &real)
            if found == NO:
                return unpacker.refuse(self, shown(head))
            given = real if found == REAL else whole
            if found == TOO_LARGE:
                given = big_endian(unpacker.data + start + 1, 8)
        else:
            return unpacker.refuse(self, shown(head))
        try:
            number = self.odd(given)
        except (ValueError, ArithmeticError):
            return unpacker.refuse(self, f"{shown(head)} that does not fit")
        value = (<object>number).to_bytes(self.width, "little", signed=True)
        self.put_bytes(PyBytes_AS_STRING(value), self.width)
        return at

    cdef object odd(self, given):
        """What a value in another form comes to as a number; raises ValueError or ArithmeticError."""
        if self.kind == DECIMAL:
            return unscaled(given, self.precision, self.scale)
        if self.kind == DATE:
            return (datetime.date.fromisoformat(given) - EPOCH.date()).days
        if self.kind == CLOCK:
            given = datetime.datetime.combine(EPOCH.date(), datetime.time.fromisoformat(given))
        else:
            given = datetime.datetime.fromisoformat(given)
        if given.utcoffset() is not None:
            if self.kind != MOMENT:
                raise ValueError("it has an offset")
            given = given.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        number = (given.replace(tzinfo=None) - EPOCH) // MICROSECOND    # a time of no zone is UTC
        return number * 1000 if self.kind == CLOCK else number

    # ── Values with others inside ────────────────────────────────────────────────────────────────

    cdef Py_ssize_t put_struct(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """A map: what it lacks is null, and what the struct lacks is skipped."""
        cdef Typed field
        cdef Py_ssize_t count, size, i, following = 0
        cdef unsigned char head = unpacker.data[at]
        if many_at(unpacker.data, &at, &count) != PAIRS:
            return unpacker.refuse(self, shown(head))
        for i in range(count):
            field = None
            if text_at(unpacker.data, &at, &size):
                field = self.field_of(<const char*>unpacker.data + at, size, &following)
                at += size
            else:
                at = unpacker.skip(at)
            if field is None:
                at = unpacker.skip(at)
                continue
            if field.rows > self.rows:          # the last of a name counts, as in a dict
                field.cut(self.rows)
            at = field.put(unpacker, at)
            if at == MISFIT:
                return unpacker.step_out(f".{field.name}")
        for field in self.inside:
            if field.rows == self.rows:
                if not field.is_nullable:
                    unpacker.refuse(field, "nothing")
                    return unpacker.step_out(f".{field.name}")
                field.put_null()
        self.close_row(True)
        return at

    cdef Typed field_of(self, const char* name, Py_ssize_t size, Py_ssize_t* following):
        """The field of a name. Most often it is the `following` one."""
        cdef Py_ssize_t i, place, count = len(self.inside)
        cdef Typed field
        for i in range(count):
            place = following[0] + i
            if place >= count:
                place -= count
            field = <Typed>self.inside[place]
            if PyBytes_GET_SIZE(field.key) == size and memcmp(PyBytes_AS_STRING(field.key), name, size) == 0:
                following[0] = place + 1 if place + 1 < count else 0
                return field
        return None

    cdef Py_ssize_t put_many(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """A list or a map."""
        cdef Typed field = <Typed>self.inside[0], of_value
        cdef Py_ssize_t count, i
        cdef unsigned char head = unpacker.data[at]
        cdef int found = many_at(unpacker.data, &at, &count)
        if found == NO or (found == ARRAY) != (self.kind == LIST):
            return unpacker.refuse(self, shown(head))
        for i in range(count):
            if self.kind == LIST:
                at = field.put(unpacker, at)
                if at == MISFIT:
                    return unpacker.step_out(f"[{i}]")
                continue
            of_value = <Typed>self.inside[1]
            at = field.put_key(unpacker, at)
            if at == MISFIT:
                return unpacker.step_out(".key")
            at = of_value.put(unpacker, at)
            if at == MISFIT:
                return unpacker.step_out(".value")
        self.close_row(True)
        return at

    cdef Py_ssize_t put_key(self, Unpacker unpacker, Py_ssize_t at) except -2:
        """A key: numbers are text there."""
        cdef Py_ssize_t size
        cdef int64_t number
        if not INT8 <= self.kind <= INT64 or not text_at(unpacker.data, &at, &size):
            return self.put(unpacker, at)
        if not read_number(<const char*>unpacker.data + at, size, &number) or not self.holds(number):
            return unpacker.refuse(self, "text that does not fit")
        self.put_bytes(&number, self.width)
        return at + size


cdef object unscaled(given, int precision, int scale):
    """A decimal as its digits, without point; raises ArithmeticError where some would be lost."""
    sign, digits, exponent = decimal.Decimal(repr(given) if isinstance(given, float) else given).as_tuple()
    if not isinstance(exponent, int):
        raise ArithmeticError("not a number")
    number = int("".join(map(str, digits)))
    shift = exponent + scale
    if number == 0:
        return 0
    if len(digits) + shift > precision + 1:
        raise ArithmeticError("too large")
    if shift >= 0:
        number *= 10 ** shift
    else:
        number, lost = divmod(number, 10 ** min(-shift, len(digits)))
        if lost or number == 0:
            raise ArithmeticError("digits behind the last")
    if number >= 10 ** precision:
        raise ArithmeticError("too large")
    return -number if sign else number


cdef bint is_utf8(const char* text, Py_ssize_t size) except -1:
    if is_ascii(text, size):
        return True
    try:
        PyUnicode_DecodeUTF8(text, size, NULL)
    except UnicodeDecodeError:
        return False
    return True


cdef str shown(unsigned char head):
    """What a value is, by its first byte."""
    if head == NIL:
        return "null"
    if head == 0xC2 or head == 0xC3:
        return "bool"
    if head == 0xCA or head == 0xCB:
        return "float"
    if head < 0x80 or head >= 0xE0 or 0xCC <= head <= 0xD3:
        return "int"
    if head & 0xF0 == 0x80 or head >= 0xDE:
        return "map"
    if head & 0xF0 == 0x90 or head >= 0xDC:
        return "list"
    return "bytes" if 0xC4 <= head <= 0xC6 else "text"

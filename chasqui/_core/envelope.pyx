"""Envelopes and delayed members: the msgpack header around a job's payload, packed and unpacked.

The decoder is one pass over the bytes with every length checked against what is left. It allocates
nothing: it answers offsets, and what is wrong and where if the bytes are not an envelope.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

from chasqui._core.msgpack cimport (
    NIL, Fault, bin_header_size, put_bin_header, put_float, put_nil, put_str_header, put_uint, read_array, read_bin,
    read_float, read_str, read_uint, refuse, skip_value, str_header_size, uint_size,
)


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    str PyUnicode_FromStringAndSize(const char* text, Py_ssize_t size)


class EnvelopeError(ValueError):
    """Bytes that are not what they should be; the text says what was wrong and at which offset."""


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────


@cython.final
cdef class Envelope:
    """A decoded envelope. Its parts are cut out of the original bytes when asked for."""

    @property
    def id(self):
        return text_at(self._data, self._view.id_at, self._view.id_size)

    @property
    def payload(self):
        return self._data[self._view.payload_at:self._view.payload_at + self._view.payload_size]

    @property
    def created_at_ms(self):
        return self._view.created_at_ms

    @property
    def attempt(self):
        return self._view.attempt

    @property
    def retry(self):
        """`(max_attempts | None, backoff | None)`, or None where the job overrides nothing."""
        return retry_tuple(self._data, &self._view.retry)

    def with_attempt(self, uint32_t attempt):
        """The same envelope, every other byte kept, with another attempt count."""
        return with_attempt(self._data, &self._view, attempt)


def decode_envelope(bytes data not None):
    """The Envelope in `data`; EnvelopeError says what is wrong and where."""
    cdef Envelope envelope = Envelope.__new__(Envelope)
    cdef Fault fault
    if read_envelope(<const unsigned char*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data),
                     &envelope._view, &fault) < 0:
        raise EnvelopeError(fault_text(&fault))
    envelope._data = data
    return envelope


def decode_delayed_member(bytes member not None):
    """`(name, envelope bytes)` of a delayed member; EnvelopeError if it is shorter than it says."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(member)
    cdef const unsigned char* data = <const unsigned char*>PyBytes_AS_STRING(member)
    cdef Py_ssize_t name_size
    if size < 4:
        raise EnvelopeError(f"delayed member of {size} bytes is shorter than its prefix of 4")
    name_size = data[0] | (data[1] << 8) | (data[2] << 16) | (<uint32_t>data[3] << 24)
    if name_size > size - 4:
        raise EnvelopeError(f"delayed member promises a name of {name_size} bytes and has {size - 4} left")
    try:
        name = member[4:4 + name_size].decode()
    except UnicodeDecodeError as error:
        raise EnvelopeError(f"name of a delayed member is not UTF-8 at byte {4 + error.start}") from None
    return name, member[4 + name_size:]


def check_msgpack(data, int max_depth=MAX_DEPTH):
    """Raise EnvelopeError unless `data` is exactly one msgpack value within `max_depth`.

    Lengths, nesting and ext types are checked in one pass that allocates nothing, so that a decoder
    run afterwards cannot be made to allocate or recurse by a few hostile bytes.
    """
    cdef Py_buffer view
    cdef Fault fault
    cdef Py_ssize_t end
    if not 1 <= max_depth <= MAX_DEPTH:
        raise ValueError(f"max_depth must be 1..{MAX_DEPTH}, not {max_depth}")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        fault.what = NULL
        end = skip_value(<const unsigned char*>view.buf, 0, view.len, max_depth, False, &fault)
        if end >= 0 and end != view.len:
            fault.what = "bytes after the value"
            fault.at = end
        if fault.what != NULL:
            raise EnvelopeError(fault_text(&fault))
    finally:
        PyBuffer_Release(&view)


cdef int read_envelope(const unsigned char* data, Py_ssize_t size, EnvelopeView* view, Fault* fault) noexcept:
    """Fill `view` from `data`; -1 with `fault` set if it is no envelope."""
    cdef uint64_t count, number
    cdef Py_ssize_t at
    cdef uint64_t i
    memset(view, 0, sizeof(EnvelopeView))
    fault.what = NULL
    at = read_array(data, 0, size, &count, fault, "an array was expected")
    if at < 0:
        return -1
    if count < 4:
        return refuse(fault, "an envelope has at least 4 elements", 0)

    at = read_str(data, at, size, &view.id_at, &view.id_size, fault, "id: a str was expected")
    if at < 0:
        return -1
    if not is_utf8(data + view.id_at, view.id_size):
        return refuse(fault, "id: not UTF-8", view.id_at)
    at = read_bin(data, at, size, &view.payload_at, &view.payload_size, fault,
                  "payload: a bin was expected")
    if at < 0:
        return -1
    at = read_uint(data, at, size, &view.created_at_ms, fault, "created_at_ms: an unsigned integer was expected")
    if at < 0:
        return -1
    view.attempt_at = at
    at = read_uint(data, at, size, &number, fault, "attempt: an unsigned integer was expected")
    if at < 0:
        return -1
    if number > <uint64_t>0xFFFFFFFF:
        return refuse(fault, "attempt: beyond 32 bits", view.attempt_at)
    view.attempt = <uint32_t>number
    view.attempt_end = at
    if count > 4:
        at = read_retry(data, at, size, &view.retry, fault)
        if at < 0:
            return -1
    i = 5
    while i < count:
        at = skip_value(data, at, size, MAX_DEPTH, True, fault)
        if at < 0:
            return -1
        i += 1
    if at != size:
        return refuse(fault, "bytes after the envelope", at)
    return 0


cdef Py_ssize_t read_retry(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, RetryView* retry,
                           Fault* fault) noexcept:
    """The fifth element: nil or `[max_attempts | nil, backoff | nil, …]`; the offset behind it, or -1."""
    cdef uint64_t count, number = 0, i
    cdef Py_ssize_t start = at
    if at < size and data[at] == NIL:
        return at + 1
    at = read_array(data, at, size, &count, fault, "retry: an array was expected")
    if at < 0:
        return -1
    i = 0
    while i < count:
        if i > 1:
            at = skip_value(data, at, size, MAX_DEPTH, True, fault)
        elif at < size and data[at] == NIL:
            at += 1
        elif i == 0:
            start = at
            at = read_uint(data, at, size, &number, fault, "max_attempts: an unsigned integer was expected")
            if at >= 0 and number > <uint64_t>0xFFFFFFFF:
                return refuse(fault, "max_attempts: beyond 32 bits", start)
            retry.has_max_attempts = True
            retry.max_attempts = <uint32_t>number
        else:
            at = read_backoff(data, at, size, retry, fault)
        if at < 0:
            return -1
        i += 1
    return at


cdef Py_ssize_t read_backoff(const unsigned char* data, Py_ssize_t at, Py_ssize_t size, RetryView* retry,
                             Fault* fault) noexcept:
    """`[kind, delay_ms, max_delay_ms | nil, multiplier | nil, jitter_ms | nil, …]`."""
    cdef uint64_t count, i
    cdef Py_ssize_t start = at
    at = read_array(data, at, size, &count, fault, "backoff: an array was expected")
    if at < 0:
        return -1
    if count < 2:
        return refuse(fault, "backoff: at least kind and delay_ms", start)
    at = read_str(data, at, size, &retry.kind_at, &retry.kind_size, fault, "backoff kind: a str was expected")
    if at < 0:
        return -1
    if not is_utf8(data + retry.kind_at, retry.kind_size):
        return refuse(fault, "backoff kind: not UTF-8", retry.kind_at)
    at = read_uint(data, at, size, &retry.delay_ms, fault, "delay_ms: an unsigned integer was expected")
    i = 2
    while i < count and at >= 0:
        if i > 4:
            at = skip_value(data, at, size, MAX_DEPTH, True, fault)
        elif at < size and data[at] == NIL:
            at += 1
        elif i == 2:
            at = read_uint(data, at, size, &retry.max_delay_ms, fault, "max_delay_ms: an unsigned integer was expected")
            retry.has_max_delay = True
        elif i == 3:
            at = read_float(data, at, size, &retry.multiplier, fault, "multiplier: a float was expected")
            retry.has_multiplier = True
        else:
            at = read_uint(data, at, size, &retry.jitter_ms, fault, "jitter_ms: an unsigned integer was expected")
            retry.has_jitter = True
        i += 1
    retry.has_backoff = at >= 0
    return at


cdef object retry_tuple(bytes data, RetryView* view):
    if not (view.has_max_attempts or view.has_backoff):
        return None
    backoff = None
    if view.has_backoff:
        backoff = (
            text_at(data, view.kind_at, view.kind_size),
            view.delay_ms,
            view.max_delay_ms if view.has_max_delay else None,
            view.multiplier if view.has_multiplier else None,
            view.jitter_ms if view.has_jitter else None,
        )
    return (view.max_attempts if view.has_max_attempts else None), backoff


cdef str text_at(bytes data, Py_ssize_t at, Py_ssize_t size):
    """A part that the decoder found to be UTF-8, without a copy of its bytes in between."""
    if data is None:
        raise ValueError("there is no envelope")
    return PyUnicode_FromStringAndSize(PyBytes_AS_STRING(data) + at, size)


cdef bytes with_attempt(bytes data, EnvelopeView* view, uint32_t attempt):
    """A copy of the envelope whose attempt is another; what a newer peer put behind it is kept."""
    cdef Py_ssize_t size
    if data is None:
        raise ValueError("there is no envelope")
    size = PyBytes_GET_SIZE(data) - (view.attempt_end - view.attempt_at) + uint_size(attempt)
    cdef bytes copy = PyBytes_FromStringAndSize(NULL, size)
    cdef const char* source = PyBytes_AS_STRING(data)
    cdef char* out = PyBytes_AS_STRING(copy)
    memcpy(out, source, view.attempt_at)
    out = put_uint(out + view.attempt_at, attempt)
    memcpy(out, source + view.attempt_end, PyBytes_GET_SIZE(data) - view.attempt_end)
    return copy


cdef bint is_utf8(const unsigned char* text, Py_ssize_t size) noexcept nogil:
    """Strict UTF-8: no surrogates, no overlong forms, nothing beyond U+10FFFF."""
    cdef Py_ssize_t at = 0
    cdef unsigned char lead, low, high
    cdef int more
    while at < size:
        lead = text[at]
        at += 1
        if lead < 0x80:
            continue
        low, high = 0x80, 0xBF          # what the first continuation byte may be
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            if lead == 0xE0:
                low = 0xA0
            elif lead == 0xED:
                high = 0x9F
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        else:
            return False
        if more > size - at or not low <= text[at] <= high:
            return False
        at += 1
        while more > 1:
            if text[at] & 0xC0 != 0x80:
                return False
            at += 1
            more -= 1
    return True


cdef str fault_text(Fault* fault):
    return f"{fault.what.decode('ascii')} (at byte {fault.at})"


# ── Writing ──────────────────────────────────────────────────────────────────────────────────────


def encode_envelope(str id not None, bytes payload not None, uint64_t created_at_ms, uint32_t attempt=0,
                    bytes retry=None):
    """The envelope's bytes. `retry` comes from `encode_retry`."""
    cdef Py_ssize_t id_size, size
    cdef const char* id_text = PyUnicode_AsUTF8AndSize(id, &id_size)
    cdef Py_ssize_t payload_size = PyBytes_GET_SIZE(payload)
    cdef Py_ssize_t retry_size = 0 if retry is None else PyBytes_GET_SIZE(retry)
    cdef bytes data
    if id_size > <Py_ssize_t>0xFFFFFFFF or payload_size > <Py_ssize_t>0xFFFFFFFF:
        raise ValueError("id and payload are limited to 4 GiB each")
    size = envelope_size(id_size, payload_size, created_at_ms, attempt, retry_size)
    data = PyBytes_FromStringAndSize(NULL, size)
    put_envelope(PyBytes_AS_STRING(data), id_text, id_size, PyBytes_AS_STRING(payload), payload_size,
                 created_at_ms, attempt, NULL if retry is None else PyBytes_AS_STRING(retry), retry_size)
    return data


def encode_retry(max_attempts=None, backoff=None):
    """The fifth element of an envelope: `backoff` is `(kind, delay_ms, max_delay_ms, multiplier, jitter_ms)`."""
    cdef char head[64]
    cdef char* out = head
    cdef const char* kind
    cdef Py_ssize_t kind_size
    cdef uint32_t attempts
    cdef bytes encoded
    out[0] = <char>0x92
    out += 1
    if max_attempts is None:
        out = put_nil(out)
    else:
        attempts = max_attempts
        out = put_uint(out, attempts)
    if backoff is None:
        out = put_nil(out)
        return PyBytes_FromStringAndSize(head, out - head)
    kind_text, delay_ms, max_delay_ms, multiplier, jitter_ms = backoff
    kind = PyUnicode_AsUTF8AndSize(kind_text, &kind_size)
    if kind_size > 255:
        raise ValueError("a backoff kind is limited to 255 bytes")
    out[0] = <char>0x95
    out = put_str_header(out + 1, kind_size)
    encoded = PyBytes_FromStringAndSize(head, out - head) + kind[:kind_size]
    out = put_uint(head, delay_ms)
    out = put_nil(out) if max_delay_ms is None else put_uint(out, max_delay_ms)
    out = put_nil(out) if multiplier is None else put_float(out, multiplier)
    out = put_nil(out) if jitter_ms is None else put_uint(out, jitter_ms)
    return encoded + PyBytes_FromStringAndSize(head, out - head)


def encode_delayed_member(str name not None, bytes envelope not None):
    """What the delayed set and `didx` hold: the name's length, the name, the envelope."""
    cdef Py_ssize_t name_size
    cdef const char* text = PyUnicode_AsUTF8AndSize(name, &name_size)
    cdef bytes member = PyBytes_FromStringAndSize(NULL, 4 + name_size + PyBytes_GET_SIZE(envelope))
    cdef char* out = PyBytes_AS_STRING(member)
    if name_size > <Py_ssize_t>0xFFFFFFFF:
        raise ValueError("a name is limited to 4 GiB")
    out = put_member_prefix(out, text, name_size)
    memcpy(out, PyBytes_AS_STRING(envelope), PyBytes_GET_SIZE(envelope))
    return member


cdef char* put_member_prefix(char* out, const char* name, Py_ssize_t name_size) noexcept nogil:
    cdef int i
    for i in range(4):
        out[i] = <char>(name_size >> (8 * i))
    memcpy(out + 4, name, name_size)
    return out + 4 + name_size


cdef Py_ssize_t envelope_size(Py_ssize_t id_size, Py_ssize_t payload_size, uint64_t created_at_ms,
                              uint64_t attempt, Py_ssize_t retry_size) noexcept nogil:
    return (1 + str_header_size(id_size) + id_size + bin_header_size(payload_size) + payload_size
            + uint_size(created_at_ms) + uint_size(attempt) + retry_size)


cdef char* put_envelope(char* out, const char* id, Py_ssize_t id_size, const char* payload,
                        Py_ssize_t payload_size, uint64_t created_at_ms, uint64_t attempt,
                        const char* retry, Py_ssize_t retry_size) noexcept nogil:
    out[0] = <char>(0x95 if retry_size else 0x94)
    out = put_str_header(out + 1, id_size)
    memcpy(out, id, id_size)
    out = put_bin_header(out + id_size, payload_size)
    memcpy(out, payload, payload_size)
    out = put_uint(out + payload_size, created_at_ms)
    out = put_uint(out, attempt)
    if retry_size:
        memcpy(out, retry, retry_size)
    return out + retry_size

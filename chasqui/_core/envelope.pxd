cimport cython
from libc.stdint cimport uint32_t, uint64_t

from chasqui._core.msgpack cimport STACK, Fault

cdef enum:
    MAX_DEPTH = STACK           # nesting that any decoder of ours follows
    MEMBER_PREFIX = 4           # bytes before the name in a delayed member


cdef struct RetryView:
    bint has_max_attempts
    bint has_backoff
    bint has_max_delay
    bint has_multiplier
    bint has_jitter
    uint32_t max_attempts
    uint64_t delay_ms
    uint64_t max_delay_ms
    uint64_t jitter_ms
    double multiplier
    Py_ssize_t kind_at, kind_size


cdef struct EnvelopeView:
    # Offsets into the envelope: nothing is copied until somebody asks.
    Py_ssize_t id_at, id_size
    Py_ssize_t payload_at, payload_size
    Py_ssize_t attempt_at, attempt_end
    uint64_t created_at_ms
    uint32_t attempt
    RetryView retry


@cython.final
cdef class Envelope:
    cdef bytes _data            # the encoded envelope, whole
    cdef EnvelopeView _view


cdef int read_envelope(const unsigned char* data, Py_ssize_t size, EnvelopeView* view, Fault* fault) noexcept
cdef Py_ssize_t envelope_size(Py_ssize_t id_size, Py_ssize_t payload_size, uint64_t created_at_ms,
                              uint64_t attempt, Py_ssize_t retry_size) noexcept nogil
cdef char* put_envelope(char* out, const char* id, Py_ssize_t id_size, const char* payload,
                        Py_ssize_t payload_size, uint64_t created_at_ms, uint64_t attempt,
                        const char* retry, Py_ssize_t retry_size) noexcept nogil
cdef char* put_member_prefix(char* out, const char* name, Py_ssize_t name_size) noexcept nogil
cdef str text_at(bytes data, Py_ssize_t at, Py_ssize_t size)
cdef object retry_tuple(bytes data, RetryView* view)
cdef bytes with_attempt(bytes data, EnvelopeView* view, uint32_t attempt)
cdef str fault_text(Fault* fault)

cimport cython

from chasqui._core.envelope cimport EnvelopeView
from chasqui._core.reply cimport Builder


@cython.final
cdef class Entry:
    cdef readonly bytes id              # in its stream, such as b"1794797194831-0"
    cdef readonly bytes envelope        # field `d`, whole; None if there was none
    cdef readonly str name              # field `n`; empty if there was none
    cdef readonly dict extra            # every other field, bytes to bytes; None if there was none
    cdef readonly str fault             # why it cannot run: malformed, oversize_payload, decode_failed, gone, left
    cdef readonly str detail            # what exactly was wrong
    cdef readonly long long idle_ms     # since its last delivery; 0 if the reply did not say
    cdef readonly long long deliveries  # 0 if the reply did not say
    cdef EnvelopeView _view             # where the parts are in `envelope`

    cdef bytes _decoded(self)
    cdef bint has_untold_created(self) noexcept


@cython.final
cdef class EntryBuilder(Builder):
    cdef readonly str shape
    cdef int _shape                     # one of Shape
    cdef Py_ssize_t _max_envelope_bytes
    cdef Py_ssize_t _max_bytes          # of values kept of one reply; what begins beyond that is left
    cdef Py_ssize_t _bytes              # of values kept so far
    cdef readonly Py_ssize_t left       # entries of the last reply that were left
    cdef readonly Py_ssize_t largest    # bytes of the largest value in it
    cdef int _base                      # the depth at which entries lie in this reply; 0: not a reply of entries
    cdef list _entries                  # what was built so far
    cdef Entry _entry                   # the one under way
    cdef int _field                     # what the next value is
    cdef bytes _field_name              # if it is none of ours
    cdef bytes _name_bytes              # the last name seen: most entries of a read share theirs
    cdef str _name

    cdef int _begin(self, int kind) except -1
    cdef int _open(self, int depth, int kind, int place, Py_ssize_t size) except -1
    cdef int _text(self, int depth, int place, const char* text, Py_ssize_t size) except -1
    cdef int _value(self, const char* text, Py_ssize_t size) except -1

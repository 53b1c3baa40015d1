cimport cython

from chasqui._core.column cimport Block, Column
from chasqui._core.reply cimport Builder


@cython.final
cdef class ColumnBuilder(Builder):
    cdef bint _is_page                  # the reply under way holds entries
    cdef list _columns                  # all of them, those of fields first
    cdef Py_ssize_t _fields             # how many are of fields
    cdef Py_ssize_t _next               # where to look for the next field first: entries are alike
    cdef Column _entry_id, _entry_ms    # None where they are not wanted, as all below
    cdef Column _job_id, _payload, _created_ms, _attempt, _envelope
    cdef Column _extra_names, _extra_values
    cdef Block _extra_ends              # per row: how many extras there are up to its end, int32
    cdef bint _has_envelopes            # field `d` is decoded
    cdef dict _retries                  # by row, where a job overrides something
    cdef dict _corrupt                  # by row, what could not be decoded
    cdef Py_ssize_t _rows               # entries of whole replies
    cdef Py_ssize_t _row                # the entry under way
    cdef bint _is_open                  # there is one
    cdef bint _was_decoded              # its envelope was, or is corrupt
    cdef Py_ssize_t _size               # bytes of values so far, kept or not
    cdef bytes _last_id                 # of the entry under way
    cdef int _slot                      # what the next value is for: a column, or one of Target
    cdef bytes _extra_name

    cdef int _open(self, int depth, int kind, int place, Py_ssize_t size) except -1
    cdef int _close_entry(self) except -1
    cdef int _text(self, int depth, int place, const char* text, Py_ssize_t size) except -1
    cdef int _choose(self, const char* text, Py_ssize_t size) except -1
    cdef int _value(self, const char* text, Py_ssize_t size) except -1
    cdef int _decode(self, const char* text, Py_ssize_t size) except -1
    cdef int _put_extra(self, const char* text, Py_ssize_t size) except -1
    cdef int _cut(self, Py_ssize_t rows) except -1

"""What the entries of a bulk say about their jobs besides name and data, and what follows from it for the frame.

As with payloads, only what is plain is taken here; whatever is not, the caller looks at himself and says what is wrong.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_CheckExact, PyDict_Next
from cpython.ref cimport PyObject
from cpython.unicode cimport PyUnicode_CheckExact
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

from chasqui._core.ulid cimport UlidFactory


cdef extern from "Python.h":
    bint PyLong_CheckExact(object number)
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    void* PyUnicode_1BYTE_DATA(object text)


cdef enum:
    LONGEST_ID = 256            # bytes


cdef struct Options:
    # Of one entry, borrowed from it; NULL where it says nothing.
    PyObject* attempts
    PyObject* backoff
    PyObject* delay_ms
    PyObject* job_id


@cython.boundscheck(True)
def read_options(list entries not None, list special not None, Py_ssize_t at, long long most_ahead_ms,
                 dict encoded not None, list ids not None, list retries not None, list kinds not None,
                 list dues not None):
    """Read the options of the entries whose indexes are in `special`, from its place `at` on, as long as they are
    plain; the place of the first that is not.

    Plain are a delay that is an int of at most `most_ahead_ms`, an id of ASCII that a job may have, and attempts and
    backoff that are in `encoded`, by the attempts and the address of the backoff, with what they come to.
    """
    cdef Py_ssize_t i
    cdef long long ahead_ms
    cdef Options said
    cdef int kind
    while at < len(special):
        i = special[at]
        entry = entries[i]
        if not PyDict_CheckExact(entry) or not _sort(entry, &said):
            break
        kind = 0
        ahead_ms = 0
        if said.delay_ms != NULL:
            ahead_ms = _plain_int(<object>said.delay_ms)
            if not 0 <= ahead_ms <= most_ahead_ms:
                break
            if ahead_ms:
                kind = DELAYED | RELATIVE
        job_id = None if said.job_id == NULL else <object>said.job_id
        if job_id is not None:
            if not _is_plain_id(job_id):
                break
            kind |= UNIQUE
        if said.attempts != NULL or said.backoff != NULL:
            attempts = None if said.attempts == NULL else <object>said.attempts
            if attempts is not None and not PyLong_CheckExact(attempts):
                break                           # True is 1, and no number of attempts
            backoff = <PyObject*>None if said.backoff == NULL else said.backoff
            # To make a tuple may run anybody's finalizer: from here on nothing borrowed is looked at.
            known = encoded.get((attempts, <uintptr_t>backoff))
            if known is None:
                break
            retries[i] = (<tuple?>known)[0]
        if kind:
            kinds[i] = kind
            dues[i] = ahead_ms
            if job_id is not None:
                ids[i] = job_id
        at += 1
    return at


cdef bint _sort(dict entry, Options* said) noexcept:
    """Which option is which; False if there is one that only the caller knows what to do with."""
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    cdef str name
    said.attempts = said.backoff = said.delay_ms = said.job_id = NULL
    while PyDict_Next(entry, &at, &key, &value):
        if not PyUnicode_CheckExact(<object>key):
            return False
        name = <str><object>key
        if name is "name" or name is "data":    # every entry has them, and mostly these very texts
            continue
        if name == "attempts":
            said.attempts = _unless_none(value)
        elif name == "backoff":
            said.backoff = _unless_none(value)
        elif name == "delay_ms":
            said.delay_ms = _unless_none(value)
        elif name == "job_id":
            said.job_id = _unless_none(value)
        elif name == "name" or name == "data":
            continue
        elif <object>value is not None or not (name == "delay" or name == "repeat" or name == "missed_fires"):
            return False
    return True


cdef inline PyObject* _unless_none(PyObject* value) noexcept:
    return NULL if <object>value is None else value


cdef long long _plain_int(object number) except? -1:
    """The number, or -1 for what is none, or not a plain one, or far too large."""
    cdef int overflow
    if not PyLong_CheckExact(number):
        return -1
    return PyLong_AsLongLongAndOverflow(number, &overflow)      # which is -1 if it overflows


cdef bint _is_plain_id(object job_id) noexcept:
    """Whether it is ASCII that an id may be: with a letter that is no space, and without braces and controls."""
    cdef Py_ssize_t size, i
    cdef const unsigned char* text
    cdef bint is_blank = True
    if not PyUnicode_CheckExact(job_id) or not PyUnicode_IS_COMPACT_ASCII(job_id):
        return False
    size = len(<str>job_id)
    if size > LONGEST_ID:
        return False
    text = <const unsigned char*>PyUnicode_1BYTE_DATA(job_id)
    if size > 0 and text[0] == c'~':            # which only the steps of flows begin with
        return False
    for i in range(size):
        if text[i] < c' ' or text[i] == c'{' or text[i] == c'}' or text[i] == 0x7F:
            return False
        if text[i] != c' ':
            is_blank = False
    return not is_blank


@cython.boundscheck(True)
def draw_delayed_ids(UlidFactory ulids not None, uint64_t now_ms, list kinds not None, list ids not None):
    """The ids, and one drawn for each delayed job that has none."""
    cdef Py_ssize_t i
    cdef list drawn = list(ids)
    ulids.begin()
    for i in range(len(kinds)):
        if drawn[i] is None and <int>kinds[i] & DELAYED:
            drawn[i] = ulids.take(now_ms)
    return drawn


@cython.boundscheck(True)
def job_keys(list kinds not None, list ids not None, bytes didx not None, bytes trace, bytes unique not None,
             bytes dlid not None, bytes result not None):
    """The keys of each job's own, in the order in which the script takes them; what each begins with is given, and
    `trace` only if the jobs have one."""
    cdef Py_ssize_t i
    cdef int kind
    cdef list keys = []
    for i in range(len(kinds)):
        kind = kinds[i]
        if kind & DELAYED:
            keys.append(_key(didx, ids[i]))
            if trace is not None:
                keys.append(_key(trace, ids[i]))
        if kind & UNIQUE:
            keys.append(_key(unique, ids[i]))
            keys.append(_key(dlid, ids[i]))
            keys.append(_key(result, ids[i]))
    return keys


cdef bytes _key(bytes prefix, str job_id):
    cdef Py_ssize_t before = PyBytes_GET_SIZE(prefix), size
    if job_id is None:
        raise TypeError("a job whose keys are asked for has an id")
    cdef const char* text = PyUnicode_AsUTF8AndSize(job_id, &size)
    cdef bytes key = PyBytes_FromStringAndSize(NULL, before + size)
    memcpy(PyBytes_AS_STRING(key), PyBytes_AS_STRING(prefix), before)
    memcpy(PyBytes_AS_STRING(key) + before, text, size)
    return key

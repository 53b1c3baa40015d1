"""The commands of the data path, written field by field into a CommandBuffer.

Everything that happens once per job is here. Each function appends whole commands; if it raises, nothing.
Keys, groups and scripts come from the caller: the core knows the form of a command, not its meaning.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from chasqui._core.buffer cimport HEADER_BYTES, CommandBuffer, decimal_width, put_bulk, put_decimal, put_header
from chasqui._core.entry cimport Entry
from chasqui._core.envelope cimport envelope_size, put_envelope
from chasqui._core.msgpack cimport put_array_header, put_str_header
from chasqui._core.ulid cimport ULID_CHARS, UlidFactory


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 highest)
    void* PyUnicode_1BYTE_DATA(object text)


cdef struct JobView:
    # One row of a bulk, borrowed from the caller's lists for the length of one frame.
    const char* id
    const char* payload
    const char* name
    const char* retry
    Py_ssize_t id_size, payload_size, name_size, retry_size
    Py_ssize_t envelope_size
    char drawn[ULID_CHARS]      # the id, when the caller gave none


# ── Adding jobs ──────────────────────────────────────────────────────────────────────────────────


def evalsha_jobs(CommandBuffer buffer not None, bytes sha not None, keys, arguments,
                 UlidFactory ulids not None, uint64_t now_ms,
                 list payloads not None, names="", list ids=None, list retries=None, list due_ms=None):
    """One EVALSHA that carries a whole chunk of jobs; returns the job ids.

    Behind `arguments` come, for each job, its envelope, its name unless `names` is None, and with `due_ms` its due
    time.
    """
    cdef Py_ssize_t count = len(payloads), start = buffer._len, i
    cdef bint has_names = names is not None
    cdef Py_ssize_t per_job = 1 + has_names + (due_ms is not None)
    cdef list answer = []
    cdef uint64_t due = 0
    cdef JobView job
    cdef char* out
    if not has_names:
        names = ""
    _check_columns(count, names, ids, retries)
    if due_ms is not None and len(due_ms) != count:
        raise ValueError(f"{len(due_ms)} due times for {count} payloads")
    ulids.begin()
    try:
        _evalsha_head(buffer, sha, keys, arguments, per_job * count)
        for i in range(count):
            if due_ms is not None:
                due = _due(due_ms, i)
            answer.append(_load(&job, i, payloads, names, ids, retries, ulids, now_ms))
            out = buffer.reserve(6 * HEADER_BYTES + job.envelope_size + job.name_size + job.id_size)
            out = _put_job(out, &job, now_ms)
            if has_names:
                out = put_bulk(out, job.name, job.name_size)
            if due_ms is not None:
                out = _put_number(out, due)
            buffer.advance(out)
    except BaseException:
        buffer._len = start
        raise
    buffer.commands += 1
    return answer


def slices_by_size(list payloads not None, Py_ssize_t most_jobs, Py_ssize_t most_bytes):
    """Slices of at most `most_jobs` payloads and `most_bytes` bytes; a larger payload gets a slice of its own."""
    cdef Py_ssize_t count = len(payloads), start = 0, size = 0, i
    cdef Py_ssize_t longer
    cdef list parts = []
    for i in range(count):
        payload = payloads[i]
        if not PyBytes_CheckExact(payload):
            raise TypeError(f"payloads[{i}] must be bytes, got {type(payload).__name__}")
        longer = size + PyBytes_GET_SIZE(payload)
        if i > start and (i - start >= most_jobs or longer > most_bytes):
            parts.append(slice(start, i))
            start, longer = i, PyBytes_GET_SIZE(payload)
        size = longer
    if count:
        parts.append(slice(start, count))
    return parts


@cython.boundscheck(True)          # a comparison may run user code
def common_name(list names not None):
    """The one name in the list; None if there are several, or none."""
    cdef Py_ssize_t count = len(names), i
    if not count:
        return None
    name = names[0]
    for i in range(1, count):
        if names[i] is not name and names[i] != name:
            return None
    return name


def pack_jobs(UlidFactory ulids not None, uint64_t now_ms, list payloads not None, list ids=None,
              list retries=None):
    """The envelopes of a chunk of jobs as one msgpack array of texts, which a script unpacks.

    A script that only stores them takes a third of the time that many arguments would take.
    """
    cdef CommandBuffer buffer = CommandBuffer()
    cdef Py_ssize_t count = len(payloads), i
    cdef JobView job
    cdef char* out
    _check_columns(count, "", ids, retries)
    buffer.advance(put_array_header(buffer.reserve(5), count))
    ulids.begin()
    for i in range(count):
        _load(&job, i, payloads, "", ids, retries, ulids, now_ms)
        out = put_str_header(buffer.reserve(5 + job.envelope_size), job.envelope_size)
        buffer.advance(put_envelope(out, job.id, job.id_size, job.payload, job.payload_size, now_ms, 0,
                                    job.retry, job.retry_size))
    return bytes(buffer)


cdef int _check_columns(Py_ssize_t count, object names, list ids, list retries) except -1:
    if not isinstance(names, str) and len(<list?>names) != count:
        raise ValueError(f"{len(names)} names for {count} payloads")
    if ids is not None and len(ids) != count:
        raise ValueError(f"{len(ids)} ids for {count} payloads")
    if retries is not None and len(retries) != count:
        raise ValueError(f"{len(retries)} retries for {count} payloads")
    return 0


@cython.boundscheck(True)          # the lists are the caller's: another thread may shorten them
cdef str _load(JobView* job, Py_ssize_t i, list payloads, object names, list ids, list retries,
               UlidFactory ulids, uint64_t now_ms):
    """Point `job` at row `i`; returns its id. The lists keep the borrowed memory alive, so no Python code
    may run from the first pointer taken here to the end of the frame."""
    cdef object id = None if ids is None else ids[i]
    if id is None:
        ulids.step(now_ms)
        memcpy(job.drawn, ulids.text, ULID_CHARS)
    cdef object payload = payloads[i], name = names if isinstance(names, str) else (<list>names)[i]
    cdef object retry = None if retries is None else retries[i]
    if not PyBytes_CheckExact(payload):
        raise TypeError(f"payloads[{i}] must be bytes, not {type(payload).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"names[{i}] must be str, not {type(name).__name__}")
    job.payload = PyBytes_AS_STRING(payload)
    job.payload_size = PyBytes_GET_SIZE(payload)
    job.name = PyUnicode_AsUTF8AndSize(name, &job.name_size)
    if retry is None:
        job.retry = NULL
        job.retry_size = 0
    elif PyBytes_CheckExact(retry):
        job.retry = PyBytes_AS_STRING(retry)
        job.retry_size = PyBytes_GET_SIZE(retry)
    else:
        raise TypeError(f"retries[{i}] must be bytes or None, not {type(retry).__name__}")
    if id is None:
        job.id = job.drawn
        job.id_size = ULID_CHARS
        id = PyUnicode_New(ULID_CHARS, 127)
        memcpy(PyUnicode_1BYTE_DATA(id), job.drawn, ULID_CHARS)
    elif isinstance(id, str):
        job.id = PyUnicode_AsUTF8AndSize(id, &job.id_size)
    else:
        raise TypeError(f"ids[{i}] must be str or None, not {type(id).__name__}")
    if job.payload_size > <Py_ssize_t>0xFFFFFFFF or job.id_size > <Py_ssize_t>0xFFFFFFFF:
        raise ValueError(f"payloads[{i}] or ids[{i}] is beyond 4 GiB")
    job.envelope_size = envelope_size(job.id_size, job.payload_size, now_ms, 0, job.retry_size)
    return id


@cython.boundscheck(True)
cdef uint64_t _due(list due_ms, Py_ssize_t i) except? 0:
    return due_ms[i]


cdef char* _put_job(char* out, JobView* job, uint64_t now_ms) noexcept nogil:
    """The envelope as one argument, encoded in place."""
    out = put_header(out, c'$', job.envelope_size)
    out = put_envelope(out, job.id, job.id_size, job.payload, job.payload_size, now_ms, 0, job.retry, job.retry_size)
    out[0] = c'\r'
    out[1] = c'\n'
    return out + 2


cdef char* _put_number(char* out, uint64_t number) noexcept nogil:
    out = put_decimal(put_header(out, c'$', decimal_width(number)), number)
    out[0] = c'\r'
    out[1] = c'\n'
    return out + 2


# ── The rest of the data path ────────────────────────────────────────────────────────────────────


def xadd_event(CommandBuffer buffer not None, bytes key not None, bytes event not None, str job_id not None,
               uint64_t ts_ms, str name not None, fields=None):
    """XADD of a lifecycle event: `e`, `id`, `ts`, `n` unless it is empty, then `fields`."""
    cdef list pairs = [b"e", event, b"id", job_id, b"ts", ts_ms]
    if name:
        pairs += [b"n", name]
    if fields:
        pairs.extend(fields)
    if len(pairs) % 2:
        raise ValueError("fields must be a flat list of pairs")
    buffer.command(b"XADD", key, b"*", *pairs)


def xadd_run_event(CommandBuffer buffer not None, bytes key not None, bytes event not None, Entry entry not None,
                   uint64_t ts_ms, uint64_t attempt, long long duration_us=-1):
    """XADD of an event that every run of an entry has: its begin or its end, with the time it took (-1: left
    out), and the job's creation time if its id does not hold it.

    Writes the same bytes as `xadd_event` without a Python object in between: every job has two of them.
    """
    cdef Py_ssize_t name_size, id_size = 0, arguments = 11
    cdef bint has_created = entry.has_untold_created()
    cdef const char* name = PyUnicode_AsUTF8AndSize(entry.name, &name_size)
    cdef const char* id = b""
    cdef char* out
    if entry.envelope is not None:
        id = PyBytes_AS_STRING(entry.envelope) + entry._view.id_at
        id_size = entry._view.id_size
    if name_size:
        arguments += 2
    if duration_us >= 0:
        arguments += 2
    if has_created:
        arguments += 2
    out = buffer.reserve(26 * HEADER_BYTES + PyBytes_GET_SIZE(key) + PyBytes_GET_SIZE(event) + id_size + name_size)
    out = put_header(out, c'*', arguments)
    out = put_bulk(out, b"XADD", 4)
    out = put_bulk(out, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
    out = put_bulk(out, b"*", 1)
    out = put_bulk(out, b"e", 1)
    out = put_bulk(out, PyBytes_AS_STRING(event), PyBytes_GET_SIZE(event))
    out = put_bulk(out, b"id", 2)
    out = put_bulk(out, id, id_size)
    out = put_bulk(out, b"ts", 2)
    out = _put_number(out, ts_ms)
    if name_size:
        out = put_bulk(out, b"n", 1)
        out = put_bulk(out, name, name_size)
    out = put_bulk(out, b"attempt", 7)
    out = _put_number(out, attempt)
    if duration_us >= 0:
        out = put_bulk(out, b"duration_us", 11)
        out = _put_number(out, duration_us)
    if has_created:
        out = put_bulk(out, b"created", 7)
        out = _put_number(out, entry._view.created_at_ms)
    buffer.advance(out)
    buffer.commands += 1


def xackdel(CommandBuffer buffer not None, bytes key not None, bytes group not None, list ids not None):
    """XACKDEL of many entry ids; one answer per id."""
    _id_command(buffer, b"XACKDEL", key, group, True, ids)


def evalsha(CommandBuffer buffer not None, bytes sha not None, keys, arguments):
    """EVALSHA of a loaded script."""
    cdef Py_ssize_t start = buffer._len
    try:
        _evalsha_head(buffer, sha, keys, arguments, 0)
    except BaseException:
        buffer._len = start
        raise
    buffer.commands += 1


def xreadgroup(CommandBuffer buffer not None, bytes group not None, bytes consumer not None, bytes key not None, *,
               count=None, block_ms=None, claim_min_idle_ms=None, bytes last_id not None=b">"):
    """XREADGROUP of one stream: new entries (`>`), or the consumer's own pending ones after an id."""
    cdef list words = [b"XREADGROUP", b"GROUP", group, consumer]
    if count is not None:
        words += [b"COUNT", count]
    if block_ms is not None:
        words += [b"BLOCK", block_ms]
    if claim_min_idle_ms is not None:
        words += [b"CLAIM", claim_min_idle_ms]
    buffer.command(*words, b"STREAMS", key, last_id)


cdef int _id_command(CommandBuffer buffer, bytes name, bytes key, bytes group, bint counted, list ids) except -1:
    """`name key [group] [IDS n] id…`: acknowledgements are per job, so this one is written raw."""
    cdef Py_ssize_t start = buffer._len
    if not ids:
        raise ValueError("ids must not be empty")
    try:
        buffer.write_header(c'*', 2 + (group is not None) + (2 if counted else 0) + len(ids))
        _write(buffer, name)
        _write(buffer, key)
        if group is not None:
            _write(buffer, group)
        if counted:
            _write(buffer, b"IDS")
            buffer.write_number(len(ids))
        for id in ids:
            _write(buffer, <bytes?>id)
    except BaseException:
        buffer._len = start
        raise
    buffer.commands += 1
    return 0


cdef int _evalsha_head(CommandBuffer buffer, bytes sha, object keys, object arguments, Py_ssize_t more) except -1:
    buffer.write_header(c'*', 3 + len(keys) + len(arguments) + more)
    _write(buffer, b"EVALSHA")
    _write(buffer, sha)
    buffer.write_number(len(keys))
    for key in keys:
        buffer.write_argument(key)
    for argument in arguments:
        buffer.write_argument(argument)
    return 0


cdef int _write(CommandBuffer buffer, bytes argument) except -1:
    return buffer.write_bulk(PyBytes_AS_STRING(argument), PyBytes_GET_SIZE(argument))

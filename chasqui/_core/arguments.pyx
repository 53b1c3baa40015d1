"""Arguments of a call as a map by the names of parameters, where every value is plain.

As with payloads, only what is plain is taken here; the caller looks at the rest himself and says what is wrong.
"""

cimport cython
from cpython.dict cimport PyDict_CheckExact, PyDict_GetItemWithError, PyDict_SetItem, PyDict_Size
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE


@cython.final
cdef class Arguments:
    """The parameters of a function: those that may be given by position come first."""

    def __init__(self, tuple names not None, tuple types not None, tuple required not None,
                 Py_ssize_t positional):
        self.count = len(names)
        if len(types) != self.count or len(required) != self.count or not 0 <= positional <= self.count:
            raise ValueError("names, types and required must be equally long, and hold all that is positional")
        self.names = names
        self.types = types
        self.required = required
        self.positional = positional

    cdef inline bint is_plain(self, Py_ssize_t i, object value) noexcept:
        kind = <object>PyTuple_GET_ITEM(self.types, i)
        return kind is None or type(value) is kind

    def bind(self, tuple args not None, dict kwargs not None):
        """The map of what was passed, in the order of the parameters; None if the call is not plain or wrong."""
        cdef Py_ssize_t i, given = PyTuple_GET_SIZE(args), named = PyDict_Size(kwargs)
        cdef PyObject* found
        cdef dict data = {}
        if given > self.positional:
            return None
        for i in range(self.count):
            if i < given:
                value = <object>PyTuple_GET_ITEM(args, i)
            else:
                found = PyDict_GetItemWithError(kwargs, <object>PyTuple_GET_ITEM(self.names, i)) if named else NULL
                if found == NULL:
                    if <object>PyTuple_GET_ITEM(self.required, i) is True:
                        return None
                    continue
                value = <object>found
                named -= 1
            if not self.is_plain(i, value):
                return None
            PyDict_SetItem(data, <object>PyTuple_GET_ITEM(self.names, i), value)
        return None if named else data

    def fit(self, data):
        """Whether the function can be called with this map as its keywords."""
        cdef Py_ssize_t i, left
        cdef PyObject* found
        if not PyDict_CheckExact(data):
            return False
        left = PyDict_Size(data)
        for i in range(self.count):
            found = PyDict_GetItemWithError(data, <object>PyTuple_GET_ITEM(self.names, i))
            if found == NULL:
                if <object>PyTuple_GET_ITEM(self.required, i) is True:
                    return False
                continue
            if not self.is_plain(i, <object>found):
                return False
            left -= 1
        return left == 0


cdef class BoundCall:
    """A task and the data of one call of it; thousands are made for one bulk."""

    def __cinit__(self, task, data):
        self.task = task
        self.data = data

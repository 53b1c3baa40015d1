"""Many instances of a class with slots, made without a call to it for each: that is most of what one costs."""

cimport cython
from cpython.list cimport PyList_CheckExact, PyList_New, PyList_SET_ITEM
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM


cdef extern from "structmember.h":
    ctypedef struct PyMemberDef:
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef* d_member

cdef extern from "Python.h":
    object PyType_GenericAlloc(type cls, Py_ssize_t items)


class _Plain:
    """Shows what the slot of a class is."""

    __slots__ = ("slot",)


@cython.final
cdef class Slots:
    """Makes instances of one class whose state is its own `__slots__`, given in their order.

    Neither `__new__` nor `__init__` runs: what they would check, whoever calls this has checked.
    """

    def __init__(self, type cls not None):
        names = cls.__dict__.get("__slots__")
        if type(names) is not tuple or len(names) > MOST or cls.__base__ is not object:
            raise TypeError(f"{cls.__name__} must have a tuple of at most {MOST} slots, and no base but object")
        self.cls = cls
        self.count = len(names)
        for i, name in enumerate(names):
            slot = cls.__dict__.get(name)
            if type(slot) is not type(_Plain.slot):
                raise TypeError(f"{cls.__name__}.{name} must be a slot")
            self.offsets[i] = (<PyMemberDescrObject*>slot).d_member.offset

    @cython.boundscheck(True)  # to allocate may run anybody's finalizer, and that may change the lists
    def make(self, Py_ssize_t count, *columns):
        """So many instances. A column is a list of a value for each, or one value for all of them."""
        cdef Py_ssize_t i, row
        if len(columns) != self.count:
            raise TypeError(f"{self.cls.__name__} has {self.count} slots, not {len(columns)}")
        if count < 0:
            raise ValueError(f"there are no {count} instances")
        for values in columns:
            if PyList_CheckExact(values) and len(<list>values) != count:
                raise ValueError(f"a column has {len(<list>values)} values for {count} instances")
        cdef list instances = PyList_New(count)
        cdef PyObject* common[MOST]         # of each column that is one value, that value
        for i in range(self.count):
            value = <object>PyTuple_GET_ITEM(columns, i)
            common[i] = NULL if PyList_CheckExact(value) else <PyObject*>value
        for row in range(count):
            instance = PyType_GenericAlloc(self.cls, 0)
            for i in range(self.count):
                if common[i] != NULL:
                    self.put(instance, i, <object>common[i])
                else:
                    self.put(instance, i, (<list>PyTuple_GET_ITEM(columns, i))[row])
            Py_INCREF(instance)
            PyList_SET_ITEM(instances, row, instance)
        return instances

    cdef inline void put(self, object instance, Py_ssize_t i, object value) noexcept:
        Py_INCREF(value)
        (<PyObject**>(<char*><void*>instance + self.offsets[i]))[0] = <PyObject*>value

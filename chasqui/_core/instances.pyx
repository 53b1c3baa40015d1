"""Makes many instances of a class with `__slots__` without calling it: the call is most of their cost."""

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
    """Shows the type of a class's slot."""

    __slots__ = ("slot",)


@cython.final
cdef class InstanceFactory:
    """Makes instances of one class whose state is the `__slots__` of one class, given in their order: its own,
    or those of a base.

    Neither `__new__` nor `__init__` runs: the caller has checked what they would check.
    """

    def __init__(self, type cls not None):
        owners = [one for one in cls.__mro__ if one.__dict__.get("__slots__")]
        names = owners[0].__slots__ if len(owners) == 1 else None
        if type(names) is not tuple or len(names) > MOST:
            raise TypeError(f"{cls.__name__} must have a tuple of at most {MOST} slots, all of one class")
        self.cls = cls
        self.count = len(names)
        for i, name in enumerate(names):
            slot = owners[0].__dict__.get(name)
            if type(slot) is not type(_Plain.slot):
                raise TypeError(f"{cls.__name__}.{name} must be a slot")
            self.offsets[i] = (<PyMemberDescrObject*>slot).d_member.offset
        if cls.__dictoffset__ or cls.__basicsize__ != object.__basicsize__ + self.count * sizeof(PyObject*):
            raise TypeError(f"{cls.__name__} must have no state but its slots")

    @cython.boundscheck(True)  # allocating may run a finalizer that changes the lists
    def make(self, Py_ssize_t count, *columns):
        """`count` instances. A column is a list with one value each, or one value for all of them."""
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

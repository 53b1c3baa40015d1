cdef enum Kind:                 # in this order: numbers, runs of bytes, short texts, what has columns inside
    NOTHING                     # no row has a value
    BOOL
    INT8
    INT16
    INT32
    INT64
    FLOAT
    DOUBLE
    TEXT
    BINARY
    DATE                        # days, int32
    MOMENT                      # microseconds UTC
    LOCAL                       # microseconds of no zone
    CLOCK                       # nanoseconds of the day
    DECIMAL                     # 128 bits
    LIST
    MAP
    STRUCT


cdef dict KINDS                 # by name
cdef dict WIDTHS                # bytes of a value, by name

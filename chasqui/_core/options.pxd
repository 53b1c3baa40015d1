# What a job's kind is made of.
cpdef enum:
    DELAYED = 1
    UNIQUE = 2
    RELATIVE = 4                # its due time counts from now

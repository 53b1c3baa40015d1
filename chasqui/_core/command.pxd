# Commands are written for Python callers: there is nothing to cimport.

# Rows come as buffers and leave as bytes, for Python callers: there is nothing to cimport.

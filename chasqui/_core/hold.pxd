# Used from Python: there is nothing to cimport.

# Asked once per failed run, from Python: there is nothing to cimport.

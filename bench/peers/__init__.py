"""One file per library: the few calls that a scenario makes of it, at the settings that its
documentation recommends for speed. Each runs in its library's own environment, so these modules
import nothing but that library and the harness."""

"""The version that is installed, from the package's own metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("chasqui")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0"

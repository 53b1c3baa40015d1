"""Runs every measurement that README.md shows: `make bench`."""

import sys

from bench import core

sys.exit(core.main())

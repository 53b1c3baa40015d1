"""Values to what msgpack holds and back, by annotation: what a task's parameters and results need.

`converter_for` compiles an annotation once; its `Converter` then encodes and decodes. docs/types.md
has the table of what becomes of each type, which does not depend on what is installed.
"""

from chasqui.converting.compiler import converter_for
from chasqui.converting.converter import Converter
from chasqui.errors import ConversionError

__all__ = ["ConversionError", "Converter", "converter_for"]
